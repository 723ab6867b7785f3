"""The benchmark of business messages: its frames, its arithmetic, what it does at a broker."""

import contextlib
import itertools
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.business import FIGURES, Session, check_share, measure
from bench.business_loads import (
    AMOUNTS,
    REGIONS,
    SQL_SHARE,
    Delivered,
    Done,
    handles,
    log_positions,
    pop_and_acknowledge,
    receive_burst,
    record_starts,
    scan,
    send_back,
    send_offers,
    send_timed,
)
from bench.harness import Failed, Figure, Run, Unusable
from bench.raw_client import (
    ACK_MESSAGE,
    POLLING_TIMEOUT,
    POP_MESSAGE,
    PULL_MESSAGE,
    PULL_NOT_FOUND,
    PULL_RETRY,
    SEND_BACK,
    SEND_MESSAGE_V2,
    SUCCESS,
    Answer,
    Line,
    Refused,
    Template,
    decode,
    encode,
    is_success,
    pump,
    split,
)
from bench.rocketmq_programs import TIMER_PRODUCER, TRANSACTION_PRODUCER, Program, read_reports
from bench.rocketmq_servers import QUEUES
from bench.sides import Pace, Samples
from peers.fetch import Jars
from tests.unit.test_bench import PausingServer

TRANSACTION_OUTPUT = """\
Current Time: 2026-01-02 03:04:05,678 | Send TPS:  9000 | Max RT(ms):    90 | AVG RT(ms): 3.5 | \
Send Failed: 1 | Check: 0 | UnexpectedCheck: 0 | DuplicatedCheck: 0
"""
TIMER_OUTPUT = """\
namesrvAddr: 127.0.0.1:1, topic: t, threadCount: 16, messageSize: 1024, precisionMs: 1000, \
slotsTotal: 100, msgsTotalPerSlotThread: 5000, slotDis: 1000
Start sending messages
Send TPS: 8123, Max RT: 55, Average RT:   1.900, Send Failed: 2, Response Failed: 1
"""


@pytest.mark.parametrize(
    ("program", "output", "report"),
    [
        (TRANSACTION_PRODUCER, TRANSACTION_OUTPUT, (9000, 1)),
        (TIMER_PRODUCER, TIMER_OUTPUT, (8123, 3)),
    ],
)
def test_reports_of_the_programs_are_read(
    program: Program, output: str, report: tuple[float, int]
) -> None:
    assert read_reports(program, output) == [report]


# ---------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize("code", [SEND_MESSAGE_V2, POP_MESSAGE])
def test_a_request_is_read_as_it_was_written(code: int) -> None:
    """The second code does not fit into a binary header."""
    frame = encode(code, 77, {"a": "text", "b": 5, "c": ""}, b"body")
    (inner,), rest = split(frame)
    assert rest == b""
    assert decode(inner) == Answer(code, 77, "", {"a": "text", "b": "5", "c": ""}, b"body")


def test_frames_are_found_wherever_they_are_cut() -> None:
    frames = [encode(310, number, {"a": "x" * number}) for number in range(5)]
    stream = b"".join(frames)
    for cut in range(len(stream) + 1):
        first, rest = split(stream[:cut])
        second, left = split(rest + stream[cut:])
        assert [4 + len(frame) for frame in first + second] == [len(frame) for frame in frames]
        assert left == b""
    with pytest.raises(Failed, match="an answer of 0 bytes"):
        split(bytes(4))


def test_a_template_is_filled_with_texts_of_the_same_length() -> None:
    template = Template(encode(310, 0, {"i": "ONE two THREE"}, b"body"), [b"ONE", b"THREE"])
    assert template.frame(9, b"six", b"seven") == encode(310, 9, {"i": "six two seven"}, b"body")
    with pytest.raises(AssertionError):
        template.frame(9, b"four", b"seven")


def test_answers_are_successes_or_refusals() -> None:
    assert is_success(encode(0, 1, {})[4:])
    assert not is_success(encode(13, 1, {})[4:])
    assert not is_success(encode(256, 1, {})[4:])
    with pytest.raises(Refused, match="code 13: no"):
        Answer(13, 1, "no", {}, b"").wanted()
    with pytest.raises(Refused, match="code 0"):
        Answer(0, 1, "", {}, b"").wanted(19)


# ------------------------------------------------------------------------------- a broker to ask

Handle = Callable[[Answer], bytes | None]


