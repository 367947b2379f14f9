"""Recordings: the file with its header, writer and reader, and the scheduler that records or replays."""

from __future__ import annotations

import contextlib
import gzip
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from sojourn.errors import InputError
from sojourn.wire_codec import EventOutcome
from sojourn.wire_events import AnyEvent, ProgramEnd, ProgramStart, ToolStop

from ..core import events_and_actions as ev
from ..core.program_scheduler import ProgramScheduler
from ..core.request_hints import RequestIdentity
from ..core.scheduler_state import Histories, KVPoolConfig, SchedulerLimits, SchedulerState
from ..metrics.turn_ledger import common_prefix_length
from ..policies.costs.engine_profile import PrefillCurve
from ..policies.preset import parse_preset
from ..programs.program_status import REPORTED_OUTCOMES
from ..programs.windowed_history import recent_entry

T = TypeVar("T")

encode_record = msgspec.json.Encoder().encode

RECORDING_VERSION = 17
"""Version of the format. To replay an older recording, use the version of sojourn that wrote it."""

MAX_RECORDING_BYTES = 1 << 30
"""Compressed size in bytes at which a recording ends, but for the records written last."""
FLUSH_RECORDS = 256
"""Number of records written at once (about 20 KiB, 0.2 ms), which a killed engine may lose."""
HASH_DIGITS = 16
"""Hexadecimal digits kept of a block hash. Among 10^6 blocks, a collision has a probability of 3 in 10^8."""
MAX_CHAINS = 500
"""Maximum number of chains of hashes that are kept, to record the next ones as differences."""

_CUT = "the engine was killed, or its disk was full; allow_unfinished replays it as far as it goes"


class RecordingHeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """First line of a recording: what the recorded scheduler was built from, including learned histories."""

    sojourn_recording: int = RECORDING_VERSION
    versions: dict[str, str]  # of sojourn, the engine and Python
    preset_toml: str
    preset_source: str  # name of the preset's TOML file, for messages
    pool: KVPoolConfig
    limits: SchedulerLimits
    curve: PrefillCurve | None  # ``None``: prefill speed was learned while serving
    histories: dict[str, Any]

    @classmethod
    def of(
        cls, state: SchedulerState, *, preset_toml: str, preset_source: str, curve: PrefillCurve | None,
        versions: dict[str, str],
    ) -> RecordingHeader:  # fmt: skip
        """Return the header for a scheduler with this new ``state``."""
        return cls(
            versions={"sojourn": version("sojourn"), "python": platform.python_version(), **versions},
            preset_toml=preset_toml,
            preset_source=preset_source,
            pool=state.pool,
            limits=state.limits,
            curve=curve,
            histories=state.histories.snapshot(),
        )


class RecordingFile:
    """Writes one recording to a file; one that exists is renamed to ``PATH.previous``. After a failure the
    recording ends, and ``warn`` is called once with a text. No method raises."""

    def __init__(self, path: str | Path, header: RecordingHeader, *, warn: Callable[[str], None]) -> None:
        self.path = Path(path)
        self.is_full = False
        """Whether the next record must be the last."""
        self.records = -1
        """Number of records so far, without the header."""
        self._warn = warn
        self._lines: list[bytes] = []
        self.stream: gzip.GzipFile | None = None
        """``None``: no more records can be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():  # a device such as /dev/null must not be renamed
                os.replace(self.path, self.path.with_name(self.path.name + ".previous"))
            self.stream = gzip.GzipFile(self.path, "wb", compresslevel=1)
        except Exception as error:
            self.give_up(error)
        self.write(header, flush=True)

    def write(self, record: Any, *, flush: bool = False, close: bool = False) -> None:
        """Write a record; with ``close`` the last. It is encoded at once, so its parts may change then."""
        if self.stream is None:
            return
        try:
            self._lines.append(encode_record(record))
            self.records += 1
            if flush or close or len(self._lines) >= FLUSH_RECORDS:
                self.stream.write(b"".join(line + b"\n" for line in self._lines))
                self._lines.clear()
                self.stream.flush()  # the file can now be read to its last line
                self.is_full = self.path.stat().st_size >= MAX_RECORDING_BYTES
            if close:
                self.stream.close()
                self.stream = None
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Call ``warn`` and write no more records, and so no end."""
        stream, self.stream = self.stream, None
        self._lines.clear()
        if stream is not None:
            with contextlib.suppress(OSError):  # closing retries the failed write
                stream.close()
        what = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self._warn(f"recording {self.path} is given up after {max(0, self.records)} records: {what}")


