"""Histories that outlive the engine: one JSON file, replaced atomically."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, TypeVar

from ..core.scheduler_state import Histories
from ..programs.execution_history import ToolHistory, TurnHistory
from ..programs.output_lengths import HintErrors, OutputLengthHistory
from ..programs.workflow_history import WorkflowHistory

SAVE_EVERY_S = 300.0

Part = TypeVar("Part", WorkflowHistory, OutputLengthHistory, HintErrors)

logger = logging.getLogger("vllm.sojourn")

_numbers = itertools.count()
"""Numbers for unique temporary names."""


class HistoryFile:
    """Loads histories at start, and saves them every few minutes and at the end. Without ``path`` it does
    nothing.

    Each data-parallel engine has its own file, ``path`` plus ``.rank0`` and so on: they learn from different
    requests. Errors of the file system are logged, never raised.
    """

    def __init__(self, path: str | None, now: float, rank: int | None = None) -> None:
        self._path: Path | None = None
        if path is not None:
            self._path = Path(path if rank is None else f"{path}.rank{rank}")
        self._saved_at = now
        self._unread = False
        """Whether the file exists but could not be read: the first save must then not overwrite it."""
        self._lock = threading.Lock()
        self._snapshots = 0
        self._written = 0

    def load(self) -> Histories:
        """Return the saved histories, or empty ones without a usable file.

        A malformed file is renamed, so that saving does not destroy it. An unreadable one stays until the
        first save.
        """
        if self._path is None:
            return Histories()
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return Histories()
        except OSError as error:
            self._unread = True
            logger.warning("sojourn: history %s cannot be read (%s); starting cold", self._path, error)
            return Histories()
        try:
            document = json.loads(content)
            return Histories(
                tools=ToolHistory.restore(document["tools"]),
                turns=TurnHistory.restore(document["turns"]),
                workflows=self._part(document, "workflows", WorkflowHistory),
                output_lengths=self._part(document, "output_lengths", OutputLengthHistory),
                hints_off=self._part(document, "hints_off", HintErrors),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            kept = self._set_aside("unreadable")
            logger.warning(
                "sojourn: history %s cannot be used (%s); %s, starting cold", self._path, error, kept
            )
            return Histories()

    def _part(self, document: dict[str, Any], name: str, kind: type[Part]) -> Part:
        """Return one part of the file. A part may be missing, as in files of earlier releases, or invalid;
        other parts are still used."""
        if name not in document:
            return kind()
        try:
            return kind.restore(document[name])
        except (ValueError, OverflowError) as error:
            logger.warning(
                "sojourn: the %s in history %s cannot be used (%s); starting without",
                name.replace("_", " "),
                self._path,
                error,
            )
            return kind()

    def save_if_due(self, histories: Histories, now: float) -> None:
        """Save in the background if the last save is long ago. The calling thread only copies the data."""
        if self._path is None or now - self._saved_at < SAVE_EVERY_S:
            return
        self._saved_at = now
        self._snapshots += 1
        threading.Thread(
            target=self._write,
            args=(_document(histories), self._snapshots),
            name="sojourn-history",
            daemon=True,
        ).start()

    def save(self, histories: Histories) -> None:
        """Save now, after a running background save."""
        if self._path is not None:
            self._snapshots += 1
            self._write(_document(histories), self._snapshots)

    def _write(self, document: dict[str, Any], number: int) -> None:
        assert self._path is not None
        unique = f"{os.getpid()}-{threading.get_ident()}-{next(_numbers)}"
        partial = self._path.with_name(f"{self._path.name}.{unique}.partial")
        with self._lock:
            if number <= self._written:
                return  # a later snapshot has been written
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(json.dumps(document), encoding="utf-8")
                if self._unread:
                    logger.warning(
                        "sojourn: history %s was never read; %s", self._path, self._set_aside("unread")
                    )
                    self._unread = False
                os.replace(partial, self._path)
                self._written = number
            except OSError as error:
                logger.warning("sojourn: history %s not saved: %s", self._path, error)
                _remove(partial)

    def _set_aside(self, suffix: str) -> str:
        """Rename the file. Return the result for the log."""
        assert self._path is not None
        kept = self._path.with_name(f"{self._path.name}.{suffix}")
        try:
            os.replace(self._path, kept)
        except OSError as error:
            return f"it could not be kept as {kept} ({error})"
        return f"kept as {kept}"


def _remove(path: Path) -> None:
    # The failed write has been logged.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _document(histories: Histories) -> dict[str, Any]:
    return {
        "tools": histories.tools.snapshot(),
        "turns": histories.turns.snapshot(),
        "workflows": histories.workflows.snapshot(),
        "output_lengths": histories.output_lengths.snapshot(),
        "hints_off": histories.hints_off.snapshot(),
    }