@contextlib.contextmanager
def broker(handle: Handle) -> Iterator[int]:
    """The port of a broker that answers each request with what `handle` makes of it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            rest = b""
            while received := self.request.recv(1 << 16):
                frames, rest = split(rest + received)
                for frame in frames:
                    if (answer := handle(decode(frame))) is not None:
                        self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def record(position: int) -> bytes:
    """As much of a stored message as is looked at: its size, and where it is in the log."""
    return (40).to_bytes(4, "big") + bytes(24) + position.to_bytes(8, "big") + bytes(4)


class Queues:
    """Queues of one broker that hold so many messages each; every tenth passes a filter."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[dict[str, str]] = []
        self.sent_back: list[tuple[int, str]] = []
        self.popped = [0] * QUEUES
        self.acknowledged: list[tuple[int, int, str]] = []

    def handle(self, request: Answer) -> bytes | None:
        fields = request.fields
        if request.code == SEND_MESSAGE_V2:
            self.sent.append(fields)
        elif request.code == PULL_MESSAGE:
            return self._pull(request)
        elif request.code == SEND_BACK:
            self.sent_back.append((int(fields["offset"]), fields["group"]))
        elif request.code == POP_MESSAGE:
            return self._pop(request)
        elif request.code == ACK_MESSAGE:
            words = int(fields["queueId"]), int(fields["offset"]), fields["extraInfo"]
            self.acknowledged.append(words)
        return encode(SUCCESS, request.opaque, {})

    def _pull(self, request: Answer) -> bytes:
        queue_id, offset = int(request.fields["queueId"]), int(request.fields["queueOffset"])
        filtered = request.fields["expressionType"] == "SQL92"
        offsets = range(offset, min(offset + (100 if filtered else 32), self.count))
        passing = [at for at in offsets if not filtered or at % 10 == 0]
        code = SUCCESS if passing else PULL_RETRY if offsets else PULL_NOT_FOUND
        body = b"".join(record(queue_id * 1000 + at) for at in passing)
        return encode(code, request.opaque, {"nextBeginOffset": offsets.stop}, body)

    def _pop(self, request: Answer) -> bytes:
        queue_id = int(request.fields["queueId"])
        first = self.popped[queue_id]
        last = self.popped[queue_id] = min(first + 32, self.count)
        if first == last:
            return encode(POLLING_TIMEOUT, request.opaque, {})
        said = {
            "popTime": 11,
            "invisibleTime": 22,
            "reviveQid": 3,
            "startOffsetInfo": f"0 {queue_id} {first}",
            "msgOffsetInfo": f"0 {queue_id} {','.join(map(str, range(first, last)))}",
        }
        return encode(SUCCESS, request.opaque, said)


def test_everything_is_sent_with_so_many_requests_under_way() -> None:
    waiting: list[bytes] = []
    most = 0

    def handle(request: Answer) -> bytes | None:
        """Answer only when the window is full, all at once."""
        nonlocal most
        waiting.append(encode(SUCCESS, request.opaque, {}))
        most = max(most, len(waiting))
        if len(waiting) < 10:
            return None
        answers = b"".join(waiting)
        waiting.clear()
        return answers

    with broker(handle) as port, Line(port) as line:
        frames = iter([encode(310, number, {}) for number in range(100)])
        assert pump(line, frames, window=10) == 100
    assert most == 10


def test_a_refusal_among_many_answers_is_told() -> None:
    def handle(request: Answer) -> bytes:
        return encode(13 if request.opaque == 7 else SUCCESS, request.opaque, {})

    with broker(handle) as port, Line(port) as line:
        frames = iter([encode(310, number, {}) for number in range(20)])
        with pytest.raises(Refused, match="code 13"):
            pump(line, frames, window=4)


def test_timers_are_sent_with_their_times_and_keys_of_their_own() -> None:
    queues = Queues(0)
    with broker(queues.handle) as port:
        send_timed(port, "t", 20, lambda i: 1_700_000_000_000 + i)
    sent = [dict(p.split("\x01") for p in row["i"].split("\x02") if p) for row in queues.sent]
    assert [row["TIMER_DELIVER_MS"] for row in sent] == [
        str(1_700_000_000_000 + i) for i in range(20)
    ]
    assert len({row["UNIQ_KEY"] for row in sent}) == 20
    assert [row["e"] for row in queues.sent] == [str(i % QUEUES) for i in range(20)]


def test_one_of_a_hundred_offers_passes_the_filter() -> None:
    queues = Queues(0)
    with broker(queues.handle) as port:
        send_offers(port, "t", len(AMOUNTS))
    sent = [dict(p.split("\x01") for p in row["i"].split("\x02") if p) for row in queues.sent]
    passing = [row for row in sent if int(row["amount"]) >= 19900 and row["region"] in REGIONS]
    assert len(passing) == len(AMOUNTS) * SQL_SHARE
    assert {row["region"] for row in sent} == set(REGIONS)


