"""Runs a command that gets SIGTERM when its parent process ends:

    python -m sojourn_server.gateway.ray.parent_death_signal PARENT COMMAND ...

The signal (``PR_SET_PDEATHSIG``) exists only on Linux; elsewhere the command just runs. This module runs as a
separate process, which then becomes the command (exec). The alternative, running code between fork and exec
of the parent process, may hang if the parent has many threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the command. Does not return. ``arguments``: the parent's process id, then the
    words of the command. Exits with code 1 if the parent has already ended."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(1)  # the parent ended before the call of ``prctl``
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
