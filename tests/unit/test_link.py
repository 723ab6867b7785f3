"""This module tests links: answers find their requests, and no request waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sluice.errors import LinkBusy, LinkLost, NoPermission, RequestTimedOut
from sluice.link import RemotingLink, request_name, split_address
from sluice.net import Connection, Limits, Listener
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand
from tests.unit.loops import Run, both_loops, run_once, until

SILENT, ECHO, LAST_FIRST, HANG_UP, JUNK = 1, 2, 3, 4, 5


class Peer:
    """The other end: what it does depends on the request's code."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.asked: list[RemotingCommand] = []
        self.answers: list[RemotingCommand] = []
        self.held: list[RemotingCommand] = []
        self.address = ""

    def opened(self, connection: Connection) -> None:
        self.connections.append(connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            command = remoting.decode(frame)
            if command.is_answer:
                self.answers.append(command)
                continue
            self.asked.append(command)
            if command.code == ECHO:
                self.answer(connection, command)
            elif command.code == LAST_FIRST:
                self.held.append(command)
            elif command.code == HANG_UP:
                connection.close("enough")
            elif command.code == JUNK:
                connection.send(b"\xff" * 100)

    def closed(self, connection: Connection) -> None:
        self.connections.remove(connection)

    def answer(self, connection: Connection, command: RemotingCommand) -> None:
        connection.send(remoting.answer(command, 0, command.ext, "well", command.body))

    def ask(self, code: int, *, flag: int = 0, opaque: int = 7) -> None:
        command = RemotingCommand(code, opaque, flag, {"a": "b"}, b"question")
        self.connections[0].send(remoting.encode(command))


@asynccontextmanager
async def peer_listening() -> AsyncIterator[Peer]:
    peer = Peer()
    listener = Listener(peer, Limits())
    await listener.start("127.0.0.1", 0)
    peer.address = "{}:{}".format(*listener.address)
    try:
        yield peer
    finally:
        await listener.stop()


@both_loops
@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_a_request_gets_its_answer(run: Run, serialization: int) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address, serialization=serialization)
            answer = await link.request(ECHO, {"topic": "t"}, b"body" * 10_000)
            assert (answer.code, answer.remark, answer.ext) == (0, "well", {"topic": "t"})
            assert bytes(answer.body) == b"body" * 10_000
            assert answer.serialization == serialization
            assert peer.asked[0].version == 513
            assert str(link) == peer.address
            await link.close()
            assert not link.is_open

    run(work())


@both_loops
def test_answers_come_in_any_order(run: Run) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address)
            asked = [
                asyncio.create_task(link.request(LAST_FIRST, {"n": str(n)}, timeout_seconds=50))
                for n in range(100)
            ]
            await until(lambda: len(peer.held) == 100)
            assert link.waiting_count == 100
            for command in reversed(peer.held):
                peer.answer(peer.connections[0], command)
            answers = await asyncio.gather(*asked)
            assert [answer.ext["n"] for answer in answers] == [str(n) for n in range(100)]
            assert link.waiting_count == 0
            await link.close()

    run(work())


@both_loops
def test_a_request_that_nobody_waits_for_any_more_leaves_nothing(run: Run) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address)
            asked = link.request_now(LAST_FIRST, {"n": "1"}, b"body", timeout_seconds=50)
            kept = link.request_now(LAST_FIRST, {"n": "2"}, timeout_seconds=50)
            assert link.waiting_count == 2
            await until(lambda: len(peer.held) == 2)
            asked.cancel()
            await until(lambda: link.waiting_count == 1)
            for command in peer.held:
                peer.answer(peer.connections[0], command)
            assert (await kept).ext == {"n": "2"}
            await until(lambda: link.waiting_count == 0)
            await link.close()
            with pytest.raises(LinkLost):
                link.request_now(ECHO)

    run(work())


@both_loops
def test_a_late_answer_harms_nobody(run: Run) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address)
            with pytest.raises(
                RequestTimedOut, match=r"did not answer request \(3\) within 0\.01 s"
            ):
                await link.request(LAST_FIRST, timeout_seconds=0.01)
            await until(lambda: peer.held)
            peer.answer(peer.connections[0], peer.held[0])
            peer.answer(peer.connections[0], RemotingCommand(0, 123456))
            assert (await link.request(ECHO, {"n": "next"})).ext == {"n": "next"}
            assert link.waiting_count == 0
            await link.close()

    run(work())


@both_loops
@pytest.mark.parametrize(
    ("code", "reason"), [(HANG_UP, "closed by the peer"), (JUNK, "a frame of -1 bytes is outside")]
)
def test_a_lost_connection_fails_every_request_with_the_reason(
    run: Run, code: int, reason: str
) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            lost: list[str] = []
            link = await RemotingLink.open(
                peer.address, on_lost=lambda link: lost.append(link.lost_reason)
            )
            waiting = [
                asyncio.create_task(link.request(SILENT, timeout_seconds=50)) for _ in range(3)
            ]
            await until(lambda: len(peer.asked) == 3)
            waiting.append(asyncio.create_task(link.request(code, timeout_seconds=50)))
            for task in waiting:
                with pytest.raises(LinkLost, match=f"was lost before the answer .* came: {reason}"):
                    await task
            assert (link.waiting_count, link.is_open, len(lost)) == (0, False, 1)
            for _ in range(2):
                with pytest.raises(LinkLost, match="the connection is closed: "):
                    await link.request(ECHO)
            with pytest.raises(LinkLost):
                link.oneway(ECHO)
            await link.close()

    run(work())