@pytest.mark.parametrize(("sql", "share"), [("a = 1", 0.1), (None, 1.0)])
def test_queues_are_gone_through_again_and_again(
    sql: str | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.business_loads.time.perf_counter", itertools.count().__next__)
    with broker(Queues(200).handle) as port:
        seen = scan(port, "g", "t", sql=sql, seconds=1000)
    assert seen.count > 200 * QUEUES
    assert seen.passed / seen.count == pytest.approx(share, rel=0.2)
    assert seen.seconds == 1000


def test_positions_in_the_log_are_read() -> None:
    with broker(Queues(40).handle) as port:
        positions = log_positions(port, "g", "t", 50)
    assert positions == [*range(40), *range(1000, 1010)]
    with pytest.raises(Failed, match="a record of 3 bytes"):
        list(record_starts(b"\0\0\0\3"))


def test_a_burst_is_received_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with broker(Queues(50).handle) as port:
        came = receive_burst(port, "g", "t", 50 * QUEUES, timeout_s=60)
        assert came.count == 50 * QUEUES
        assert came.first_ms <= came.last_ms
        with pytest.raises(Failed, match="messages came of 3"):
            receive_burst(port, "g", "t", 3, timeout_s=60)
        monkeypatch.setattr("bench.business_loads.time.monotonic", itertools.count().__next__)
        with pytest.raises(Failed, match="400 of 401 messages came"):
            receive_burst(port, "g", "t", 401, timeout_s=100)


def test_messages_are_sent_back_once_each() -> None:
    queues = Queues(0)
    with broker(queues.handle) as port:
        done = send_back(port, "g", "t", iter(range(300)), seconds=60)
    assert done.count == 300
    assert queues.sent_back == [(position, "g") for position in range(300)]


def test_what_is_popped_is_acknowledged() -> None:
    queues = Queues(70)
    with broker(queues.handle) as port:
        done = pop_and_acknowledge(port, "g", "t", broker="b", seconds=60)
    assert done.count == 70 * QUEUES
    wanted = {
        (queue, offset, f"{offset // 32 * 32} 11 22 3 0 b {queue} {offset}")
        for queue in range(QUEUES)
        for offset in range(70)
    }
    assert len(queues.acknowledged) == len(wanted)
    assert set(queues.acknowledged) == wanted


def test_handles_are_those_of_their_queue() -> None:
    said = {
        "popTime": "5",
        "invisibleTime": "6",
        "reviveQid": "7",
        "startOffsetInfo": "0 1 100;1 1 8",
        "msgOffsetInfo": "0 1 100,102;1 1 8",
    }
    assert list(handles(said, "b")) == [
        (1, 100, "100 5 6 7 0 b 1 100"),
        (1, 102, "100 5 6 7 0 b 1 102"),
        (1, 8, "8 5 6 7 1 b 1 8"),
    ]


# ------------------------------------------------------------------------------------ arithmetic


def test_rates_are_of_the_time_between_first_and_last() -> None:
    assert Delivered(1000, 5000, 7000).rate == 500.0
    assert Delivered(1000, 5000, 5000).rate == 1_000_000.0
    assert Done(300, 2.0).rate == 150.0


def test_a_filter_that_lets_pass_too_much_or_too_little_fails() -> None:
    check_share(0.0105, 0.01)
    for passed in (0.0, 0.007, 0.013, 1.0):
        with pytest.raises(Failed, match=r"passed where 1\.00% are to"):
            check_share(passed, 0.01)


def test_what_was_asked_for_is_measured_for_as_long() -> None:
    pace = Pace(3.0, 2.0, 1.0, 4)
    assert pace.for_seconds(None) == pace
    assert pace.for_seconds(7.5) == Pace(3.0, 2.0, 7.5, 4)


def test_what_sluice_refuses_is_a_figure_of_zero() -> None:
    samples = Samples({"pop": "msg/s"}, {})
    samples.add("pop", "peer", 5.0)
    assert samples.figure("pop") == Figure("pop", "msg/s", 0.0, 5.0, "Apache RocketMQ")
    assert samples.figure("pop").ratio is None


def test_a_side_that_refuses_is_not_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sides.Programs", lambda *_: None)
    session = Session(Run(tmp_path, quick=True), {"pop"}, Jars("", tmp_path))
    ours, peer = PausingServer(is_peer=False), PausingServer(is_peer=True)
    monkeypatch.setattr(session, "_servers", [("ours", ours), ("peer", peer)])
    asked: list[str] = []

    def work(side: str, _server: object) -> None:
        asked.append(side)
        if side == "ours" or len(asked) < 4:
            raise Refused("code 2: not now")

    session._in_turns("pop", work, rounds=3)
    # Apache's broker has the feature: it gets another try in its turn.
    assert asked == ["ours", "peer", "peer", "peer", "peer", "peer"]
    said = capsys.readouterr().err
    assert "pop is not served: code 2: not now" in said
    assert "again, because refused: code 2: not now" in said


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="no such figure: pops;"):
        measure(Run(tmp_path, quick=True, only=frozenset({"pops"})))


def test_the_figures_that_were_promised_are_among_them() -> None:
    assert {"transactions", "delay_in_1m_waiting", "delay_out", "sql_filter"} <= FIGURES.keys()


def test_the_benchmark_takes_parts() -> None:
    with pytest.raises(SystemExit):
        main(["business", "--seconds", "0"])