class RecordingError(InputError):
    """A recording cannot be used. The text names file and line, what was found and what was expected."""


class Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One event of a recording, or its end, see ``recording``."""

    now: float
    event: ev.Event | str
    """The event, or the reason of the end."""
    outcome: msgspec.Raw


class RecordingReader:
    """Reads a recording. Methods raise ``RecordingError`` for a file that is missing, damaged, of another
    version or, unless ``allow_unfinished``, without an end, as left by a killed engine or a full disk."""

    def __init__(self, path: str | Path, *, allow_unfinished: bool = False) -> None:
        self.path = Path(path)
        self._allow_unfinished = allow_unfinished
        self._lines = self._read_lines()
        self.header = self._header(next(self._lines, (1, b"null"))[1])

    def records(self) -> Iterator[tuple[int, bytes, Record]]:
        """Yield the remaining records in order: (line number, line, record). Call it once."""
        number, ended = 1, False
        for number, line in self._lines:
            if ended:
                raise RecordingError(f"{self.path}, line {number}: goes on after its end record")
            record = self._decode(number, line, Record)
            ended = isinstance(record.event, str)
            yield number, line, record
        if not ended and not self._allow_unfinished:
            raise RecordingError(f"{self.path}, line {number}: no end record: {_CUT}")

    def _read_lines(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            with gzip.open(self.path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    yield number, line.removesuffix(b"\n")
        except EOFError:
            if not self._allow_unfinished:
                raise RecordingError(
                    f"{self.path}, after line {number}: the file stops in the middle: {_CUT}"
                ) from None
        except (OSError, zlib.error) as error:
            why = getattr(error, "strerror", None) or error
            raise RecordingError(f"{self.path}, after line {number}: {why}") from error

    def _header(self, line: bytes) -> RecordingHeader:
        found = self._decode(1, line, dict[str, Any])
        if found.get("sojourn_recording") == RECORDING_VERSION:
            return self._decode(1, line, RecordingHeader)
        writer = found.get("versions", {}).get("sojourn", "unknown")
        raise RecordingError(
            f"{self.path}, line 1: recording version {found.get('sojourn_recording')!r}, written by sojourn "
            f"{writer}; expected {RECORDING_VERSION}: run sojourn parity of the version that wrote it"
        )

    def _decode(self, number: int, line: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}, line {number}: {error}") from error


_WithHashes = ev.RequestArrived | ev.RequestAdmitted | ev.TurnFinished


class RecordingScheduler(ProgramScheduler):
    """A ``ProgramScheduler`` that also records its events in ``file``, with unchanged results and exceptions.
    If recording fails, only the recording ends. Without a file it can ``replay`` a recording."""

    def __init__(self, state: SchedulerState, file: RecordingFile | None = None) -> None:
        super().__init__(state)
        self._file = file
        self._chains: dict[str, list[Any]] = {}
        """Program, or request without one → the chain of block hashes recorded last."""
        self._next_decision = 0

    @classmethod
    def from_header(cls, header: RecordingHeader) -> RecordingScheduler:
        """Return a scheduler in the recorded one's initial state. Raises ``ValueError`` or ``KeyError``."""
        preset = parse_preset(header.preset_toml, source=header.preset_source)
        histories = Histories.restore(header.histories)
        return cls(
            SchedulerState(preset, header.pool, limits=header.limits, curve=header.curve, histories=histories)
        )

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        file = self._file
        if file is None or file.stream is None:
            return super().handle(event, now)
        recorded: ev.Event | None = None
        try:
            recorded = self._recorded(event)  # before it is handled, as a replay restores it
        except Exception as error:
            file.give_up(error)
        try:
            actions = super().handle(event, now)
        except Exception as error:
            file.write((now, recorded, type(error).__name__))
            raise
        file.write((now, recorded, self._outcome(actions)))
        if file.is_full:
            self.close_recording("cut off: the recording has reached its maximum size")
        return actions

    def replay(self, recorded: ev.Event, now: float) -> tuple[Any, str]:
        """Handle a record's event. Return the outcome in its recorded form, and the text of an exception."""
        try:
            return self._outcome(super().handle(self._restored(recorded), now)), ""
        except Exception as error:
            return type(error).__name__, f"; raised {error!r}"

    def close_recording(self, reason: str) -> None:
        if self._file is not None:
            self._file.write((self._now_s, reason, self.totals()), close=True)

    def totals(self) -> dict[str, Any]:
        """Return the outcome of the recording's end."""
        return {
            "leases": len(self.leases),
            "lease_blocks": sum(lease.blocks for lease in self.leases.values()),
            "requests": len(self._requests.states),
            "programs": {status.value: count for status, count in sorted(self._programs.counts.items())},
            "ledger": self.state.ledger.totals,
        }

    def _outcome(self, actions: list[ev.Action]) -> Any:
        decisions, self._next_decision = self.decisions.since(self._next_decision, self.decisions.capacity)
        return [self._recorded_action(action) for action in actions], decisions

    def _recorded_action(self, action: ev.Action) -> tuple[Any, ...]:
        if isinstance(action, EventOutcome):
            return "EventOutcome", action.outcome  # the reason may quote the client
        fields: Iterable[Any] = action
        if isinstance(action, ev.LeaseGranted):
            lease = self.leases.get(action.program_id)  # compared with all digits of its TTL
            ttl_s, reason = (lease.ttl_s, lease.reason.value) if lease is not None else (None, None)
            fields = (action.program_id, ttl_s, reason, len(action.block_ids))
        return type(action).__name__, *fields

    def _recorded(self, event: ev.Event) -> ev.Event:
        """Return the event without texts of clients, and with short block hashes. Of a chain, the hashes that
        the program's last recorded chain begins with are replaced by their number."""
        if isinstance(event, ev.ClientEventReceived):
            return replace(event, event=_event_without_text(event.event))
        if isinstance(event, ev.BlocksEvicted):
            blocks = [(block_id, _joined([name]) if name else None) for block_id, name in event.blocks]
            return replace(event, blocks=blocks, score=None)
        if isinstance(event, ev.RequestArrived) and event.identity.context is not None:
            identity, ours = event.identity, event.identity.context.sojourn
            if ours is not None:  # the events that it carries have records of their own
                ours = replace(ours, emitter=None, events=[])
            context = replace(event.identity.context, step_id=None, sojourn=ours)
            event = replace(event, identity=RequestIdentity(identity.program_id, context, identity.outcome))
        if not isinstance(event, _WithHashes) or event.block_hashes is None:
            return event
        hashes = event.block_hashes
        shared = common_prefix_length(self._next_chain(event, list(hashes)), hashes)
        return replace(event, block_hashes=(shared, _joined(hashes[shared:])))

    def _restored(self, event: ev.Event) -> ev.Event:
        """Return the event that was recorded as ``event``. Block hashes remain short texts."""
        if not isinstance(event, _WithHashes) or event.block_hashes is None:
            return event
        shared, text = event.block_hashes
        chain = [text[start : start + HASH_DIGITS] for start in range(0, len(text), HASH_DIGITS)]
        chain[:0] = self._next_chain(event, chain)[:shared]
        return replace(event, block_hashes=chain)

    def _next_chain(self, event: _WithHashes, chain: list[Any]) -> list[Any]:
        """Store the newest chain of the event's program, or request. Return the one before, at first
        empty."""
        if isinstance(event, ev.RequestArrived):
            program_id = event.identity.program_id
        else:
            known = self.request(event.request_id)
            program_id = known.program_id if known is not None else None
        key = program_id or event.request_id
        before = recent_entry(self._chains, key, list, MAX_CHAINS)
        self._chains[key] = chain
        if program_id is None and isinstance(event, ev.TurnFinished):
            del self._chains[key]
        return before


def _event_without_text(event: AnyEvent) -> AnyEvent:
    """Return a client's event with constants for the fields that cannot change a decision."""
    if isinstance(event, ProgramStart):
        return replace(event, name=None)
    if isinstance(event, ToolStop):
        return replace(event, status="ok")
    if isinstance(event, ProgramEnd) and event.status not in REPORTED_OUTCOMES:
        return replace(event, status="error")
    return event


def _joined(hashes: Iterable[bytes]) -> str:
    return "".join(block_hash[: HASH_DIGITS // 2].hex() for block_hash in hashes)
