"""Recordings of a scheduler's events and answers, so that a replay can be compared with the original.

Imports ``core`` and packages that ``core`` imports, and no engine. Start with ``recording_scheduler.py``.

How it works: a scheduler's decisions depend only on its events and their times. ``RecordingScheduler``
overrides ``handle``, which takes events, and the query methods. It writes one record per call: the event or
query, the time, the answer, the decisions logged during the call, and the actions.

``simulator.parity_replay`` builds a second ``RecordingScheduler`` from the header, passes it the events at
their times, and compares its records with the recorded ones. Both schedulers write records with the same
code, so all recorded data are compared.

Format: lines of JSON, gzipped. The first line is the header (``RecordingHeader``). The last line is the end
record. If it is missing, the engine was killed or the file was truncated. The other lines are

    [op, now, facts, answer, decisions, orders]

without empty parts at the end. ``now`` is seconds on the engine's clock, or ``null`` for most queries.
``facts`` are the inputs of the call, and ``orders`` are the actions. ``RECORD_SHAPES`` explains the parts for
each ``op``. An event's ``op`` is its tag. Requests are numbered by arrival. Floats keep all digits, so they
are read back exactly. Infinity is written as ``null``. Infinity occurs only in two answers: "never promoted"
and the eviction key of an unknown program.

A recording contains token counts and the first 8 bytes of each block's chained hash. Of a request's chain of
hashes, it contains only the part that differs from the program's previous chain. It contains names and
command heads of tools, and the ids, agent types, tenants and graph node names of clients. It contains no
text, no arguments and no results.
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
