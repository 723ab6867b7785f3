"""This module changes settings while the broker runs, and knows at the next start what they were.

Which settings those are is declared with them (`dynamic`). A change is an entry of the log like a
topic's: it holds when it is durable, and from then on until it is changed again. At a start it
comes before the configuration file and behind flags and environment variables, which were given to
that very start. It knows no wire format.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from sluice.broker.core import BrokerCore
from sluice.broker.settings_table import Done
from sluice.config import BrokerConfig, Loaded, flatten, settings_of, update
from sluice.errors import ConfigError, SluiceError
from sluice.storage.store import SETTING_TABLE, Change, Store

log_lines = logging.getLogger("sluice.broker")


def restored(config: BrokerConfig, store: Store, pinned: Collection[str]) -> BrokerConfig:
    """The configuration of a start with what was changed before it; `pinned` stays as given."""
    for name, text in sorted(store.table(SETTING_TABLE).items()):
        if name in pinned:
            log_lines.info(
                "%s was changed to %s while the broker ran; a flag or variable overrides it",
                name, text,
            )  # fmt: skip
            continue
        try:
            config = update(config, {name: str(text)}, "changed while the broker ran").config
        except ConfigError as error:
            # Of another version, perhaps. The setting is as the file has it.
            log_lines.warning("%s; it is left out", error)
    return config


def checked(core: BrokerCore, changes: Mapping[str, str], origin: str) -> Loaded[BrokerConfig]:
    """The configuration that changes would make. Raises ConfigError, as `change` does."""
    loaded = update(core.config, changes, origin)
    if loaded.warnings:
        raise ConfigError("; ".join(loaded.warnings))
    return loaded


def change(
    core: BrokerCore,
    changes: Mapping[str, str],
    origin: str,
    done: Done,
    *,
    with_it: Sequence[Change] = (),
) -> None:
    """Change settings by our names or RocketMQ's, all of them or none, and rows of other tables
    with them.

    Raises ConfigError for what cannot be changed, with the reason; `done(None)` when it holds.
    """
    loaded = checked(core, changes, origin)
    known, values = settings_of(BrokerConfig), flatten(loaded.config)
    texts = {name: known[name].kind.render(values[name]) for name in loaded.origins}
    rows = [(SETTING_TABLE, name, text) for name, text in texts.items()]
    if not rows and not with_it:
        done(None)
        return

    def told(error: SluiceError | None) -> None:
        if error is None and texts:
            # Once more, because something else may have been changed meanwhile.
            core.reconfigure(update(core.config, texts, origin).config)
        done(error)

    core.store.change([*rows, *with_it], told)
    core.ask_turn()