@both_loops
def test_an_own_close_fails_what_waits(run: Run) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address)
            waiting = asyncio.create_task(link.request(SILENT, timeout_seconds=50))
            await until(lambda: peer.asked)
            await link.close("bored")
            with pytest.raises(LinkLost, match="bored"):
                await waiting

    run(work())


@both_loops
def test_a_oneway_request_waits_for_nothing(run: Run) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address)
            link.oneway(SILENT, {"n": "1"}, b"x")
            await until(lambda: peer.asked)
            assert (peer.asked[0].is_oneway, bytes(peer.asked[0].body)) == (True, b"x")
            assert link.waiting_count == 0
            await link.close()

    run(work())


def answers_of(
    on_request: Callable[[RemotingLink, RemotingCommand], None] | None,
) -> list[RemotingCommand]:
    """What a peer gets for a question, a one-way question and one more question."""
    answers: list[RemotingCommand] = []

    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address, on_request=on_request)
            await until(lambda: peer.connections)
            peer.ask(40, opaque=7)
            peer.ask(40, flag=remoting.FLAG_ONEWAY, opaque=8)
            peer.ask(41, opaque=9)
            await until(lambda: len(peer.answers) == 2)
            answers.extend(peer.answers)
            await link.close()

    run_once(work())
    return answers


def test_the_peers_requests_may_be_answered_at_once_or_later() -> None:
    seen: list[RemotingCommand] = []

    def on_request(link: RemotingLink, command: RemotingCommand) -> None:
        seen.append(command)
        if command.code == 40:
            loop = asyncio.get_running_loop()
            loop.call_later(0.02, link.answer, command, 0, {"late": "yes"})
        else:
            link.answer(command, 0, body=b"at once")

    first, second = answers_of(on_request)
    assert [command.opaque for command in seen] == [7, 8, 9]
    assert (first.opaque, bytes(first.body)) == (9, b"at once")
    assert (second.opaque, second.ext) == (7, {"late": "yes"})


def test_without_a_callback_the_peers_requests_are_refused() -> None:
    answers = answers_of(None)
    assert [(a.opaque, a.code, a.remark) for a in answers] == [
        (7, 3, " request type 40 not supported"),
        (9, 3, " request type 41 not supported"),
    ]


def test_an_error_of_the_callback_is_the_answer() -> None:
    def on_request(link: RemotingLink, command: RemotingCommand) -> None:
        raise NoPermission("not you")

    assert [(a.code, a.remark) for a in answers_of(on_request)] == [(16, "not you")] * 2


@both_loops
def test_what_waits_is_bounded_in_number_and_bytes(run: Run) -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address, waiting_max=3, waiting_bytes_max=1000)
            # One request alone may be larger than the limit.
            waiting = [asyncio.create_task(link.request(SILENT, None, bytes(900), 50))]
            await until(lambda: link.waiting_count == 1)
            with pytest.raises(LinkBusy, match="900 bytes wait"):
                await link.request(ECHO, body=bytes(101))
            with pytest.raises(LinkBusy, match="bytes wait"):
                link.oneway(ECHO, body=bytes(101))
            waiting += [asyncio.create_task(link.request(SILENT, None, b"", 50)) for _ in "ab"]
            await until(lambda: link.waiting_count == 3)
            with pytest.raises(LinkBusy, match="3 requests wait"):
                await link.request(ECHO)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            answer = await link.request(ECHO, body=bytes(5000))
            assert len(answer.body) == 5000
            await link.close()

    run(work())


def test_a_number_that_waits_is_not_given_away_again() -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            link = await RemotingLink.open(peer.address)
            link._opaque = 0x7FFFFFFE
            waiting = asyncio.create_task(link.request(SILENT, timeout_seconds=50))
            await until(lambda: peer.asked)
            await link.request(ECHO)
            link._opaque = 0x7FFFFFFE
            await link.request(ECHO)
            assert [command.opaque for command in peer.asked] == [0x7FFFFFFF, 0, 0]
            waiting.cancel()
            await link.close()

    run_once(work())


def test_a_connection_that_cannot_be_had() -> None:
    async def work() -> None:
        async with peer_listening() as peer:
            address = peer.address
        with pytest.raises(LinkLost, match=r"127\.0\.0\.1:\d+: cannot connect: "):
            await RemotingLink.open(address)
        with pytest.raises(LinkLost, match="'nonsense' is not host:port"):
            await RemotingLink.open("nonsense")

    run_once(work())


@pytest.mark.parametrize(
    ("text", "address"),
    [("a.b:1", ("a.b", 1)), ("127.0.0.1:9876", ("127.0.0.1", 9876)), ("[::1]:80", ("::1", 80))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:0", "host:65536", "host:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(text)


def test_requests_have_names() -> None:
    assert request_name(105) == "GET_ROUTEINFO_BY_TOPIC (105)"
    assert request_name(7) == "request (7)"
