"""The history file, which keeps tool durations and program runs between processes.

    table       columns                               rows kept
    durations   tool, class, seconds, status          at most 500 per pair (tool, class), 20 000 in all
    runs        agent type, ``ProgramRun`` as JSON    at most 100 per agent type, 2 000 in all

The file holds names and numbers only: no arguments, outputs, ids or times of day. A row is never changed;
rows are inserted, and the oldest are deleted. So any number of processes can share a file. A file stays
unchanged if it is corrupt, of another version, not writable or not ours. The process then logs and counts the
error once, and continues without a file.

The store uses SQLite's default journal. The write-ahead log would need memory shared by all processes. Hosts
that share a home directory over a network have no such memory.

Each load or save opens a connection of its own. A fork waits up to a second until an open connection is
closed, since SQLite forbids two processes to share a connection.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from sojourn.process_hooks import register_at_fork
from sojourn.sdk_logger import logger
from sojourn.wire_codec import MAX_EVENT_NAME_BYTES

from .run_trace import MAX_PATH, MAX_TURNS, ProgramRun
from .tool_durations import COUNTED, MAX_SAMPLES

if TYPE_CHECKING:
    import sqlite3

    from sojourn.stats import Counters


VERSION: Final = 1
APPLICATION_ID: Final = 0x736A726E
"""``sjrn`` in ASCII: SQLite's ``application_id`` of every history file."""
MAX_DURATION_ROWS: Final = 20_000
MAX_RUN_ROWS: Final = 2_000
MAX_RUNS_A_KIND: Final = 100
MAX_RUN_BYTES: Final = 16 * 1024
"""Maximum size of a saved run. Larger runs are used in this process but not saved."""
BUSY_TIMEOUT_S: Final = 0.25
FORK_WAIT_S: Final = 1.0

