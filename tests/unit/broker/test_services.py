"""The services without a wire: filters, locks, held reads, clients, topics, groups, offsets."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.broker import attributes
from sluice.broker.filters import BLANKS, TAGS_MAX, Subscription, parse_tags
from sluice.broker.groups import (
    CLIENT_EXPIRED_MS,
    Client,
    Clients,
    Groups,
    GroupSettings,
    group_from_json,
)
from sluice.broker.locks import LOCK_MS, QueueLocks
from sluice.broker.long_polling import (
    HELD_PER_OWNER_AND_QUEUE_MAX,
    HeldRead,
    LongPolling,
)
from sluice.broker.offsets import Offsets
from sluice.broker.stats import BrokerStats, Mornings
from sluice.broker.topics import Topics, TopicSettings, check_name, from_json
from sluice.errors import (
    Busy,
    DiskFull,
    GroupMissing,
    MessageIllegal,
    SluiceError,
    StoreReadOnly,
    SubscriptionIllegal,
    TopicMissing,
)
from sluice.protocol.records import java_hash
from sluice.storage.background import Background, Inline, Steps
from sluice.storage.commit_log import CommitLog
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import Store
from tests.unit.broker.broker_kit import broker_config

HOST = bytes([127, 0, 0, 1, 0, 0, 0, 1])


def new_store(files: MemoryFiles | None = None, background: Background | None = None) -> Store:
    return open_store(
        broker_config().store,
        files if files is not None else MemoryFiles(),
        background if background is not None else Inline(),
        lambda: 1_000_000,
        HOST,
    )


# ----------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_everything_is_wanted(expression: str | None) -> None:
    assert parse_tags("t", expression).accept is None


def test_tags_are_compared_by_their_hashes() -> None:
    accept = parse_tags("t", " TagA||TagB ").accept
    assert callable(accept)
    assert accept(java_hash(b"TagA"))
    assert accept(java_hash(b"TagB"))
    assert not accept(java_hash(b"TagC"))
    assert not accept(0)  # a message without a tag


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda t: "|" not in t))
def test_a_tag_passes_its_own_subscription(tag: str) -> None:
    if not tag.strip(BLANKS) or tag == "*":
        return
    accept = parse_tags("t", tag).accept
    assert callable(accept)
    assert accept(java_hash(tag.strip(BLANKS).encode()))


@pytest.mark.parametrize("expression", ["  ", " || ", "|| ||"])
def test_who_names_no_tag_wants_nothing(expression: str) -> None:
    accept = parse_tags("t", expression).accept
    assert callable(accept)
    assert not accept(0)
    assert not accept(java_hash(b""))


@pytest.mark.parametrize("expression", ["||", "||||", "||".join(map(str, range(TAGS_MAX + 1)))])
def test_a_subscription_that_makes_no_sense_is_refused(expression: str) -> None:
    with pytest.raises(SubscriptionIllegal):
        parse_tags("t", expression)


# ------------------------------------------------------------------------------------------- locks


def test_a_lock_belongs_to_one_client_until_it_is_given_back_or_old() -> None:
    locks = QueueLocks()
    queues = [("t", 0), ("t", 1)]
    assert locks.lock("g", "one", queues, 0) == queues
    assert locks.lock("g", "two", queues, 1) == []
    assert locks.lock("other", "two", queues, 1) == queues
    locks.unlock("g", "two", queues)  # not its own: nothing happens
    assert locks.lock("g", "two", queues, 2) == []
    locks.unlock("g", "one", [("t", 1)])
    assert locks.lock("g", "two", queues, 3) == [("t", 1)]
    assert locks.lock("g", "one", [("t", 0)], LOCK_MS) == [("t", 0)]  # renewed
    assert locks.lock("g", "two", [("t", 0)], 2 * LOCK_MS) == []
    assert locks.lock("g", "two", [("t", 0)], 2 * LOCK_MS + 1) == [("t", 0)]


def test_old_locks_are_forgotten() -> None:
    locks = QueueLocks()
    locks.lock("g", "one", [("t", 0)], 0)
    assert locks.is_locked("g", LOCK_MS)
    assert not locks.is_locked("g", LOCK_MS + 1)
    locks.expire(2 * LOCK_MS + 1)
    assert not locks._locks


# -------------------------------------------------------------------------------------- held reads


class Waiter:
    """A held read that notes how it was asked again."""

    def __init__(
        self,
        polls: LongPolling,
        queue: tuple[str, int] = ("t", 0),
        *,
        until_ms: int = 100,
        wants: Callable[[int], bool] | None = None,
        again: bool = False,
        owner: object = None,
    ) -> None:
        self._owner = owner or self
        self.asked: list[bool] = []
        self._polls, self._queue, self._until_ms, self._wants = polls, queue, until_ms, wants
        self._again = again
        self.is_held = self.hold()

    def hold(self) -> bool:
        return self._polls.hold(
            HeldRead(self._queue, self._until_ms, self._wants, self.resume, self._owner)
        )

    def resume(self, timed_out: bool) -> None:
        self.asked.append(timed_out)
        if self._again and not timed_out:
            self.hold()


def test_an_arrival_wakes_who_wants_it() -> None:
    polls = LongPolling()
    all_tags, tag_7, elsewhere = (
        Waiter(polls),
        Waiter(polls, wants=lambda code: code == 7),
        Waiter(polls, ("t", 1)),
    )
    polls.arrived(("t", 0), 5)
    assert (all_tags.asked, tag_7.asked, elsewhere.asked) == ([False], [], [])
    assert polls.held_count == 2
    polls.arrived(("t", 0), 7)
    assert tag_7.asked == [False]
    polls.wake(("t", 1))
    assert elsewhere.asked == [False]
    assert polls.held_count == 0


def test_a_read_may_be_held_again_when_it_is_woken() -> None:
    polls = LongPolling()
    waiter = Waiter(polls, again=True)
    polls.arrived(("t", 0), 0)
    polls.wake(("t", 0))
    assert (waiter.asked, polls.held_count) == ([False, False], 1)
    polls.tick(100)
    assert (waiter.asked, polls.held_count) == ([False, False, True], 0)


def test_whose_time_is_over_asks_a_last_time() -> None:
    polls = LongPolling()
    early, late = Waiter(polls, until_ms=10), Waiter(polls, until_ms=20)
    polls.tick(9)
    assert early.asked == []
    polls.tick(10)
    assert (early.asked, late.asked) == ([True], [])
    polls.shut()
    assert (late.asked, polls.held_count) == ([True], 0)
    assert not Waiter(polls).is_held


def test_reads_are_bounded_and_go_with_their_owner() -> None:
    polls = LongPolling(held_max=2)
    first, second = Waiter(polls), Waiter(polls)
    assert (first.is_held, second.is_held) == (True, True)
    with pytest.raises(Busy, match=r"2 pulls wait for messages, .* 2 \(held_polls_max\)"):
        Waiter(polls)
    polls.drop(first)
    assert polls.held_count == 1
    polls.arrived(("t", 0), 0)
    assert (first.asked, second.asked) == ([], [False])


def test_one_owner_does_not_take_the_places_of_others() -> None:
    polls = LongPolling(held_per_owner_max=3)
    for number in range(3):
        Waiter(polls, ("t", number), owner="greedy")
    with pytest.raises(Busy, match=r"3 pulls of this .* 3 \(held_polls_per_connection_max\)"):
        Waiter(polls, owner="greedy")
    assert Waiter(polls, owner="other").is_held
    # Whoever is asked again gives its place back, however that comes about.
    polls.arrived(("t", 0), 0)
    polls.wake(("t", 1))
    assert [Waiter(polls, owner="greedy").is_held for _ in range(2)] == [True, True]
    polls.tick(100)
    assert [Waiter(polls, owner="greedy").is_held for _ in range(3)] == [True] * 3
    polls.drop("greedy")
    assert polls.held_count == 0
    assert Waiter(polls, owner="greedy").is_held


def test_one_owner_waits_only_so_often_for_one_queue() -> None:
    polls = LongPolling()
    for _ in range(HELD_PER_OWNER_AND_QUEUE_MAX):
        Waiter(polls, owner="greedy")
    with pytest.raises(Busy, match="64 pulls of this connection wait for messages of queue 0 of t"):
        Waiter(polls, owner="greedy")
    assert Waiter(polls, ("t", 1), owner="greedy").is_held
    assert Waiter(polls, owner="other").is_held


# ----------------------------------------------------------------------------------------- clients


def joined(
    clients: Clients, client_id: str, wanted: dict[str, str], *, channel: object, now_ms: int = 0
) -> tuple[bool, list[str]]:
    return clients.consumer_said(
        "g",
        Client(client_id, channel, "JAVA", 513, now_ms),
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        from_where="CONSUME_FROM_LAST_OFFSET",
        subscriptions=[parse_tags(topic, tags) for topic, tags in wanted.items()],
    )


def test_a_group_changes_with_members_and_topics_not_with_every_heartbeat() -> None:
    clients = Clients()
    assert joined(clients, "one", {"t": "*"}, channel=1) == (True, [])
    assert joined(clients, "one", {"t": "*"}, channel=1) == (False, [])
    assert joined(clients, "two", {"t": "*"}, channel=2) == (True, [])
    assert joined(clients, "two", {"t": "*", "u": "*"}, channel=2)[0]
    assert joined(clients, "two", {"t": "*"}, channel=2)[0]
    assert clients.groups_of("t") == ["g"]
    assert clients.groups_of("u") == []
    assert clients.leave("two", 1, "", "g") == [], "another one of its name"
    assert clients.leave("two", 2, "", "g") == ["g"]
    assert clients.leave("two", 2, "", "g") == []
    assert clients.closed(1) == ["g"]
    assert clients.consumers == {}


def test_who_is_silent_is_gone() -> None:
    clients = Clients()
    joined(clients, "one", {"t": "*"}, channel=1, now_ms=0)
    joined(clients, "two", {"t": "*"}, channel=2, now_ms=1)
    clients.producer_said("p", Client("one", 1, "JAVA", 513, 0))
    assert clients.expire(CLIENT_EXPIRED_MS) == []
    assert clients.expire(CLIENT_EXPIRED_MS + 1) == ["g"]
    assert list(clients.consumers["g"].members) == ["two"]
    assert clients.producers == {}


def test_members_that_subscribe_differently_are_told_apart() -> None:
    clients = Clients()
    joined(clients, "one", {"t": "TagA"}, channel=1)
    _, found = joined(clients, "two", {"t": "TagB"}, channel=2)
    assert found == ["t: 'TagA' by one; 'TagB' by two"]
    # Reported once, not with every heartbeat; but it stays known until they agree.
    assert joined(clients, "two", {"t": "TagB"}, channel=2)[1] == []
    assert clients.disagreements() == {"g": found}
    joined(clients, "two", {"t": "TagA"}, channel=2)
    assert clients.disagreements() == {}
    _, found = joined(clients, "two", {"u": "*"}, channel=2)
    assert any("(not subscribed)" in line for line in found)
    # Who leaves takes the disagreement along.
    clients.closed(2)
    assert clients.disagreements() == {}


def test_an_old_subscription_does_not_replace_a_newer_one() -> None:
    clients = Clients()
    for version, tags in ((5, "new"), (3, "old")):
        clients.consumer_said(
            "g",
            Client(f"c{version}", version, "JAVA", 513, 0),
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            from_where="CONSUME_FROM_LAST_OFFSET",
            subscriptions=[parse_tags("t", tags, version)],
        )
    wanted = clients.subscription("g", "t")
    assert isinstance(wanted, Subscription)
    assert wanted.expression == "new"


# ------------------------------------------------------------------------------- topics and groups


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "ä", "t" * 128, "%RETRY%" + "g" * 249])
def test_names_that_clients_cannot_use(name: str) -> None:
    with pytest.raises(MessageIllegal):
        check_name(name)


def test_topics_are_kept_in_rocketmqs_form() -> None:
    settings = TopicSettings("t", 3, 4, 6, "MULTI_TAG", 1, True, {"message.type": "FIFO"})
    assert from_json("t", settings.to_json()) == settings
    assert from_json("t", {}) == TopicSettings("t", 16, 16)
    group = GroupSettings("g", retry_max=3, extra={"groupRetryPolicy": {"type": "EXPONENTIAL"}})
    assert group_from_json("g", group.to_json()) == GroupSettings(
        "g",
        retry_max=3,
        extra={"attributes": {}, "groupRetryPolicy": {"type": "EXPONENTIAL"}},
    )


def test_a_topic_that_cannot_be_stored_is_taken_back() -> None:
    store = new_store()
    topics = Topics(store, cluster_name="c", broker_name="b")
    topics.put([TopicSettings("t", 2, 2)])
    store.write_staged()
    told: list[list[str]] = []
    topics.on_change = told.append
    seen: list[SluiceError | None] = []
    topics.put([TopicSettings("t", 4, 4), TopicSettings("new")], seen.append)
    assert topics.get("new") is not None
    with mock.patch.object(CommitLog, "write", side_effect=DiskFull("no room")):
        store.write_staged()
    assert [type(error) for error in seen] == [DiskFull]
    assert topics.get("new") is None
    assert topics.get("t") == TopicSettings("t", 2, 2)
    assert told == []


def test_what_failed_is_taken_back_whatever_order_it_was_asked_in() -> None:
    files = MemoryFiles()
    store = new_store(files)
    topics = Topics(store, cluster_name="c", broker_name="b")
    store.write_staged()
    kept = TopicSettings("kept", 3, 3)
    topics.put([kept])
    store.write_staged()
    seen: list[SluiceError | None] = []
    topics.delete("kept", seen.append)
    topics.put([TopicSettings("kept", 5, 5)], seen.append)
    topics.put([TopicSettings("new", 1, 1)], seen.append)
    assert topics.get("kept") == TopicSettings("kept", 5, 5)
    files.fail("pwritev", error=28)
    store.write_staged()
    assert [type(error) for error in seen] == [DiskFull] * 3
    assert (topics.get("kept"), topics.get("new")) == (kept, None)
    topics.put([TopicSettings("kept", 5, 5)])
    topics.delete("kept")
    topics.put([TopicSettings("kept", 7, 7)])
    store.write_staged()
    assert topics.get("kept") == TopicSettings("kept", 7, 7)
    assert store.table("topic")["kept"]["readQueueNums"] == 7


def test_a_topic_is_made_by_a_message_after_the_default_one() -> None:
    store = new_store()
    topics = Topics(store, cluster_name="c", broker_name="b")
    made = topics.create_by_send("t", "TBW102", 99, allowed=True)
    assert (made.read_queues, made.write_queues, made.perm) == (8, 8, 6)
    with pytest.raises(TopicMissing):
        topics.create_by_send("u", "TBW102", 4, allowed=False)
    with pytest.raises(TopicMissing):
        topics.create_by_send("u", "t", 4, allowed=True)  # not one to inherit from
    with pytest.raises(MessageIllegal):
        topics.create_by_send("u v", "TBW102", 4, allowed=True)


def test_the_version_of_the_topics_changes_with_topics_only() -> None:
    # A nameserver takes a new version as a reason to take over all topics again, and with them the
    # write permission that an administrator had wiped.
    store = new_store()
    topics = Topics(store, cluster_name="c", broker_name="b")
    store.write_staged()
    before = topics.data_version()
    Offsets(store).commit("g", "t", 0, 5)
    store.offsets.send()
    Groups(store, auto_create=lambda: True).require("g")
    store.write_staged()
    assert topics.data_version() == before
    topics.put([TopicSettings("t")])
    store.write_staged()
    made = topics.data_version()
    assert made["counter"] > before["counter"]
    topics.delete("t")
    store.write_staged()
    assert topics.data_version()["counter"] > made["counter"]


def test_a_new_version_is_told_though_no_topic_changed() -> None:
    topics = Topics(new_store(), cluster_name="c", broker_name="b")
    told: list[list[str]] = []
    topics.on_change = told.append
    before = topics.data_version()["counter"]
    topics.bump()
    assert topics.data_version()["counter"] > before
    assert told == [[]]


def test_groups_are_made_when_they_first_ask_if_allowed() -> None:
    allowed = True
    groups = Groups(new_store(), auto_create=lambda: allowed)
    assert groups.require("g") == GroupSettings("g")
    with pytest.raises(GroupMissing, match="contains illegal characters"):
        groups.require("g h")
    allowed = False
    with pytest.raises(GroupMissing):
        groups.require("h")
    assert groups.require("TOOLS_CONSUMER").name == "TOOLS_CONSUMER"
    assert [settings.name for settings in groups.all()] == ["g"]


def test_attributes_are_added_changed_and_taken_away() -> None:
    changes = attributes.parse_changes("+message.type=FIFO,+reserve.time=5")
    made = attributes.altered(None, changes)
    assert made == {"message.type": "FIFO", "reserve.time": "5"}
    less = attributes.altered(made, attributes.parse_changes("-reserve.time"))
    assert less == {"message.type": "FIFO"}
    for bad in ("-reserve.time", "-x", "+x=y", "+message.type=", "+queue.type=SimpleCQ"):
        with pytest.raises(SluiceError):
            attributes.altered(less, attributes.parse_changes(bad))
    with pytest.raises(SluiceError):
        attributes.altered(less, {"+message.type": "FIFO", "-message.type": ""})
    for bad in ("message.type=FIFO", "message.type", "+a=b,+a=c"):
        with pytest.raises(SluiceError):
            attributes.parse_changes(bad)


# ----------------------------------------------------------------------------------------- offsets


def test_offsets_survive_and_are_found_both_ways() -> None:
    files = MemoryFiles()
    store = new_store(files)
    offsets = Offsets(store)
    assert offsets.committed("g", "t", 0) is None
    offsets.commit("g", "t", 0, 7)
    offsets.commit("g", "u", 1, 8)
    offsets.commit("h", "t", 0, 9)
    offsets.commit("b@broadcast", "t", 0, 1)
    assert (offsets.topics_of("g"), offsets.groups_of("t")) == (["t", "u"], ["g", "h"])
    store.shut(lambda error: None)
    again = Offsets(new_store(files))
    assert again.all() == offsets.all()
    assert again.committed("g", "u", 1) == 8


def test_a_reset_is_told_once_and_stops_commits_until_then() -> None:
    offsets = Offsets(new_store())
    offsets.commit("g", "t", 0, 7)
    offsets.pulled("g", "t", 0, 9)
    offsets.reset("g", "t", {0: 2})
    assert not offsets.commit("g", "t", 0, 8)
    assert offsets.commit("g", "t", 1, 8)
    assert offsets.committed("g", "t", 0) == 2
    assert offsets.pulled_to("g", "t", 0) == 2
    assert offsets.take_reset("g", "t", 0) == 2
    assert offsets.take_reset("g", "t", 0) is None
    assert offsets.commit("g", "t", 0, 3)


def test_what_is_forgotten_stays_forgotten_though_the_store_was_writing_it() -> None:
    files, steps = MemoryFiles(), Steps()
    store = new_store(files, steps)
    offsets = Offsets(store)
    offsets.commit("g", "t", 0, 1)
    store.offsets.send()  # under way ...
    store.write_staged()
    offsets.commit("g", "t", 1, 2)  # ... and this one waits behind it
    offsets.commit("h", "t", 0, 3)
    seen: list[SluiceError | None] = []
    offsets.forget_group("g", seen.append)
    assert offsets.committed("g", "t", 0) is None
    assert seen == []
    for _ in range(10):
        store.write_staged()
        steps.run_all()
    assert seen == [None]
    outcome: list[SluiceError | None] = []
    store.shut(outcome.append)
    steps.run_all()
    assert outcome == [None]
    again = Offsets(new_store(files))
    assert again.all() == {"t@h": {0: 3}}


def test_a_commit_after_forgetting_counts() -> None:
    store = new_store()
    offsets = Offsets(store)
    offsets.commit("g", "t", 0, 1)
    seen: list[SluiceError | None] = []
    offsets.forget_group("g", seen.append)
    offsets.commit("g", "t", 0, 5)
    for _ in range(3):
        store.write_staged()
    assert seen == [None]
    assert offsets.committed("g", "t", 0) == 5
    assert store.committed_offset("g", "t", 0) == 5


def test_a_store_that_cannot_write_says_so_to_who_waits() -> None:
    store = new_store()
    offsets = Offsets(store)
    offsets.commit("g", "t", 0, 1)
    store.shut(lambda error: None)
    seen: list[SluiceError | None] = []
    offsets.forget_group("g", seen.append)
    assert [type(error) for error in seen] == [StoreReadOnly]


def test_forgetting_nothing_is_done_at_once() -> None:
    seen: list[SluiceError | None] = []
    Offsets(new_store()).forget_group("g", seen.append)
    assert seen == [None]


# ------------------------------------------------------------------------------------------- rates


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_794_772_393_000

    def __call__(self) -> int:
        return self.now_ms


def test_rates_over_spans() -> None:
    clock = Clock()
    stats = BrokerStats(clock)
    for _ in range(120):
        clock.now_ms += 1000
        stats.stored("t", 2, 100)
        stats.handed_out("t", "g", 1, 50)
        stats.tick(clock.now_ms)
    assert stats.rates("put") == (2.0, 2.0, 2.0)
    assert stats.topic_rate("t") == pytest.approx(2.0)
    assert stats.group_rate("t", "g") == pytest.approx(1.0)
    minute = stats.put_window(stats.minute, "t")
    assert minute is not None
    assert 120 <= minute.messages <= 140
    assert (minute.bytes, minute.calls) == (minute.messages * 50, minute.messages // 2)
    day = stats.put_window(stats.day, "t")
    assert day is not None
    assert day.messages == 240
    assert stats.all_gets_window(stats.day).messages == 120
    assert stats.put_window(stats.minute, "none") is None
    stats.forget_topic("t")
    assert stats.put_window(stats.minute, "t") is None
    assert stats.get_window(stats.minute, "t", "g") is None
    stats.stored("t", 1, 1)  # made again: what was counted before is not taken off
    again = stats.put_window(stats.minute, "t")
    assert again is not None
    assert again.messages == 1


def test_totals_of_the_last_mornings() -> None:
    clock = Clock()
    stats = BrokerStats(clock)
    day_ms = 24 * 3_600_000
    for count in (5, 7, 11):
        stats.stored("t", count, 1)
        clock.now_ms += day_ms
        stats.tick(clock.now_ms)
    assert stats.mornings == Mornings(put_yesterday=12, put_today=23)
