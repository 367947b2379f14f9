"""Saves learned histories (of tools, turns and workflows) in one JSON file, so that they outlive the engine.
Each save replaces the file atomically."""

from __future__ import annotations

import contextlib
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


class HistoryFile:
    """Loads and saves the learned histories of one engine. Without ``path`` it does nothing. ``now``: seconds
    on the engine's clock. Data-parallel engines learn from different requests, so each ``rank`` has its own
    file. Errors of the file system are logged, never raised."""

    def __init__(self, path: str | None, now: float, rank: int | None = None) -> None:
        self._path = Path(rank_file(path, rank)) if path is not None else None
        self._saved_at = now
        self._saving = threading.Thread()

    def load(self) -> Histories:
        """Return the saved histories; empty histories if there is no usable file. A file with other content
        is renamed, so that saving does not destroy it; one that cannot be read stays as it is."""
        if self._path is None:
            return Histories()
        try:
            return Histories.restore({**Histories().snapshot(), **json.loads(self._path.read_bytes())})
        except FileNotFoundError:
            pass
        except OSError as error:
            what = "sojourn: history %s cannot be read (%s); starting cold, and saving nothing"
            logger.warning(what, self._path, error)
            self._path = None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            kept = f"{self._path}.unreadable"
            with contextlib.suppress(OSError):  # in a folder that cannot be written, no save destroys it
                os.replace(self._path, kept)
            what = "sojourn: history %s cannot be used (%s); starting cold, and it is moved to %s if possible"
            logger.warning(what, self._path, error, kept)
        return Histories()

    def save_if_due(self, histories: Histories, now: float) -> None:
        """Save in the background, every ``SAVE_EVERY_S``. The calling thread only copies the histories."""
        if self._path is None or now - self._saved_at < SAVE_EVERY_S or self._saving.is_alive():
            return
        self._saved_at = now
        self._saving = threading.Thread(
            target=self._write, args=(self._path, histories.snapshot()), name="sojourn-history", daemon=True
        )
        self._saving.start()

    def save(self, histories: Histories) -> None:
        """Save now, after a background save that is running."""
        if self._path is not None:
            if self._saving.is_alive():
                self._saving.join()
            self._write(self._path, histories.snapshot())

    @staticmethod
    def _write(path: Path, document: dict[str, Any]) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = {name: part for name, part in document.items() if name not in _NOT_KEPT}
            partial.write_text(json.dumps(kept), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            logger.warning("sojourn: history %s not saved: %s", path, error)
            with contextlib.suppress(OSError):  # the failed write has been logged
                partial.unlink(missing_ok=True)
