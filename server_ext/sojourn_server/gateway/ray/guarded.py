"""``python -m sojourn_server.gateway.ray.guarded PARENT COMMAND ...``: a command that ends with its parent.

Linux only ends it so; elsewhere the command runs all the same. It is a process of its own, which then becomes
the command: code between fork and exec in a process with many threads may hang.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Does not return."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(1)  # it ended before we asked
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
