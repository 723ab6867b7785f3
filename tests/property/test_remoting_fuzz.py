"""Whatever bytes come, the RocketMQ codec reads them or raises ProtocolError, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import MessageIllegal, ProtocolError
from sluice.protocol import lenient_json, remoting
from sluice.protocol import remoting_bodies as bodies
from sluice.protocol import remoting_clients as clients
from sluice.protocol.framing import BadFrame, FrameReader, frame_of
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.message_batches import join_batch, split_batch
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand, decode, encode
from sluice.protocol.remoting_codes import RequestCode
from sluice.protocol.remoting_fast import read_pull, read_send
from sluice.protocol.remoting_schemas import REQUESTS, parse_fields, read_fields
from tests.unit.protocol.codec import GOLDEN, through_buffer

EXAMPLES = settings(max_examples=150, deadline=None)

# Parsing makes objects out of a header or a body: an empty list takes three bytes of JSON and 64 of
# memory. Anything over that is memory that the sender did not pay for.
MEMORY_FACTOR = 32
MEMORY_BYTES_MIN = 64 * 1024

READERS: dict[int, Callable[[Any], object]] = {
    RequestCode.HEART_BEAT: clients.read_heartbeat,
    RequestCode.LOCK_BATCH_MQ: clients.read_lock_request,
    RequestCode.UNLOCK_BATCH_MQ: clients.read_lock_request,
    RequestCode.CHECK_CLIENT_CONFIG: clients.read_client_check,
    RequestCode.REGISTER_BROKER: lambda body: bodies.read_registration(
        body, compressed=False, version=513
    ),
    RequestCode.QUERY_DATA_VERSION: lambda body: bodies.read_registration(
        body, compressed=True, version=513
    ),
    RequestCode.UPDATE_BROKER_CONFIG: bodies.read_properties,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: bodies.read_topic_configs,
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: bodies.read_queue_offsets,
    RequestCode.GET_ALL_CONSUMER_OFFSET: bodies.read_consumer_offsets,
    RequestCode.GET_TOPIC_STATS_INFO: bodies.read_topic_stats,
    RequestCode.GET_CONSUME_STATS: bodies.read_consume_stats,
    RequestCode.GET_ROUTEINFO_BY_TOPIC: bodies.read_route,
    RequestCode.GET_BROKER_CLUSTER_INFO: bodies.read_cluster_info,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: clients.read_consumer_connection,
}
SENDS = (10, 310, 320, 324, 325)


@contextmanager
def only_the_request() -> Iterator[None]:
    """What is wrong inside of a whole frame is no reason to close its connection."""
    try:
        yield
    except ProtocolError as error:
        if error.closes_connection:
            raise AssertionError("the connection would be closed") from error


def handle(frame: Any) -> None:
    """What a broker does with a frame before it knows whether it makes sense."""
    command = decode(frame)
    schema = REQUESTS.get(command.code)
    if schema is not None:
        with only_the_request():
            parse_fields(schema, command.ext)
        with only_the_request():
            read_fields(schema.response, command.ext)
    with only_the_request():
        if command.code in SENDS:
            read_send(command)
        elif command.code in (11, 361):
            read_pull(command)
    with suppress(MessageIllegal):
        split_batch(command.body)
    if command.code in READERS:
        with only_the_request():
            READERS[command.code](command.body)


def survive(data: bytes) -> None:
    """Feed a connection; nothing but ProtocolError may come out."""
    reader = FrameReader(frame_bytes_max=1 << 20)
    try:
        frames = reader.feed(data)
    except BadFrame as error:
        frames = error.frames
    assert reader.kept_bytes <= len(data)
    for frame in frames:
        with suppress(ProtocolError):
            handle(frame)


def seeds() -> list[bytes]:
    """Good frames: every header that Java wrote, in both forms, with each kind of body."""
    headers = (GOLDEN / "rocketmq-5.5.0-headers.txt").read_text(encoding="utf-8").splitlines()
    texts = (GOLDEN / "rocketmq-5.5.0-bodies.txt").read_text(encoding="utf-8").splitlines()
    contents = [line.partition(" ")[2].encode() for line in texts]
    contents += [bytes.fromhex(one.decode()) for one in contents if one[:1] not in b"{["]
    frames = []
    for at in range(0, len(headers), 3):
        code = int(headers[at].split()[1])
        for body in contents[at % len(contents) :: 7]:
            ext = orjson.loads(headers[at + 1]).get("extFields", {})
            for serialization in (JSON, BINARY):
                command = RemotingCommand(code, 1, 0, ext, body, serialization=serialization)
                frames.append(encode(command))
    for code in READERS:
        frames += [encode(RemotingCommand(code, 1, 0, {}, body)) for body in contents]
    return frames


SEEDS = seeds()


def spoil(frame: bytes, chance: random.Random) -> bytes:
    """A frame with a few bytes changed, inserted, repeated or gone; mostly of the right length."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data)) if data else 0
        what = chance.randrange(6)
        if what == 0 and data:
            data[at] = chance.randrange(256)
        elif what == 1:
            data[at:at] = chance.randbytes(chance.randint(1, 4))
        elif what == 2:
            del data[at : at + chance.randint(1, 8)]
        elif what == 3:
            data[at : at + 4] = chance.choice(
                [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0"]
            )
        elif what == 4:
            data[at:at] = data[at : at + chance.randint(1, 40)] * chance.randint(1, 8)
        elif data:
            data[at] = chance.choice(b'{}[]",:\\0\x00\xff')
    if chance.random() < 0.8:
        return frame_of(bytes(data[4:]))
    return bytes(data)


@given(st.binary(max_size=600))
@EXAMPLES
def test_any_bytes(data: bytes) -> None:
    survive(data)


@given(st.sampled_from([JSON, BINARY]), st.binary(max_size=300), st.binary(max_size=300))
@EXAMPLES
def test_any_header(serialization: int, header: bytes, body: bytes) -> None:
    mark = (serialization << 24 | len(header)).to_bytes(4, "big")
    survive(frame_of(mark + header + body))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
MEMBERS = ("code", "opaque", "flag", "version", "language", "remark", "extFields")


@given(st.dictionaries(st.sampled_from(MEMBERS), JSON_VALUES))
@EXAMPLES
def test_any_json_header(members: dict[str, Any]) -> None:
    try:
        header = orjson.dumps(members)
    except TypeError:  # a number that JSON cannot hold
        return
    survive(frame_of(len(header).to_bytes(4, "big") + header))


@given(st.sampled_from(sorted(READERS)), JSON_VALUES, st.sampled_from(SEEDS))
@EXAMPLES
def test_bodies_with_a_value_replaced(code: int, value: Any, seed: bytes) -> None:
    """Every member of a good body in turn becomes something else."""
    try:
        content = lenient_json.loads(bytes(decode(seed[4:]).body))
        orjson.dumps(value)
    except (ValueError, TypeError):
        return
    for name in content:
        body = orjson.dumps({**content, name: value})
        survive(encode(RemotingCommand(code, 1, 0, {}, body)))


@given(st.integers(0, 1 << 32))
@EXAMPLES
def test_spoiled_frames(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        survive(spoil(chance.choice(SEEDS), chance))


@pytest.mark.soak
def test_spoiled_frames_for_long() -> None:
    chance = random.Random(20)
    for _ in range(100_000):
        survive(spoil(chance.choice(SEEDS), chance))


# ---------------------------------------------------------------------------------------- memory


@contextmanager
def bounded_by(data: bytes) -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= MEMORY_BYTES_MIN + MEMORY_FACTOR * len(data)


@given(st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_spoiled_frames_take_no_more_memory_than_they_bring(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        data = spoil(chance.choice(SEEDS), chance)
        with bounded_by(data):
            survive(data)


HUGE = b"\x7f\xff\xff\xff"


def json_frame(header: bytes) -> bytes:
    assert len(header) < remoting.HEADER_BYTES_MAX
    return frame_of(len(header).to_bytes(4, "big") + header)


@pytest.mark.parametrize(
    "data",
    [
        HUGE,
        (1 << 20).to_bytes(4, "big"),
        frame_of(b"\x01\x00\x00\x15" + bytes(13) + HUGE + bytes(4)),
        frame_of(b"\x01\x00\x00\x15" + bytes(13) + bytes(4) + HUGE),
        json_frame(b"[" * 200_000),
        json_frame(b"[[]" + b",[]" * 85_000),
        json_frame(b"[{}" + b",{}" * 85_000),
        json_frame(b'{"extFields":{' + b'"":0,' * 50_000),
        json_frame(b'{"extFields":{' + b",".join(b'"%x":0' % n for n in range(25_000)) + b"}}"),
        encode(RemotingCommand(34, 1, 0, {}, b"[" * 900_000)),
        encode(RemotingCommand(34, 1, 0, {}, b'{"clientID":"' + b'\\"' * 400_000)),
        encode(RemotingCommand(320, 1, 0, {}, (HUGE + bytes(18)) * 1000)),
        encode(RemotingCommand(320, 1, 0, {}, join_batch([(0, b"", b"")] * 40_000))),
    ],
    ids=range(13),
)
def test_what_was_made_to_take_memory(data: bytes) -> None:
    with bounded_by(data):
        survive(data)


# ------------------------------------------------------------------------------------ round trips

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
FILLED = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
COMMANDS = st.builds(
    RemotingCommand,
    code=st.sampled_from(sorted(REQUESTS)),
    opaque=INT32,
    flag=st.sampled_from([0, 2]),
    ext=st.dictionaries(TEXT, FILLED, max_size=20),
    body=st.binary(max_size=200),
    remark=st.none() | FILLED,
    language=st.sampled_from(remoting.LANGUAGES),
    version=st.integers(-(1 << 15), (1 << 15) - 1),
    serialization=st.sampled_from([JSON, BINARY]),
)


@given(st.lists(COMMANDS, max_size=4), st.lists(st.integers(1, 50), max_size=30))
@EXAMPLES
def test_commands_survive_any_way_of_cutting_the_stream(
    commands: list[RemotingCommand], cuts: list[int]
) -> None:
    data = b"".join(encode(command) for command in commands)
    reader = FrameReader(scratch=bytearray(64))
    frames = []
    for count in cuts:
        frames += reader.feed(data[:count])
        data = data[count:]
    frames += through_buffer(reader, data)
    assert [decode(frame) for frame in frames] == commands
    assert reader.kept_bytes == 0


@given(COMMANDS)
@EXAMPLES
def test_both_serializations_say_the_same(command: RemotingCommand) -> None:
    command.serialization = JSON
    by_json = decode(encode(command)[4:])
    command.serialization = BINARY
    by_binary = decode(encode(command)[4:])
    assert by_binary.serialization == BINARY
    by_binary.serialization = JSON
    assert by_json == by_binary


LETTER_FIELDS = st.dictionaries(st.sampled_from("abcdefghijklmn"), TEXT | st.just("0"), max_size=14)


@given(LETTER_FIELDS, st.sampled_from(["1794772393024", "5", ""]), st.booleans())
@EXAMPLES
def test_the_short_way_to_read_a_send_reads_what_the_long_one_does(
    fields: dict[str, str], born: str, usual: bool
) -> None:
    ext = dict(sorted(fields.items())) if usual else fields
    if "g" in ext:
        ext["g"] = born
    header = encode(RemotingCommand(310, 1, 0, ext, serialization=BINARY))[8:]
    mark = (1 << 24 | len(header)).to_bytes(4, "big")
    assert decode(mark + header).ext == remoting.walk_fields(header[21:])


QUEUES = st.builds(MessageQueue, TEXT, TEXT, st.integers(-1, 1 << 20))
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.dictionaries(QUEUES, INT64, max_size=6))
@EXAMPLES
def test_maps_of_queues(offsets: dict[MessageQueue, int]) -> None:
    assert bodies.read_queue_offsets(bodies.write_queue_offsets(offsets)) == offsets


@given(st.dictionaries(TEXT, st.dictionaries(INT32, INT64, max_size=4), max_size=4))
@EXAMPLES
def test_maps_of_integers(offsets: dict[str, dict[int, int]]) -> None:
    body = bodies.write_consumer_offsets(offsets, bodies.DataVersion())
    assert bodies.read_consumer_offsets(body) == offsets


@given(st.dictionaries(FILLED, st.dictionaries(FILLED, FILLED, max_size=3), max_size=5))
@EXAMPLES
def test_strict_json_is_not_changed_by_the_lenient_reader(value: dict[str, Any]) -> None:
    assert lenient_json.loads(orjson.dumps(value)) == value
    assert lenient_json.loads(orjson.dumps([value, [value]])) == [value, [value]]


@given(st.lists(st.tuples(INT32, st.binary(max_size=50), st.binary(max_size=50)), min_size=1))
@EXAMPLES
def test_batches(messages: list[tuple[int, bytes, bytes]]) -> None:
    split = split_batch(join_batch(messages))
    assert [(flag, bytes(body), properties) for flag, body, properties in split] == messages
