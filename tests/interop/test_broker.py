"""Apache's Java client 5.5.0 gets from Sluice what it gets from Apache's own broker."""

from __future__ import annotations

from pathlib import Path

from tests.interop.clients import JavaClients
from tests.interop.outcomes import SEGMENT_BYTES, check_delivery, check_kept_when_killed
from tests.interop.sluice_process import SluiceProcess


def test_java_clients_get_from_sluice_what_they_get_from_apache(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    with SluiceProcess(tmp_path / "sluice") as sluice:
        check_delivery(java_clients, sluice.nameserver_address)


def test_sluice_keeps_what_it_acknowledged_when_it_is_killed(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    flags = ("--segment-bytes", str(SEGMENT_BYTES))
    with SluiceProcess(tmp_path / "sluice", *flags) as sluice:
        check_kept_when_killed(java_clients, sluice)
