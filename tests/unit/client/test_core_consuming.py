"""Process queues, portions and subscriptions: what a consumer keeps and how it decides."""

from __future__ import annotations

import random

import pytest

from sluice.client.core.messages import ReceivedMessage, read_pulled
from sluice.client.core.portions import PortionSize
from sluice.client.core.process_queues import ProcessQueue
from sluice.client.core.settings import ConsumerSettings
from sluice.client.core.subscriptions import Sql, make_subscription, matching, retry_subscription
from sluice.errors import ConfigError
from tests.unit.client.test_core_messages import QUEUE, entry


def pulled(*offsets: int, body: bytes = b"x") -> list[ReceivedMessage]:
    return read_pulled(b"".join(entry(body, offset) for offset in offsets), QUEUE)


def process(**limits: int) -> ProcessQueue:
    return ProcessQueue(QUEUE, 10, ConsumerSettings(group="g", **limits))  # type: ignore[arg-type]


def test_the_committed_offset_is_that_of_the_oldest_unfinished() -> None:
    queue = process()
    queue.put(pulled(10, 11, 12, 13), 14)
    taken = queue.take(4)
    assert (queue.waiting_count, queue.under_way, queue.commit_offset) == (0, 4, 10)
    queue.done(taken[2:])
    assert queue.commit_offset == 10
    queue.done(taken[:1])
    assert queue.commit_offset == 11
    queue.done(taken[1:2])
    assert (queue.commit_offset, queue.under_way, queue.unfinished_bytes) == (14, 0, 0)


def test_what_is_not_wanted_counts_as_done() -> None:
    queue = process()
    queue.put([], 15)  # a pull found only what others want
    assert (queue.next_offset, queue.commit_offset) == (15, 15)
    queue.put(pulled(15), 40)  # 16 to 39 are not wanted
    queue.done(queue.take(1))
    assert queue.commit_offset == 40


def test_what_is_not_wanted_does_not_overtake_what_is_under_way() -> None:
    queue = process()
    queue.put(pulled(10), 11)
    taken = queue.take(1)
    queue.put([], 30)
    assert queue.commit_offset == 10
    queue.done(taken)
    assert queue.commit_offset == 30


def test_messages_given_back_come_first_and_in_order() -> None:
    queue = process()
    queue.put(pulled(10, 11, 12), 13)
    taken = queue.take(2)
    queue.give_back(taken)
    assert [message.queue_offset for message in queue.take(9)] == [10, 11, 12]
    assert queue.commit_offset == 10


def test_limits() -> None:
    queue = process(queue_count_max=2)
    queue.put(pulled(10), 11)
    assert queue.why_full() == ""
    queue.put(pulled(11), 12)
    assert "queue_count_max" in queue.why_full()
    queue.done(queue.take(1))
    assert queue.why_full() == ""
    queue = process(queue_bytes_max=2 * len(entry(b"x")))
    queue.put(pulled(10, 11), 12)
    assert "queue_bytes_max" in queue.why_full()
    queue = process(queue_span_max=100)
    queue.put(pulled(10, 110), 111)
    assert "queue_span_max" in queue.why_full()
    oldest = queue.oldest
    assert oldest is not None
    assert oldest.queue_offset == 10


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_work_commits_exactly_what_is_done(seed: int) -> None:
    """Against a model: the smallest offset that is not done."""
    rng = random.Random(seed)
    queue = process()
    undone: set[int] = set()
    busy: list[ReceivedMessage] = []
    next_offset = 10
    for _ in range(400):
        step = rng.randrange(4)
        if step == 0:
            count = rng.randrange(1, 4)
            offsets = range(next_offset, next_offset + count)
            queue.put(pulled(*offsets), next_offset + count)
            undone.update(offsets)
            next_offset += count
        elif step == 1:
            busy += queue.take(rng.randrange(1, 4))
        elif step == 2 and busy:
            message = busy.pop(rng.randrange(len(busy)))
            queue.done([message])
            undone.remove(message.queue_offset)
        elif step == 3 and busy and rng.random() < 0.2:
            queue.give_back(sorted(busy, key=lambda message: message.queue_offset))
            busy.clear()
        assert queue.commit_offset == min(undone, default=next_offset)
        assert queue.unfinished_count == len(undone)
        assert queue.under_way == len(busy)


def test_a_slow_handler_gets_one_message_at_a_time() -> None:
    size = PortionSize()
    assert size.count == 1
    size.took(0.000_010, 1)
    assert size.count > 50
    size.took(1.0, 1)
    assert size.count == 1
    for _ in range(60):
        size.took(0.000_010, 1)
    assert size.count > 50


def test_what_nobody_measured_is_not_quick() -> None:
    size = PortionSize()
    size.took(0.0, 32)
    assert (size.count, size.share(64, 0)) == (1, 1)
    size.took(0.000_010, 1)
    assert size.count > 50


def test_what_waits_is_shared_among_those_who_are_free() -> None:
    size = PortionSize()
    assert size.share(32, 19) == 1  # nothing is known of the handler yet
    size.took(0.000_100, 1)
    assert size.share(32, 19) == 2
    assert size.share(400, 1) == size.count
    for _ in range(60):
        size.took(0.000_040, 1)
    assert size.share(64, 19) == 32  # too quick to be worth more workers
    for _ in range(60):
        size.took(0.000_005, 1)
    assert size.share(64, 19) >= 90  # and what takes half a millisecond is not shared at all
    size.took(1.0, 1)
    assert size.share(32, 19) == 1


def test_subscriptions() -> None:
    assert make_subscription("t", "*", 1).tags == ()
    assert make_subscription("t", "", 1).expression == "*"
    tags = make_subscription("t", " A || B ", 5)
    assert (tags.expression, tags.tags, tags.codes) == ("A || B", ("A", "B"), (65, 66))
    assert make_subscription("t", ["A", "B"], 5) == tags
    sql = make_subscription("t", Sql("a > 1"), 5)
    assert (sql.expression, sql.expression_type, sql.tags) == ("a > 1", "SQL92", ())
    with pytest.raises(ConfigError, match="empty"):
        make_subscription("t", Sql(" "), 5)
    assert retry_subscription("g", 1).topic == "%RETRY%g"


def test_tags_with_the_same_hash_are_told_apart() -> None:
    """Brokers compare hashes: "Aa" and "BB" have the same one."""
    data = b"".join(
        entry(b"x", offset, properties=b"TAGS\x01%b\x02" % tag)
        for offset, tag in enumerate((b"Aa", b"BB"))
    )
    wanted = make_subscription("t", "Aa", 1)
    assert wanted.codes == make_subscription("t", "BB", 1).codes
    mine, others = matching(read_pulled(data, QUEUE), wanted)
    assert [message.tags for message in mine] == ["Aa"]
    assert [message.tags for message in others] == ["BB"]
