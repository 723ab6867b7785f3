"""`sluice send` and `sluice tail` in this process, beside a broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sluice import Message, Producer
from tests.unit.client.admin_kit import Site, one_line, sluice


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


def wait_for_route(site: Site, topic: str) -> None:
    """A broker tells the nameserver of a new topic after it has answered the send."""
    while site.admin("topicRoute", "-t", topic).status:
        time.sleep(0.005)


def test_lines_go_out_as_they_come(site: Site) -> None:
    def count() -> int:
        return sum(site.broker.core.store.max_offset("Piped", number) for number in range(4))

    command = [sys.executable, "-m", "sluice", "send", "Piped", "-n", site.nameserver.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdin is not None
        sender.stdin.write(b"first\n\n")
        sender.stdin.flush()
        while not count():
            time.sleep(0.005)
        assert sender.poll() is None
        out, _ = sender.communicate(b"second\nthird", timeout=60)
    assert sender.returncode == 0
    assert len(out.splitlines()) == count() == 3


def test_packed_bodies_are_shown_as_they_were_given(site: Site) -> None:
    body = "a long line, " * 1000
    with Producer(site.nameserver.address) as producer:
        producer.send(Message("Packed", body))
    wait_for_route(site, "Packed")
    tail = ("tail", "Packed", "-n", site.nameserver.address, "--from-beginning", "--count", "1")
    assert json.loads(sluice(*tail, "--json").out)["body"] == body
    assert body[:2000] in sluice(*tail).out


def test_a_tail_ends_with_ctrl_c_and_says_nothing(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:
        producer.send(Message("Watched", "first"))
    wait_for_route(site, "Watched")
    command = [sys.executable, "-m", "sluice", "tail", "Watched", "--from-beginning"]
    command += ["-n", site.nameserver.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline().endswith(b"first\n")
        tail.send_signal(signal.SIGINT)
        out, err = tail.communicate(timeout=60)
    assert (tail.returncode, out, err) == (130, b"", b"")


def test_a_count_that_cannot_be(site: Site) -> None:
    for command in (("send", "x", "y"), ("tail", "x")):
        done = sluice(*command, "-n", site.nameserver.address, "--count", "-3")
        assert "--count -3: at least 1" in one_line(done, 2)


def test_a_tail_of_several_queues_ends_and_leaves_no_connection(site: Site) -> None:
    """All queues want the broker's connection at once, and a loop waits for what is left open."""
    for number in range(3):
        where = ("-n", site.nameserver.address)
        assert sluice("send", "Several", f"message {number}", *where).status == 0
        wait_for_route(site, "Several")
        assert sluice("tail", "Several", *where, "--from-beginning", "--count", "1").status == 0
