"""This module tests how sockets are set up: nothing is joined, and within a machine not paced."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from sluice import tcp

CONGESTION = tcp._CONGESTION
pytestmark = pytest.mark.skipif(not CONGESTION, reason="this system has no choice of congestion")


class Ends:
    """A socket that says where its ends are, and notes what it is told."""

    def __init__(self, here: str, there: str, name: bytes) -> None:
        self.here, self.there = here, there
        self.name = name
        self.told: dict[tuple[int, int], int | bytes] = {}

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1

    def getpeername(self) -> tuple[str, int]:
        return self.there, 2

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, CONGESTION)
        return self.name.ljust(size, b"\0")[:size]

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self.told[level, option] = value


def told(here: str, there: str, name: bytes) -> dict[tuple[int, int], int | bytes]:
    ends = Ends(here, there, name)
    tcp.set_up(ends)  # type: ignore[arg-type]
    return ends.told


NO_DELAY = {(socket.IPPROTO_TCP, socket.TCP_NODELAY): 1}
UNPACED = {(socket.IPPROTO_TCP, CONGESTION): b"reno"}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "10.0.0.7"])
@pytest.mark.parametrize("name", [b"bbr", b"bbr2"])
def test_what_paces_does_not_within_a_machine(address: str, name: bytes) -> None:
    assert told(address, address, name) == NO_DELAY | UNPACED


def test_over_a_network_the_systems_choice_stays() -> None:
    assert told("10.0.0.7", "10.0.0.8", b"bbr") == NO_DELAY


@pytest.mark.parametrize("name", [b"cubic", b"reno", b"dctcp"])
def test_what_does_not_pace_stays(name: bytes) -> None:
    assert told("127.0.0.1", "127.0.0.1", name) == NO_DELAY


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        asking = socket.create_connection(listening.getsockname())
        answering, _ = listening.accept()
    with closing(asking), closing(answering):
        yield asking, answering


def test_a_real_connection_works_on(pair: tuple[socket.socket, socket.socket]) -> None:
    """Whatever the system takes: afterwards it is not BBR, which the socket itself tells."""
    asking, answering = pair
    for each in pair:
        tcp.set_up(each)
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not each.getsockopt(socket.IPPROTO_TCP, CONGESTION, 16).startswith(b"bbr")
    asking.sendall(b"question")
    assert answering.recv(8) == b"question"


def test_a_peer_that_has_gone_is_found_out_by_who_uses_the_socket_next() -> None:
    with closing(socket.socket()) as unconnected:
        tcp.set_up(unconnected)
        assert unconnected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
