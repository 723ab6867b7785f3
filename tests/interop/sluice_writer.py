"""This program appends with Sluice until it is killed.

Its words are the store's directory and the port that message ids name. One JSON line tells
each append that was acknowledged, right after it was. Half-way a checkpoint is taken, so that
Apache finds the settings, and messages that no queue file holds yet.
"""

import json
import random
import sys
from itertools import count
from pathlib import Path

from tests.interop.store_load import make_message, make_topics, open_sluice, sha256

CHECKPOINT_AFTER = 700


def main(directory: str, port: str) -> None:
    source = random.Random(40)
    with open_sluice(Path(directory), int(port)) as store:
        make_topics(store)
        for number in count():
            message = make_message(number, source)
            placed = store.put(message)
            event = {
                "event": "sent",
                "topic": message.topic,
                "queueId": message.queue_id,
                "queueOffset": placed.queue_offset,
                "bodySha256": sha256(message.body),
                "flag": message.flag,
            }
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
            if number == CHECKPOINT_AFTER:
                store.checkpoint()


if __name__ == "__main__":
    main(*sys.argv[1:])
