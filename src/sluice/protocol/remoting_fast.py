"""This module reads sends, pulls and commits into typed values, and writes answers: the hot paths.

It does nothing that `remoting.py` and `remoting_schemas.py` could not do, only faster: a test holds
the two ways together. What is not as usual (a negative number, a field in capital letters) goes
the way of the schema, which also says what is wrong with it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from sluice.errors import ProtocolError
from sluice.protocol import remoting
from sluice.protocol.remoting import BINARY, FLAG_ANSWER, VERSION, RemotingCommand
from sluice.protocol.remoting_codes import RequestCode, ResponseCode
from sluice.protocol.remoting_schemas import REQUESTS, parse_fields

# Queues, flags and counts are small. A lookup costs a third of int(), and is its own check.
_SMALL: Final = {str(number): number for number in range(1024)}
_BOOLS: Final = {None: False, "false": False, "true": True}
_TIME_DIGITS: Final = 13
_OFFSET_DIGITS_MAX: Final = 18  # any such number fits into 64 bits

_LETTERS: Final = frozenset(
    (
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    )
)
_NAME_OF_LETTER: Final = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
    "n": "bname",
}


class SendRequest(NamedTuple):
    """The fields of a send (10, 310, 320, 324, 325)."""

    producer_group: str
    topic: str
    default_topic: str
    default_queue_count: int
    queue_id: int
    sys_flag: int
    born_ms: int
    flag: int
    properties: str
    reconsume_times: int
    unit_mode: bool
    max_reconsume_times: int | None
    batch: bool


class PullRequest(NamedTuple):
    """The fields of a pull (11, 361)."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    message_count_max: int
    sys_flag: int
    commit_offset: int
    suspend_ms: int
    subscription: str | None
    sub_version: int
    expression_type: str | None


def read_send(command: RemotingCommand) -> SendRequest:
    """The typed fields of a send; RequestInvalid names the field that is wrong."""
    ext = command.ext
    if command.code in _LETTERS:
        try:
            born = ext["g"]
            if len(born) == _TIME_DIGITS and born.isdecimal() and "l" not in ext:
                return SendRequest(
                    ext["a"],
                    ext["b"],
                    ext["c"],
                    _SMALL[ext["d"]],
                    _SMALL[ext["e"]],
                    _SMALL[ext["f"]],
                    int(born),
                    _SMALL[ext["h"]],
                    ext.get("i", ""),
                    _SMALL[ext.get("j", "0")],
                    _BOOLS[ext.get("k")],
                    None,
                    _BOOLS[ext.get("m")],
                )
        except KeyError:
            pass
    return _read_odd_send(command)


def _read_odd_send(command: RemotingCommand) -> SendRequest:
    values = parse_fields(REQUESTS[command.code], command.ext)
    if command.code in _LETTERS:
        values = {_NAME_OF_LETTER[letter]: value for letter, value in values.items()}
    return SendRequest(
        values["producerGroup"],
        values["topic"],
        values["defaultTopic"],
        values["defaultTopicQueueNums"],
        values["queueId"],
        values["sysFlag"],
        values["bornTimestamp"],
        values["flag"],
        values["properties"] or "",
        values["reconsumeTimes"] or 0,
        values["unitMode"] or False,
        values["maxReconsumeTimes"],
        values["batch"] or False,
    )


def read_pull(command: RemotingCommand) -> PullRequest:
    """The typed fields of a pull; RequestInvalid names the field that is wrong."""
    ext = command.ext
    try:
        offset, commit = ext["queueOffset"], ext["commitOffset"]
        suspend, version = ext["suspendTimeoutMillis"], ext["subVersion"]
        numbers = (offset, commit, suspend, version)
        if max(map(len, numbers)) <= _OFFSET_DIGITS_MAX and all(map(str.isdecimal, numbers)):
            return PullRequest(
                ext["consumerGroup"],
                ext["topic"],
                _SMALL[ext["queueId"]],
                int(offset),
                _SMALL[ext["maxMsgNums"]],
                _SMALL[ext["sysFlag"]],
                int(commit),
                int(suspend),
                ext.get("subscription"),
                int(version),
                ext.get("expressionType"),
            )
    except KeyError:
        pass
    values = parse_fields(REQUESTS[command.code], ext)
    return PullRequest(
        values["consumerGroup"],
        values["topic"],
        values["queueId"],
        values["queueOffset"],
        values["maxMsgNums"],
        values["sysFlag"],
        values["commitOffset"],
        values["suspendTimeoutMillis"],
        values["subscription"],
        values["subVersion"],
        values["expressionType"],
    )