_SCHEMA = (
    "CREATE TABLE durations (id INTEGER PRIMARY KEY, tool TEXT NOT NULL, class TEXT NOT NULL,"
    " duration_s REAL NOT NULL, status TEXT NOT NULL)",
    "CREATE INDEX durations_of_key ON durations (tool, class, id)",
    "CREATE TABLE runs (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, run TEXT NOT NULL)",
    "CREATE INDEX runs_of_kind ON runs (kind, id)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)

T = TypeVar("T")


class DurationSample(NamedTuple):
    """Duration and status of one tool call."""

    tool: str
    tool_class: str | None
    duration_s: float
    status: str


class StoredHistory(NamedTuple):
    """The content of a history file, oldest first. ``runs`` holds pairs (agent type, run)."""

    durations: list[DurationSample]
    runs: list[tuple[str, ProgramRun]]


class _Unusable(Exception):
    """Raised for a file that was not written by this module, or is of another version."""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    path: tuple[tuple[str, ...], ...]
    turn_nodes: tuple[str | None, ...]
    turns: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    tools: tuple[tuple[str, str], ...]
    begins: bool
    ends: bool


_decode_run = msgspec.json.Decoder(_Stored).decode


class HistoryStore:
    """A history file (SQLite). Only one thread may use it at a time. No method raises."""

    def __init__(self, path: str | os.PathLike[str], counters: Counters) -> None:
        self.path = Path(path)
        self.usable = True
        """False after a permanent failure; from then on this process does not open the file."""
        self._counters = counters

    def load(self, stopped: Callable[[], bool] = lambda: False) -> StoredHistory | None:
        """Return the content of the file; empty if there is no file yet. Reading ends early once
        ``stopped()`` is True; the rows read so far are returned. Returns ``None`` if the file could not be
        read. Then, if ``usable`` is still True, a retry may succeed."""
        return self._attempt(lambda: self._load(stopped))

    def save(self, durations: Sequence[DurationSample], runs: Sequence[tuple[str, ProgramRun]]) -> bool:
        """Add rows, and delete the oldest beyond the limits. ``runs``: pairs (agent type, run). Returns False
        if nothing was saved. Then, if ``usable`` is still True, a retry may succeed."""
        return self._attempt(lambda: self._save(durations, runs)) is not None

    def _attempt(self, work: Callable[[], T]) -> T | None:
        if not self.usable:
            return None
        try:
            return work()
        except Exception as error:
            if _is_busy(error):
                self._counters.add("history_busy")
            else:
                self.usable = False
                self._counters.add("history_error")
                logger.warning(
                    "the history %s cannot be used, so estimates stay in memory: %s", self.path, error
                )
            return None

    def _load(self, stopped: Callable[[], bool]) -> StoredHistory:
        if not self.path.exists():
            return StoredHistory([], [])
        with _connected(self.path) as database:
            durations = database.execute("SELECT tool, class, duration_s, status FROM durations ORDER BY id")
            runs = database.execute("SELECT kind, run FROM runs ORDER BY id")
            recorded = StoredHistory(
                [duration for row in _until(stopped, durations) if (duration := _duration(*row)) is not None],
                [run for row in _until(stopped, runs) if (run := _run(*row)) is not None],
            )
        return recorded

    def _save(self, durations: Sequence[DurationSample], runs: Sequence[tuple[str, ProgramRun]]) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.path.exists():
            # Tool names are private to the user. SQLite gives its journal the same mode.
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with _connected(self.path) as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                database.executemany(
                    "INSERT INTO durations (tool, class, duration_s, status) VALUES (?, ?, ?, ?)",
                    [(row.tool, row.tool_class or "", row.duration_s, row.status) for row in durations],
                )
                stored = [(kind, _text(run)) for kind, run in runs]
                database.executemany(
                    "INSERT INTO runs (kind, run) VALUES (?, ?)",
                    [(kind, text) for kind, text in stored if len(text) <= MAX_RUN_BYTES],
                )
                for key in {(row.tool, row.tool_class or "") for row in durations}:
                    _trim(database, "durations", MAX_SAMPLES, "tool = ? AND class = ?", key)
                for kind in {kind for kind, _ in runs}:
                    _trim(database, "runs", MAX_RUNS_A_KIND, "kind = ?", (kind,))
                _trim(database, "durations", MAX_DURATION_ROWS)
                _trim(database, "runs", MAX_RUN_ROWS)
                database.execute("COMMIT")
            except BaseException:
                with suppress(Exception):
                    database.execute("ROLLBACK")
                raise
        return True


def _until(stopped: Callable[[], bool], rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    return takewhile(lambda _: not stopped(), rows)


def _trim(
    database: sqlite3.Connection, table: str, keep: int, where: str = "1", key: Iterable[str] = ()
) -> None:
    """Delete the rows that match ``where``, except the newest ``keep`` of them. ``key``: values of the
    placeholders in ``where``."""
    keys = tuple(key)
    database.execute(
        f"DELETE FROM {table} WHERE {where} AND id <="
        f" (SELECT id FROM {table} WHERE {where} ORDER BY id DESC LIMIT 1 OFFSET {keep})",
        (*keys, *keys),
    )


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection to a history file. An empty file first gets the tables."""
    import sqlite3

    with _open_connections:
        database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            _check(database)
            yield database
        finally:
            database.close()


def _check(database: sqlite3.Connection) -> None:
    if _number(database, "application_id") != APPLICATION_ID:
        # Checked again under SQLite's lock, because another process may create the tables meanwhile.
        # Closing the connection rolls back what is not committed.
        database.execute("BEGIN IMMEDIATE")
        if _number(database, "schema_version") == 0:
            for statement in _SCHEMA:
                database.execute(statement)
        elif _number(database, "application_id") != APPLICATION_ID:
            raise _Unusable("it is the database of another program")
        database.execute("COMMIT")
    version = _number(database, "user_version")
    if version != VERSION:
        raise _Unusable(f"it has version {version}; this release reads {VERSION}")


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return int(database.execute(f"PRAGMA {pragma}").fetchone()[0])


def _is_busy(error: Exception) -> bool:
    """Return whether ``error`` means that another process has locked the file."""
    text = str(error).lower()
    return type(error).__name__ == "OperationalError" and ("locked" in text or "busy" in text)


def _text(run: ProgramRun) -> str:
    return msgspec.json.encode(_Stored(*run)).decode()


def _duration(tool: Any, tool_class: Any, duration_s: Any, status: Any) -> DurationSample | None:
    """Return a row of the table ``durations`` as a sample. Returns ``None`` if the row has values that this
    module never writes, since SQLite accepts values of any type in a column."""
    if not (_is_name(tool) and (tool_class == "" or _is_name(tool_class)) and status in COUNTED):
        return None
    if not isinstance(duration_s, float) or not math.isfinite(duration_s) or duration_s < 0:
        return None
    return DurationSample(tool, tool_class or None, duration_s, status)


def _run(kind: Any, text: Any) -> tuple[str, ProgramRun] | None:
    if not _is_name(kind) or not isinstance(text, str) or len(text) > MAX_RUN_BYTES:
        return None
    try:
        stored = _decode_run(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    names = [
        *(name for group in stored.path for name in group),
        *(name for pair in stored.tools for name in pair),
    ]
    sane = (
        all(map(_is_name, names))
        and all(node is None or _is_name(node) for node in stored.turn_nodes)
        and all(stored.path)
        and len(stored.path) <= MAX_PATH
        and len(stored.turn_nodes) <= min(MAX_TURNS, stored.turns)
    )
    return (kind, ProgramRun(*msgspec.structs.astuple(stored))) if sane else None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_EVENT_NAME_BYTES


_open_connections = threading.Lock()
"""Lock held while a connection is open. A fork waits for it, at most ``FORK_WAIT_S``."""
_forking: set[int] = set()
"""Ids of the threads that hold the lock during a fork."""


def _before_fork() -> None:
    # Bounded, since a file on a network may be slow, and a fork must not wait for ever.
    if _open_connections.acquire(timeout=FORK_WAIT_S):
        _forking.add(threading.get_ident())


def _after_fork_in_parent() -> None:
    if threading.get_ident() in _forking:
        _forking.discard(threading.get_ident())
        _open_connections.release()


def _after_fork_in_child() -> None:
    global _open_connections
    _open_connections = threading.Lock()
    _forking.clear()


register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
