"""This module tests that several threads may use a simulated disk, as those of a store do."""

import sys
from threading import Thread

from sluice.storage.memory_files import KeepAll, KeepNothing, MemoryFiles


def make_many(files: MemoryFiles) -> None:
    for number in range(2_000):
        files.create(f"{number:04d}", 1).pwritev([b"x"], 0)
        files.sync_many([f"{number:04d}"])


def test_a_crash_falls_between_two_changes_of_another_thread() -> None:
    files = MemoryFiles()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        maker = Thread(target=make_many, args=(files,))
        maker.start()
        while maker.is_alive():
            for keep in (KeepAll(), KeepNothing()):
                found = files.crash(keep).names("")
                assert found == [f"{number:04d}" for number in range(len(found))]
        maker.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert len(files.names("")) == 2_000
