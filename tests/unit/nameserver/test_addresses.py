"""Which address of a broker a client is given, when the broker listens everywhere."""

from __future__ import annotations

import pytest

from sluice.protocol import remoting_bodies as bodies
from tests.unit.nameserver.test_nameserver import BROKER, Site, on_site


@pytest.mark.parametrize(
    ("peer", "listens_on", "address"),
    [
        ("10.0.0.9", "0.0.0.0", "10.0.0.9:10911"),  # noqa: S104  # our own machine
        ("127.0.0.1", "::", "10.0.0.9:10911"),
        ("10.0.0.7", "0.0.0.0", "10.0.0.1:10911"),  # noqa: S104  # another machine
        ("10.0.0.9", "10.0.0.9", "10.0.0.1:10911"),  # it listens there, and not elsewhere
        ("10.0.0.9", "nonsense", "10.0.0.1:10911"),
        ("10.0.0.9", "", "10.0.0.1:10911"),
    ],
)
def test_only_a_broker_of_this_machine_is_found_where_the_client_dialled(
    peer: str, listens_on: str, address: str
) -> None:
    async def work(here: Site) -> None:
        listener = here.nameserver.listener
        assert listener is not None
        await here.ask(106)
        (connection,) = listener.connections
        connection.peer, connection.local = (peer, 1), ("10.0.0.9", 9876)
        await here.register(sluiceListensOn=listens_on)
        route = bodies.read_route((await here.ask(105, topic="T")).body)
        assert route.brokers[0].addresses == {0: address}
        # What it registered is how it is known: by that it leaves.
        await here.ask(104, **BROKER)
        assert here.nameserver.table.brokers() == []

    on_site(work)
