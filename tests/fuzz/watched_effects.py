"""Records what this process does outside of a folder: files it writes, processes it starts, hosts it
calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_BY_PATH = {
    f"os.{name}" for name in ("mkdir", "remove", "rename", "rmdir", "chmod", "truncate", "symlink", "link")
}
_NEVER = {
    *(f"os.{name}" for name in ("system", "exec", "posix_spawn", "fork")),
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
}
_state: dict[str, Any] = {}


def _hook(event: str, args: tuple[Any, ...]) -> None:
    folder = _state.get("folder")
    if folder is None:
        return
    if event in _NEVER:
        _state["effects"].append((event, repr(args)[:200]))
    elif event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITES:
            _note(folder, event, path)
    elif event in _BY_PATH and not (isinstance(args[-1], int) and args[-1] >= 0):
        # With a folder's descriptor the path is a name in that folder, which was opened from its root.
        _note(folder, event, args[0])


def _note(folder: str, event: str, path: object) -> None:
    if isinstance(path, (str, bytes, os.PathLike)):
        text = os.fsdecode(path)
        inside = os.path.isabs(text) and (os.path.normpath(text) + os.sep).startswith(folder + os.sep)
        # A bare name is relative to a folder's descriptor. A module's first import writes its byte code.
        if not inside and os.sep in text and "__pycache__" not in text.split(os.sep)[-2:]:
            _state["effects"].append((event, text))


@contextmanager
def watched_effects(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that collects effects outside of ``folder`` during the ``with`` block."""
    if "installed" not in _state:
        _state["installed"] = True
        sys.addaudithook(_hook)  # for good: there is no way to remove one
    effects: list[tuple[str, str]] = []
    _state.update(effects=effects, folder=str(folder))
    try:
        yield effects
    finally:
        _state["folder"] = None
