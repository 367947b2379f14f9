"""Recordings of a scheduler's events and answers, so that a replay can be compared with the original.

Imports ``core`` and the packages to its left; no engine. Start with ``recording_scheduler.py``.

Theory of operation ------------------- Decisions are functions of events and times alone.
``RecordingScheduler`` overrides ``handle`` and the questions and writes one record per call, in order: the
event or the question, the time, the answer, the decisions logged during the call, and the actions.

``simulator.parity_replay`` builds a second ``RecordingScheduler`` from the header, passes it the events at
their times, and compares its records with the recorded ones. Both schedulers write records with the same
code, so all recorded data are compared.

Format ------ Lines of JSON, gzipped. The first line is the header (``RecordingHeader``), the last one the end
record; if that is missing, the engine was killed or the file truncated. The other lines are

    [op, now, facts, answer, decisions, orders]

without empty parts at the end; ``now`` is seconds on the engine's clock. ``RECORD_SHAPES`` explains the parts
for each ``op``; an event's ``op`` is its tag. Requests are numbered by arrival. A float is written with
enough digits to be read back exactly. Infinity becomes ``null``: no event contains it, and of the answers
only "never promoted" and the eviction key of an unknown program.

A recording contains token counts and the first 8 bytes of each block's chained hash (of a request's chain
only the part that differs from its program's previous chain). It contains names and command heads of tools,
and the ids, agent types, tenants and graph node names of clients. It contains no text, no arguments and no
results.
"""

from __future__ import annotations

from .record_format import RECORD_SHAPES
from .recording_file import (
    MAX_RECORDING_BYTES,
    RECORDING_VERSION,
    RecordedCall,
    RecordingError,
    RecordingFile,
    RecordingHeader,
    RecordingReader,
    canonical_line,
    encode_record,
)
from .recording_scheduler import RecordingScheduler, RecordSink

__all__ = [
    "MAX_RECORDING_BYTES",
    "RECORDING_VERSION",
    "RECORD_SHAPES",
    "RecordSink",
    "RecordedCall",
    "RecordingError",
    "RecordingFile",
    "RecordingHeader",
    "RecordingReader",
    "RecordingScheduler",
    "canonical_line",
    "encode_record",
]
