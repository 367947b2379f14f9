"""Runs a command that ends with its parent process:

python -m sojourn_server.gateway.ray.parent_death_signal PARENT COMMAND ...

The signal (``PR_SET_PDEATHSIG``) exists on Linux only; elsewhere the command just runs. This module is a
process of its own that becomes the command, because code between fork and exec may hang in a process with
many threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Become the command; does not return."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(1)  # the parent ended before the request
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