# ----------------------------------------------------------------------- sends, straight from bytes

# A producer sends the fields a to n with every message, and of those only the queue (e), the time
# (g) and the properties (i) change. What stands before the time and what stands after the
# properties is looked up by its bytes, and nothing becomes text that is stored as bytes.
_QUICK: Final = Struct(">Ih3xiiII")  # mark, code, opaque, flag, two sizes
_U32: Final = Struct(">I")
QUICK_BYTES_MIN: Final = _QUICK.size
_BATCH_CODE: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_SEND_CODES: Final = (int(RequestCode.SEND_MESSAGE_V2), _BATCH_CODE)
_BINARY_MARK: Final = (BINARY << 24) - 4  # a binary header that ends at 0
_TIME_MARK: Final = b"\x00\x01g\x00\x00\x00\x0d"  # thirteen digits: until the year 2286
_FLAG_MARK: Final = b"\x00\x01h\x00\x00\x00\x010\x00\x01i"
_BORN_AT: Final = len(_TIME_MARK)
_BORN_END: Final = _BORN_AT + _TIME_DIGITS
_PROPERTIES_AT: Final = _BORN_END + len(_FLAG_MARK) + 4
_PART_BYTES_MAX: Final = 512  # bounds what is remembered, together with the number of parts
_PARTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class SendHead:
    """What a producer repeats with every message to one queue. There is one for all of them, so
    that others can keep by it what they know of the queue.
    """

    topic: str
    default_topic: str
    default_queue_count: int
    queue_id: int
    sys_flag: int


# Opaque, head, born time, properties, reconsume times (of a batch: -1), where the body begins.
QuickSend = tuple[int, SendHead, int, bytes, int, int]

_heads: Final[dict[bytes, SendHead | None]] = {}
_tails: Final[dict[bytes, int | None]] = {}


def quick_send(frame: bytes) -> QuickSend | None:
    """A send or a batch (310, 320) with a binary header of at least `QUICK_BYTES_MIN` bytes, taken
    apart; None where anything is unusual: then `remoting.decode` and `read_send` decide.
    """
    mark, code, opaque, flag, remark_bytes, fields_bytes = _QUICK.unpack_from(frame)
    body_at = QUICK_BYTES_MIN + fields_bytes
    if (
        flag
        or remark_bytes
        or code not in _SEND_CODES
        or mark != _BINARY_MARK + body_at
        or body_at >= len(frame)  # what has no body is refused the plain way
    ):
        return None
    time_at = frame.find(_TIME_MARK, QUICK_BYTES_MIN, QUICK_BYTES_MIN + _PART_BYTES_MAX)
    begin = time_at + _PROPERTIES_AT
    born_end = time_at + _BORN_END
    if time_at < 0 or begin > body_at or not frame.startswith(_FLAG_MARK, born_end):
        return None
    end = begin + _U32.unpack_from(frame, begin - 4)[0]
    if not begin < end <= body_at <= end + _PART_BYTES_MAX:
        return None
    part = frame[QUICK_BYTES_MIN:time_at]
    head = _heads.get(part) or _learn_head(part)
    part = frame[end:body_at]
    reconsume_times = _tails.get(part)
    if reconsume_times is None:
        reconsume_times = _learn_tail(part)
    born = frame[time_at + _BORN_AT : born_end]
    properties = frame[begin:end]
    if head is None or reconsume_times is None or not (properties.isascii() and born.isdigit()):
        return None
    if (code == _BATCH_CODE) is not (reconsume_times < 0):
        return None
    return opaque, head, int(born), properties, reconsume_times, body_at


def _learn_head(part: bytes) -> SendHead | None:
    if part in _heads:
        return None
    head = None
    with suppress(ProtocolError, KeyError):
        fields = remoting.walk_fields(part)
        if fields.keys() == set("abcdef"):
            head = SendHead(
                fields["b"],
                fields["c"],
                _SMALL[fields["d"]],
                _SMALL[fields["e"]],
                _SMALL[fields["f"]],
            )
    if len(_heads) >= _PARTS_MAX:
        _heads.clear()
    _heads[part] = head
    return head


