"""This module does one thing in many places: at each broker of a cluster, at each nameserver.

Where there is only one place, its error is raised. Of several, all are tried whatever fails, and
afterwards `PartlyDone` says what was not done and carries what was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from sluice.errors import PartlyDone, SluiceError

Outcomes = dict[str, str]  # by address: what went wrong, or nothing
Result = TypeVar("Result")


async def each(addresses: Sequence[str], action: Callable[[str], Awaitable[object]]) -> Outcomes:
    """Do it everywhere, whatever fails; each address with what went wrong, or nothing."""
    outcomes = {}
    for address in addresses:
        try:
            await action(address)
            outcomes[address] = ""
        except SluiceError as error:
            if len(addresses) == 1:
                raise
            outcomes[address] = str(error)
    return outcomes


def settled(result: Result, *outcomes: Mapping[str, str]) -> Result:
    """What was done; raises PartlyDone with it where something was not."""
    errors = [error for table in outcomes for error in table.values() if error]
    if errors:
        count = sum(len(table) for table in outcomes)
        raise PartlyDone(f"{len(errors)} of {count} failed: {'; '.join(errors)}", result)
    return result
