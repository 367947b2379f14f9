"""Where histories outlive the engine: one JSON file, written whole or not at all."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from ..engine.state import Histories
from ..program.history import ToolHistory, TurnHistory

SAVE_EVERY_S = 300.0

logger = init_logger("vllm.sojourn")


class HistoryFile:
    """Loads histories at start, saves them every few minutes and at the end. ``path`` None: neither."""

    def __init__(self, path: str | None, now: float) -> None:
        self._path = Path(path) if path is not None else None
        self._saved_at = now

    def load(self) -> Histories:
        """The saved histories; empty ones where there is no file or it cannot be used.

        A file that cannot be used is kept under another name, so that saving does not destroy it.
        """
        if self._path is None or not self._path.exists():
            return Histories()
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            return Histories(
                tools=ToolHistory.restore(document["tools"]), turns=TurnHistory.restore(document["turns"])
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            kept = self._path.with_name(f"{self._path.name}.unreadable")
            os.replace(self._path, kept)
            logger.warning(
                "sojourn: history %s cannot be used (%s); kept as %s, starting cold", self._path, error, kept
            )
            return Histories()

    def save_if_due(self, histories: Histories, now: float) -> None:
        """Save in the background if the last time is long enough ago. The engine only takes the snapshot."""
        if self._path is None or now - self._saved_at < SAVE_EVERY_S:
            return
        self._saved_at = now
        threading.Thread(target=self._write, args=(_document(histories),), daemon=True).start()

    def save(self, histories: Histories) -> None:
        """Save now."""
        if self._path is not None:
            self._write(_document(histories))

    def _write(self, document: dict[str, Any]) -> None:
        assert self._path is not None
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(document), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            logger.warning("sojourn: history %s not saved: %s", self._path, error)


def _document(histories: Histories) -> dict[str, Any]:
    return {"tools": histories.tools.snapshot(), "turns": histories.turns.snapshot()}