def _learn_tail(part: bytes) -> int | None:
    if part in _tails:
        return None
    times: int | None = None
    with suppress(ProtocolError, KeyError):
        fields = remoting.walk_fields(part)
        batch = _BOOLS[fields.get("m")]
        # What a producer of a unit sends may make a topic of that unit: the plain way does.
        if not _BOOLS[fields.get("k")] and fields.keys() <= set("jkmn"):
            times = _SMALL[fields.get("j", "0")]
            if batch:
                times = -1 if times == 0 else None
    if len(_tails) >= _PARTS_MAX:
        _tails.clear()
    _tails[part] = times
    return times


# --------------------------------------------------------------- commits, straight from bytes too

_ONEWAY: Final = 2  # in a request's flag
_END_CODE: Final = int(RequestCode.END_TRANSACTION)
_COMMIT: Final = b"8"
_END_FIELDS_MAX: Final = 16


def quick_commit(frame: bytes) -> tuple[bytes, int, int] | None:
    """Group, offset and position of a half message that is committed (37) by a binary header of at
    least `QUICK_BYTES_MIN` bytes which asks for no answer; None where anything is unusual.
    """
    mark, code, _, flag, remark_bytes, fields_bytes = _QUICK.unpack_from(frame)
    at, end = QUICK_BYTES_MIN, QUICK_BYTES_MIN + fields_bytes
    if (
        flag != _ONEWAY
        or remark_bytes
        or code != _END_CODE
        or mark != _BINARY_MARK + end
        or end > len(frame)
    ):
        return None
    fields: dict[bytes, bytes] = {}
    unpack = _U32.unpack_from
    while at + 6 < end:
        name_end = at + 2 + (frame[at] << 8 | frame[at + 1])
        if name_end + 4 > end:
            return None
        begin = name_end + 4
        stop = begin + unpack(frame, name_end)[0]
        fields[frame[at + 2 : name_end]] = frame[begin:stop]
        at = stop
    get = fields.get
    offset, position = get(b"tranStateTableOffset", b""), get(b"commitLogOffset", b"")
    group = get(b"producerGroup", b"")
    if (
        at != end
        or len(fields) > _END_FIELDS_MAX
        or get(b"commitOrRollback") != _COMMIT
        or not (group and get(b"msgId") and group.isascii())
        or not (offset.isdigit() and position.isdigit())
        or max(len(offset), len(position)) > _OFFSET_DIGITS_MAX
    ):
        return None
    return group, int(offset), int(position)


# ---------------------------------------------------------------------------------------- answers

_REGION: Final = "DefaultRegion"
_SEND_TAIL: Final = "\0\nMSG_REGION\0\0\0\r" + _REGION + "\0\bTRACE_ON\0\0\0\x04true"
_HEAD: Final = Struct(">iIhBhiiiI")
_HEAD_BYTES: Final = 21  # of the binary header without its fields
_PYTHON: Final = remoting.LANGUAGES.index(remoting.LANGUAGE)
_SHORT_MAX: Final = 127  # a size up to this is one ASCII character
_SIZES: Final = tuple(map(chr, range(_SHORT_MAX + 1)))


def send_answer(
    serialization: int,
    opaque: int,
    message_ids: str,
    queue_id: int,
    queue_offset: int,
    transaction_id: str,
    recall_handle: str = "",
) -> bytes:
    """The frame that acknowledges a send."""
    queue, offset = str(queue_id), str(queue_offset)
    if (
        serialization == BINARY
        and not recall_handle
        and 0 < len(transaction_id) <= _SHORT_MAX
        and transaction_id.isascii()
    ):
        # A batch lists an id for each message: four bytes of size, each as a character.
        ids_size = len(message_ids).to_bytes(4, "big").decode("latin-1")
        fields = (
            f"\0\5msgId{ids_size}{message_ids}"
            f"\0\7queueId\0\0\0{_SIZES[len(queue)]}{queue}"
            f"\0\vqueueOffset\0\0\0{_SIZES[len(offset)]}{offset}"
            f"\0\rtransactionId\0\0\0{_SIZES[len(transaction_id)]}{transaction_id}{_SEND_TAIL}"
        ).encode("latin-1")
        size = len(fields)
        header_bytes = _HEAD_BYTES + size
        return (
            _HEAD.pack(
                4 + header_bytes,
                BINARY << 24 | header_bytes,
                ResponseCode.SUCCESS,
                _PYTHON,
                VERSION,
                opaque,
                FLAG_ANSWER,
                0,
                size,
            )
            + fields
        )
    ext = {
        "msgId": message_ids,
        "queueId": queue,
        "queueOffset": offset,
        "transactionId": transaction_id,
        "MSG_REGION": _REGION,
        "TRACE_ON": "true",
    }
    if recall_handle:
        ext["recallHandle"] = recall_handle
    return remoting.head(serialization, ResponseCode.SUCCESS, opaque, FLAG_ANSWER, ext, None, 0)


