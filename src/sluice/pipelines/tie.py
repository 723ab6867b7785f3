"""This module becomes another program, which ends when the process that started it is gone.

    python -IS tie.py PARENT COMMAND...

A terminal that is closed or a process that is killed cannot end what it has started any more. So,
on Linux, what is started asks the system first to be ended with its parent; elsewhere it only
begins. It is run as a file, so that it costs no import of the package.
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
            sys.exit(1)  # it was gone before the system was asked
    os.execvp(command[0], command)  # noqa: S606 (a command of ours, without a shell)


if __name__ == "__main__":
    main()
