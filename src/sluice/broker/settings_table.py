"""This module keeps one table of settings: seen here at once, true when the store has it.

A change is seen by everybody as soon as it is asked for, and is durable together with the first
message that follows it, because both are entries of one log. If it cannot be written it is taken
back, and what others asked for meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from sluice.errors import SluiceError
from sluice.storage.store import Store

T = TypeVar("T")
Done = Callable[[SluiceError | None], None]


class SettingsTable(Generic[T]):
    """One of the store's tables. `rows` is what holds now; nobody else changes it."""

    def __init__(
        self,
        store: Store,
        name: str,
        read: Callable[[str, dict[str, Any]], T],
        write: Callable[[T], Any],
    ) -> None:
        self._store = store
        self._name = name
        self._write = write
        self._stored = {key: read(key, value) for key, value in store.table(name).items()}
        self._under_way: list[Mapping[str, T | None]] = []  # in the order of the log
        self.rows = dict(self._stored)

    def put(self, values: Mapping[str, T], done: Done) -> None:
        """Create rows or replace them; raises what makes it impossible at once."""
        changes = [(self._name, key, self._write(value)) for key, value in values.items()]
        self._change(values, lambda told: self._store.change(changes, told), done)

    def delete(self, key: str, done: Done, stage: Callable[[Done], None] | None = None) -> None:
        """Delete a row; `stage` where the store has another word for it."""
        if stage is None:
            self._change(
                {key: None}, lambda told: self._store.change([(self._name, key, None)], told), done
            )
        else:
            self._change({key: None}, stage, done)

    def _change(
        self, values: Mapping[str, T | None], stage: Callable[[Done], None], done: Done
    ) -> None:
        def told(error: SluiceError | None) -> None:
            self._under_way = [change for change in self._under_way if change is not values]
            if error is None:
                _apply(self._stored, values)
            for key in values:
                self._look_at(key)
            done(error)

        stage(told)
        self._under_way.append(values)
        _apply(self.rows, values)

    def _look_at(self, key: str) -> None:
        value = self._stored.get(key)
        for change in self._under_way:
            value = change.get(key, value)
        _apply(self.rows, {key: value})


def _apply(rows: dict[str, T], values: Mapping[str, T | None]) -> None:
    for key, value in values.items():
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = value
