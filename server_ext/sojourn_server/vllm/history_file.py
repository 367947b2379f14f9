"""Saves learned histories (of tools, turns and workflows) in one JSON file, so that they outlive the engine.

Each save replaces the file atomically.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from ..core.scheduler_state import Histories
from .plugin_settings import rank_file

SAVE_EVERY_S = 300.0

_NOT_KEPT = ("evicted_waits", "growth_tokens")
"""Histories of this engine's load alone, which an engine learns anew."""

logger = logging.getLogger("vllm.sojourn")

_numbers = itertools.count()
"""Numbers for unique temporary names."""


class HistoryFile:
    """Loads and saves the learned histories of one engine. Without ``path`` it does nothing.

    ``now``: seconds on the engine's clock. ``rank``: data-parallel rank, if any. Data-parallel engines learn
    from different requests, so each has its own file (``rank_file``). Errors of the file system are logged,
    never raised.
    """

    def __init__(self, path: str | None, now: float, rank: int | None = None) -> None:
        self._path = Path(rank_file(path, rank)) if path is not None else None
        self._saved_at = now
        self._lock = threading.Lock()
        self._snapshots = 0
        self._written = 0

    def load(self) -> Histories:
        """Return the saved histories; empty histories if there is no usable file. A file with other content
        is renamed, so that saving does not destroy it; one that cannot be read stays as it is."""
        if self._path is None:
            return Histories()
        try:
            return Histories.restore({**Histories().snapshot(), **json.loads(self._path.read_bytes())})
        except FileNotFoundError:
            return Histories()
        except OSError as error:
            logger.warning(
                "sojourn: history %s cannot be read (%s); starting cold, and saving nothing",
                self._path,
                error,
            )
            self._path = None
            return Histories()
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            kept = self._set_aside()
            logger.warning(
                "sojourn: history %s cannot be used (%s); %s, starting cold", self._path, error, kept
            )
            return Histories()

    def save_if_due(self, histories: Histories, now: float) -> None:
        """Save in the background if the last such save is ``SAVE_EVERY_S`` or longer ago. ``now``: seconds on
        the engine's clock. The calling thread only copies the histories."""
        if self._path is None or now - self._saved_at < SAVE_EVERY_S:
            return
        self._saved_at = now
        self._snapshots += 1
        threading.Thread(
            target=self._write,
            args=(histories.snapshot(), self._snapshots),
            name="sojourn-history",
            daemon=True,
        ).start()

    def save(self, histories: Histories) -> None:
        """Save now. Wait first for a background save that is running."""
        if self._path is not None:
            self._snapshots += 1
            self._write(histories.snapshot(), self._snapshots)

    def _write(self, document: dict[str, Any], number: int) -> None:
        assert self._path is not None
        unique = f"{os.getpid()}-{threading.get_ident()}-{next(_numbers)}"
        partial = self._path.with_name(f"{self._path.name}.{unique}.partial")
        with self._lock:
            if number <= self._written:
                return  # a later snapshot has been written
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                kept = {name: part for name, part in document.items() if name not in _NOT_KEPT}
                partial.write_text(json.dumps(kept), encoding="utf-8")
                os.replace(partial, self._path)
                self._written = number
            except OSError as error:
                logger.warning("sojourn: history %s not saved: %s", self._path, error)
                with contextlib.suppress(OSError):  # the failed write has been logged
                    partial.unlink(missing_ok=True)

    def _set_aside(self) -> str:
        """Rename the file by appending ``.unreadable``. Return a text for the log that says how this went."""
        assert self._path is not None
        kept = self._path.with_name(f"{self._path.name}.unreadable")
        try:
            os.replace(self._path, kept)
        except OSError as error:
            return f"it could not be kept as {kept} ({error})"
        return f"kept as {kept}"
