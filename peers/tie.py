"""This module becomes another program, which dies with the process that started it.

    python -IS tie.py PARENT COMMAND...

A test run that is killed cannot end its servers and clients any more. So on Linux each of them asks
the system, before it begins, to be killed when its parent is gone; elsewhere it only begins.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != int(parent):
            sys.exit(1)  # it is gone already, and nobody would tell us
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
