"""This module closes a store in order: positions, flush, checkpoint, and then the abort file.

Without the checkpoint the abort file stays, and the next start recovers. It runs with the store's
owner and returns at once; what is slow is done in the background.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.errors import SluiceError, StoreReadOnly
from sluice.storage.flush import Confirmed
from sluice.storage.snapshot import ABORT_NAME

if TYPE_CHECKING:
    from sluice.storage.store import Store


def shut(store: Store, done: Confirmed) -> None:
    """Close; `done` gets what kept it from closing in order, None where nothing did."""
    flusher, log = store.flusher, store.log

    def checkpointed(error: BaseException | None) -> None:
        if error is None and flusher.failure is None:
            try:
                store.files.remove(f"{store.root}/{ABORT_NAME}")
                store.files.sync_directory(store.root)
            except OSError as failure:
                error = failure
        store.release()
        if error is not None and not isinstance(error, SluiceError):
            error = StoreReadOnly(str(error))
        done(error or flusher.failure)

    def flushed(error: SluiceError | None) -> None:
        if error is not None:
            # Behind whatever the background still does to the files.
            store.background.submit("disk", lambda: None, lambda *_: checkpointed(error))
        else:
            store.housekeeping.checkpoint(checkpointed)

    store.closed = True
    store.write_staged()
    store.offsets.send()
    store.write_staged()
    store.refuse(StoreReadOnly("the store is closed"))
    if flusher.failure is not None:
        flushed(flusher.failure)
    elif flusher.flushed >= log.written:
        flushed(None)
    else:
        flusher.wait(log.written, flushed)
        flusher.flush_to(log.written)
