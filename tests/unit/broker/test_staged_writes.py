"""Staged writes: nobody sees them before they are published, and then all of them, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sluice.broker import staged_entries, staged_writes
from sluice.broker.staged_entries import Entry, Handle, Owner
from sluice.broker.topic_deletion import delete_topic
from sluice.broker.topics import STAGED_TOPIC, TopicSettings
from sluice.errors import (
    Busy,
    IllegalOperation,
    MessageIllegal,
    ParameterInvalid,
    SluiceError,
    StoreError,
)
from sluice.protocol import records
from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage import staging
from sluice.storage.images import place_images
from sluice.storage.lanes import Lane
from sluice.storage.state import STAGED_TABLE
from tests.unit.broker.broker_kit import running
from tests.unit.broker.staged_kit import batch_body, publish, stage, stage_parts
from tests.unit.broker.transaction_kit import HOST, TOPIC, Broker
from tests.unit.loops import run_once
from tests.unit.protocol.image_kit import images_of

HOUR_MS = 3_600_000


def test_what_is_staged_is_seen_when_it_is_published_and_in_the_order_of_the_handles() -> None:
    broker = Broker()
    handles = [stage(broker, [b"a%d" % n for n in range(5)]), stage(broker, [b"b"], 1)]
    handles.append(stage(broker, [b"c", b"d"]))
    broker.tick(5000)
    assert broker.bodies() == []
    assert publish(broker, [handles[2], handles[0], handles[1]])
    assert broker.bodies() == [b"c", b"d", b"a0", b"a1", b"a2", b"a3", b"a4", b"b"]
    assert {entry.queue_id for entry in broker.entries()} == {0, 1}
    assert broker.core.staged.last_batch("sink") == 0


def test_a_batch_is_published_once_whoever_asks_and_with_what() -> None:
    broker = Broker()
    first = stage(broker, [b"first try"])
    again = stage(broker, [b"second try"])
    assert publish(broker, [first])
    assert not publish(broker, [first])
    assert not publish(broker, [again])
    assert not publish(broker, []), "an older one too"
    assert broker.bodies() == [b"first try"]
    assert publish(broker, [stage(broker, [b"next"], batch=1)], 1)
    assert not publish(broker, [stage(broker, [b"late"], batch=0)], 0)
    assert publish(broker, [stage(broker, [b"other sink"], sink="two")], sink="two")
    assert sorted(broker.bodies()) == [b"first try", b"next", b"other sink"]
    broker.reopen()
    assert not publish(broker, [again])
    assert broker.core.staged.last_batch("sink") == 1


def test_an_empty_batch_is_published_too() -> None:
    broker = Broker()
    assert publish(broker, [])
    assert not publish(broker, [stage(broker, [b"late"])])
    assert broker.bodies() == []


def test_only_what_was_staged_for_this_batch_can_be_published() -> None:
    broker = Broker()
    good = stage(broker, [b"good"])
    other_sink = stage(broker, [b"x"], sink="other")
    other_batch = stage(broker, [b"x"], batch=1)
    normal = broker.begin(b"half")
    for wrong in (
        other_sink,
        other_batch,
        Handle(good.position, good.token + 1),
        Handle(good.position + 1, good.token),
        Handle(normal.position, 0),
        Handle(1 << 50, 0),
    ):
        with pytest.raises(IllegalOperation, match="stage the batch again"):
            publish(broker, [good, wrong])
    with pytest.raises(ParameterInvalid, match="each once"):
        publish(broker, [good, good])
    assert broker.bodies() == [], "nothing of a batch that was refused"
    broker.reopen()
    assert publish(broker, [good]), "handles live as long as the log does"
    assert broker.bodies() == [b"good"]


def test_what_could_not_be_stored_later_is_refused_when_it_is_staged() -> None:
    broker = Broker()
    broker.core.topics.put(
        [
            TopicSettings("memory", 1, 1, attributes={"storage": "memory"}),
            TopicSettings("once", 1, 1, attributes={"dedup.window.ms": "1000"}),
        ]
    )
    broker.settle()

    def refused(body: bytes, topic: str = TOPIC, queue: int = 0, **owner: Any) -> SluiceError:
        with pytest.raises(SluiceError) as caught:
            broker.core.staged.stage(
                Owner(owner.get("sink", "s"), owner.get("batch", 0)),
                *(topic, queue, body, HOST, lambda _: None),
            )
        return caught.value

    assert isinstance(refused(b""), MessageIllegal)
    assert "without a body" in str(refused(batch_body([b""])))
    assert "delayed" in str(refused(join_batch([(0, b"x", b"DELAY\x013\x02")])))
    assert isinstance(refused(batch_body([b"x" * 70_000])), MessageIllegal)
    assert isinstance(refused(batch_body([b"x"]), queue=9), ParameterInvalid)
    assert "kept in memory" in str(refused(batch_body([b"x"]), "memory"))
    assert "duplicates" in str(refused(batch_body([b"x"]), "once"))
    assert "forbidden" in str(refused(batch_body([b"x"]), STAGED_TOPIC))
    assert "printable" in str(refused(batch_body([b"x"]), sink="a\x02b"))
    assert "batch -1" in str(refused(batch_body([b"x"]), batch=-1))


@pytest.mark.parametrize("images", [False, True])
def test_large_batches_are_written_in_portions_and_whole(
    images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_writes, "_TURN_MESSAGES_MAX", 7)
    monkeypatch.setattr(staged_writes, "_WHOLE_BYTES_MAX", 0)
    broker = Broker()
    wanted = [b"%d" % n for n in range(100)]
    handles = [stage(broker, part, images=images) for part in (wanted[:60], wanted[60:])]
    assert publish(broker, handles)
    assert broker.bodies() == wanted


@pytest.mark.parametrize(
    "properties",
    [b"UNIQ_KEY\x01u%02d\x02", b"KEYS\x01k%d\x02TAGS\x01t\x02", b"own\x01%d", b""],
)
def test_an_entry_that_is_written_whole_is_what_single_messages_are(
    properties: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(
        *, images: bool, host: bytes = HOST
    ) -> tuple[list[tuple[object, ...]], list[bytes]]:
        broker = Broker()
        parts = [(n, b"b%d" % n, properties % n if properties else b"") for n in range(40)]
        handle = stage_parts(broker, parts, Owner("s", 0), 1, images=images, host=host)
        assert publish(broker, [handle], sink="s")
        # Positions differ: handles are random numbers, and so is their length.
        entries: list[tuple[object, ...]] = [
            (e.queue_id, e.queue_offset, e.flag, e.born_ms, e.born_host == host, e.store_ms,
             bytes(e.body), records.without_checksum(e.properties),
             e.prepared_offset == handle.position, e.reconsume_times)
            for e in broker.entries()
        ]  # fmt: skip
        found: list[bytes] = []
        for key in ("u07", "k7"):
            broker.core.store.query_key(
                TOPIC, key, lambda views, _: found.extend(map(bytes, views or ()))
            )
        return entries, [bytes(records.decode(view).body) for view in found]

    whole = written(images=False)
    if properties[-1:] in (b"", b"\x02"):
        assert whole == written(images=True)
        assert whole == written(images=True, host=bytes(20)), "IPv6: not of the form of images"
    monkeypatch.setattr(staged_writes, "_WHOLE_BYTES_MAX", 0)
    assert whole == written(images=False)
    assert len(whole[0]) == 40
    assert whole[1] == ([b"b7"] if properties.startswith((b"UNIQ", b"KEYS")) else [])


def test_images_that_are_none_are_refused() -> None:
    broker = Broker()
    good = images_of([(0, b"a", b"KEYS\x01k\x02"), (0, b"b", b"")], TOPIC.encode())

    def refused(body: bytes, count: int = 2) -> str:
        with pytest.raises(MessageIllegal) as caught:
            broker.core.staged.stage(Owner("s", 0), TOPIC, 0, body, HOST, lambda _: None, count)
        return str(caught.value)

    assert "cut short" in refused(good[:100])
    assert "add up" in refused(good[:-1] + b"\x7f")
    assert refused(good, 1)
    assert refused(good, -1)
    assert "other topic" in refused(images_of([(0, b"a", b"")] * 2, b"0rders"))
    for name in (b"DELAY", b"TIMER_DELIVER_MS", b"TRAN_MSG", b"MSG_TTL_MS"):
        wrong = [(0, b"a", b""), (0, b"b", name + b"\x011\x02")]
        assert "delayed" in refused(images_of(wrong, TOPIC.encode()))
    large = [(0, b"a", b""), (0, b"x" * 70_000, b"")]
    assert "over the limit" in refused(images_of(large, TOPIC.encode()))
    assert broker.core.staged.staged_count == 0


@pytest.mark.parametrize("host", [HOST, bytes(20)])
@pytest.mark.parametrize("whole_bytes_max", [0, 1 << 20])
def test_images_without_a_value_are_published_as_kafkas_tombstones_are_kept(
    host: bytes, whole_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_writes, "_WHOLE_BYTES_MAX", whole_bytes_max)
    broker = Broker()
    null = b"KEYS\x01k\x02__KAFKA_NULL\x011\x02"
    parts = [(0, b"a", b"KEYS\x01k\x02"), (0, b"", null), (0, b"c", b"")]
    handle = stage_parts(broker, parts, Owner("sink", 0), images=True, host=host)
    assert publish(broker, [handle])
    found = [(bytes(e.body), records.without_checksum(e.properties)) for e in broker.entries()]
    assert found == [(body, own) for _, body, own in parts]


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("more", [b"", b"own\x01TRAN_MSG\x02"])
def test_words_that_are_special_as_names_are_good_values(images: bool, more: bytes) -> None:
    broker = Broker()
    part = (0, b"x", b"KEYS\x01DELAYED-ORDER\x02" + more)
    assert publish(broker, [stage_parts(broker, [part], Owner("sink", 0), images=images)])
    assert broker.bodies() == [b"x"]


def test_more_than_one_message_may_be_staged_at_once() -> None:
    """The limit of a message holds for each of them, not for what they are staged in."""
    broker = Broker()
    bodies = [b"%d" % n * 20_000 for n in range(8)]
    assert publish(broker, [stage(broker, bodies, images=True)])
    assert broker.bodies() == bodies


@pytest.mark.parametrize(
    ("whole_bytes_max", "images"), [(0, False), (1 << 20, False), (1 << 20, True)]
)
def test_a_disk_that_is_full_delays_what_was_decided(
    whole_bytes_max: int, images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_writes, "_WHOLE_BYTES_MAX", whole_bytes_max)
    broker = Broker()
    handle = stage(broker, [b"a", b"b"], images=images)
    is_full = True

    def unless_full(real: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*arguments: Any) -> Any:
            if is_full:
                raise Busy("no room")
            return real(*arguments)

        return tried

    store = broker.core.store
    monkeypatch.setattr(store, "stage_batch", unless_full(store.stage_batch))
    monkeypatch.setattr(Lane, "place_batch", unless_full(Lane.place_batch))
    monkeypatch.setattr(staged_writes, "place_images", unless_full(place_images))
    with pytest.raises(Busy, match="no room"):
        publish(broker, [handle])
    assert not broker.core.staged.is_clear(handle.position + 1), "retention has to wait"
    with pytest.raises(Busy, match="publishes batch 0"):
        publish(broker, [], 1)
    is_full = False
    broker.tick(1100)
    assert broker.bodies() == [b"a", b"b"]
    assert broker.core.staged.is_clear(handle.position + 1)
    assert not publish(broker, [handle])


def test_a_topic_that_is_gone_takes_its_messages_with_it() -> None:
    broker = Broker()
    handle = stage(broker, [b"a"])
    kept = stage(broker, [b"b"], 1)
    outcome: list[SluiceError | None] = []
    delete_topic(broker.core, TOPIC, outcome.append)
    broker.settle()
    assert outcome == [None]
    assert broker.core.topics.get(TOPIC) is None
    assert publish(broker, [handle, kept]), "the decision is kept, the messages go nowhere"
    assert broker.bodies() == []


def test_sinks_are_bounded_and_those_of_one_batch_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged_writes, "SINKS_MAX", 2)
    broker = Broker()
    assert publish(broker, [], sink="one", once=True)
    assert publish(broker, [], sink="two")
    with pytest.raises(Busy, match="2 sinks"):
        publish(broker, [], sink="three")
    broker.pass_ms(HOUR_MS // 2)
    assert not publish(broker, [], sink="one", once=True), "an answer may have been lost"
    broker.pass_ms(HOUR_MS)
    assert list(broker.core.store.table(STAGED_TABLE)) == ["two"]
    assert publish(broker, [], sink="three")


def test_the_requests() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            where = {"sink": "job", "batch": 3, "topic": "t", "queueId": 1}
            staged = await rig.done(Request.SLUICE_STAGE, where, batch_body([b"x", b"y"], "T"))
            assert (await rig.pull("t", 0, 1)).code == Response.PULL_NOT_FOUND
            state = await rig.done(Request.SLUICE_SINK_STATE, {"sink": "job"})
            assert state.ext["batch"] == "-1"
            owner = {"sink": "job", "batch": 3}
            handles = b'["%b"]' % staged.ext["handle"].encode()
            answer = await rig.done(Request.SLUICE_PUBLISH, owner, handles)
            assert answer.ext["published"] == "true"
            answer = await rig.done(Request.SLUICE_PUBLISH, owner, handles)
            assert answer.ext["published"] == "false"
            state = await rig.done(Request.SLUICE_SINK_STATE, {"sink": "job"})
            assert state.ext["batch"] == "3"
            pulled = await rig.pull("t", 0, 1, subscription="T")
            assert pulled.ext["maxOffset"] == "2"
            assert b"x" in bytes(pulled.body)
            where = {**where, "batch": 4, "imageCount": 1}
            image = images_of([(0, b"an image", b"TAGS\x01T\x02")], b"t")
            staged = await rig.done(Request.SLUICE_STAGE, where, image)
            handles = b'["%b"]' % staged.ext["handle"].encode()
            await rig.done(Request.SLUICE_PUBLISH, {"sink": "job", "batch": 4}, handles)
            pulled = await rig.pull("t", 2, 1, subscription="T")
            assert b"an image" in bytes(pulled.body)
            for body in (b"", b"{}", b"[1]", b'["1"]', b'["a-b"]'):
                code, words = await rig.refused(Request.SLUICE_PUBLISH, owner, body)
                assert code == Response.SYSTEM_ERROR, words

    run_once(work())


def test_a_held_pull_is_answered_when_a_batch_is_published() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            where = {"sink": "job", "batch": 0, "topic": "t", "queueId": 0}
            staged = await rig.done(Request.SLUICE_STAGE, where, batch_body([b"x"]))
            other = await rig.connect()
            held = asyncio.create_task(rig.pull("t", 0, flags=6, link=other))
            await asyncio.sleep(0)
            handles = b'["%b"]' % staged.ext["handle"].encode()
            await rig.done(Request.SLUICE_PUBLISH, {"sink": "job", "batch": 0}, handles)
            answer = await held
            assert answer.code == Response.SUCCESS
            assert b"x" in bytes(answer.body)

    run_once(work())


def staging_files(broker: Broker) -> list[str]:
    return broker.files.names(f"{broker.core.store.root}/sluice/staging")


def test_images_do_not_go_to_the_log_before_they_are_published_and_their_files_are_used_again() -> (
    None
):
    broker = Broker()
    written = broker.core.store.log.written
    bodies = [b"%d" % n * 20_000 for n in range(8)]
    for batch in range(8):
        tried = stage(broker, bodies, batch=batch, images=True)
        handles = [stage(broker, bodies, n, batch, images=True) for n in range(2)]
        assert tried.position < handles[0].position
        if not batch:
            assert broker.core.store.log.written == written
        assert publish(broker, handles, batch)
        with pytest.raises(IllegalOperation, match="stage the batch again"):
            publish(broker, [tried], batch + 1)
    assert broker.bodies() == bodies * 16
    assert len(staging_files(broker)) <= 2


@pytest.mark.parametrize("cut", [0, 1])
def test_images_that_find_no_room_are_staged_in_the_log(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "FILES_MAX", cut)
    broker = Broker()
    bodies = [b"%d" % n * 20_000 for n in range(8)]
    handles = [stage(broker, bodies, images=True) for _ in range(8)]
    assert len({handle.position >= staging.FLOOR for handle in handles}) == 1 + cut
    broker.reopen()
    assert publish(broker, handles)
    assert broker.bodies() == bodies * 8


def test_images_are_durable_before_they_are_decided_on() -> None:
    broker = Broker()
    handle = stage(broker, [b"a"], images=True)
    broker.disk.fail("sync", within="/staging/")
    with pytest.raises(StoreError, match="not durable"):
        publish(broker, [handle])
    with pytest.raises(IllegalOperation, match="stage the batch again"):
        publish(broker, [handle])
    again = stage(broker, [b"b"], images=True)
    assert publish(broker, [again])
    assert broker.bodies() == [b"b"]


def test_images_can_be_published_after_a_restart_and_those_that_cannot_make_room() -> None:
    broker = Broker()
    bodies = [b"%d" % n * 20_000 for n in range(8)]
    old = stage(broker, bodies, images=True)
    assert publish(broker, [stage(broker, [b"first"], images=True)])
    kept = stage(broker, bodies, batch=1, images=True)
    broker.crash()
    with pytest.raises(IllegalOperation, match="stage the batch again"):
        publish(broker, [old], 1)
    assert publish(broker, [kept], 1)
    assert broker.bodies() == [b"first", *bodies]


def test_an_entry_that_a_crash_has_left_in_part_is_no_reason_not_to_start() -> None:
    broker = Broker()
    lost = stage(broker, [b"a"], images=True)
    path = f"{broker.core.store.root}/sluice/staging/0000"
    data = broker.files.read(path, 1 << 30)
    at = data.index(b"STAGED_TOKEN") + len(b"STAGED_TOKEN") + 3
    broker.files.open(path).pwritev([bytes(100)], at)
    broker.crash()
    with pytest.raises(IllegalOperation, match="stage the batch again"):
        publish(broker, [lost])
    assert publish(broker, [stage(broker, [b"b"], images=True)])
    assert broker.bodies() == [b"b"]


def test_a_late_try_of_a_published_batch_is_forgotten_when_it_is_refused() -> None:
    broker = Broker()
    assert publish(broker, [], once=True)
    late = stage(broker, [b"late"], images=True)
    assert not publish(broker, [late])
    broker.pass_ms(HOUR_MS)
    assert staging_files(broker) == []


def staged_images(broker: Broker, number: int, batch: int = 0) -> Handle:
    """Three messages whose sizes and keys differ."""
    parts = [
        (at, b"%d" % number * (at + 1), b"KEYS\x01k%d-%d\x02" % (number, at)) for at in range(3)
    ]
    return stage_parts(broker, parts, Owner("sink", batch), images=True)


def stored(broker: Broker) -> bytes:
    """All of the log that consumers see of the topic."""
    return b"".join(map(bytes, broker.core.store.read(TOPIC, 0, 0, count_max=100).messages))


@pytest.mark.parametrize("seen_max", [0, 3, 1000])
def test_what_was_found_out_of_images_is_not_looked_for_again(
    seen_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, broker = Broker(), Broker()
    monkeypatch.setattr(staged_writes, "randbits", lambda bits: 5)  # of any length otherwise
    monkeypatch.setattr(staged_entries, "SEEN_IMAGES_MAX", 0)
    assert publish(plain, [staged_images(plain, number) for number in range(4)])
    monkeypatch.setattr(staged_entries, "SEEN_IMAGES_MAX", seen_max)
    handles = [staged_images(broker, number) for number in range(4)]
    read: list[int] = []
    images = Entry.images

    def counted(entry: Entry, topic: str) -> Any:
        read.append(entry.position)
        return images(entry, topic)

    monkeypatch.setattr(Entry, "images", counted)
    assert publish(broker, handles)
    assert stored(broker) == stored(plain)
    assert len(read) == {0: 4, 3: 3, 1000: 0}[seen_max]


def test_what_was_found_out_is_forgotten_with_what_it_is_of() -> None:
    broker = Broker()
    seen = broker.core.staged._seen
    handles = [staged_images(broker, number, batch) for number in range(3) for batch in (0, 1)]
    assert (len(seen), seen.count) == (6, 18)
    assert not any(len(images.data) for images in seen._by_position.values()), "no message is held"
    assert publish(broker, handles[::2])
    assert set(seen._by_position) == {handle.position for handle in handles[1::2]}
    assert publish(broker, handles[1::2], 1)
    assert (len(seen), seen.count) == (0, 0)