_QUICK_ANSWER: Final = (
    b"%b\0\5msgId\0\0\0%c%b%016X"
    b"\0\7queueId\0\0\0%c%b"
    b"\0\vqueueOffset\0\0\0%c%b"
    b"\0\rtransactionId\0\0\0%c%b" + _SEND_TAIL.encode("ascii")
)
# Of the fields: all but the three that differ in size.
_QUICK_ANSWER_BYTES: Final = len(
    _QUICK_ANSWER % (b"", 0, b"", 0, 0, b"", 0, b"", 0, b""),
)


def quick_send_answer(
    opaque: int, host_hex: bytes, position: int, queue_id: int, queue_offset: int, unique: bytes
) -> bytes:
    """What `send_answer` writes for one message with a binary header. `host_hex` and the position
    make the message's id; the unique key has 1 to 127 bytes of ASCII.
    """
    queue, offset = b"%d" % queue_id, b"%d" % queue_offset
    host_bytes, queue_bytes = len(host_hex), len(queue)
    offset_bytes, unique_bytes = len(offset), len(unique)
    size = _QUICK_ANSWER_BYTES + host_bytes + queue_bytes + offset_bytes + unique_bytes
    header_bytes = _HEAD_BYTES + size
    mark = BINARY << 24 | header_bytes
    return _QUICK_ANSWER % (
        _HEAD.pack(4 + header_bytes, mark, 0, _PYTHON, VERSION, opaque, 1, 0, size),
        host_bytes + 16,
        host_hex,
        position,
        queue_bytes,
        queue,
        offset_bytes,
        offset,
        unique_bytes,
        unique,
    )


_BATCH_ANSWER: Final = (
    b"%b\0\5msgId%b%b"
    b"\0\7queueId\0\0\0%c%b"
    b"\0\vqueueOffset\0\0\0%c%b"
    b"\0\rtransactionId\0\0\0%c%b" + _SEND_TAIL.encode("ascii")
)
_BATCH_ANSWER_BYTES: Final = len(_BATCH_ANSWER % (b"", bytes(4), b"", 0, b"", 0, b"", 0, b""))


def batch_ids(host_hex: str, positions: bytes) -> str:
    """The ids of a batch's messages, from the positions, eight bytes each."""
    return host_hex + positions.hex(",", 8).upper().replace(",", "," + host_hex)


def quick_batch_answer(
    opaque: int, message_ids: str, queue_id: int, queue_offset: int, unique: bytes
) -> bytes:
    """What `send_answer` writes for a batch with a binary header, if the first unique key has 1 to
    127 bytes of ASCII.
    """
    ids, queue, offset = message_ids.encode("ascii"), b"%d" % queue_id, b"%d" % queue_offset
    size = _BATCH_ANSWER_BYTES + len(ids) + len(queue) + len(offset) + len(unique)
    header_bytes = _HEAD_BYTES + size
    mark = BINARY << 24 | header_bytes
    return _BATCH_ANSWER % (
        _HEAD.pack(4 + header_bytes, mark, 0, _PYTHON, VERSION, opaque, 1, 0, size),
        *(len(ids).to_bytes(4, "big"), ids),
        *(len(queue), queue, len(offset), offset, len(unique), unique),
    )


def with_field(answer: bytes, name: bytes, value: bytes) -> bytes:
    """An answer with a binary header and no body, with one more field."""
    more = b"%c%c%b%b%b" % (0, len(name), name, len(value).to_bytes(4, "big"), value)
    total, mark, *others, size = _HEAD.unpack_from(answer)
    count = len(more)
    head = _HEAD.pack(total + count, mark + count, *others, size + count)
    return head + answer[_HEAD.size :] + more


def pull_answer_head(
    request: RemotingCommand,
    code: int,
    status: str,
    next_offset: int,
    min_offset: int,
    max_offset: int,
    body_bytes: int,
    broker_id: int = 0,
) -> bytes:
    """What stands before the messages in the answer to a pull. Java unboxes all four numbers."""
    ext = {
        "suggestWhichBrokerId": str(broker_id),
        "nextBeginOffset": str(next_offset),
        "minOffset": str(min_offset),
        "maxOffset": str(max_offset),
        "topicSysFlag": "0",
        "groupSysFlag": "0",
    }
    return remoting.answer_head(request, code, ext, status, body_bytes)
