"""Recordings of a scheduler's events and answers, so that a replay can be compared with the original.

Imports ``core`` and packages that ``core`` imports, and no engine. Start with ``recording_scheduler.py``.

A scheduler's decisions depend only on its events and their times. ``RecordingScheduler`` overrides
``handle``, which takes events, and the query methods whose answers depend on a policy. It writes one record
per call. Only consecutive evictions share a record.

``simulator.parity_replay`` builds a second ``RecordingScheduler`` from the header, and repeats the recorded
calls at their recorded times. It compares the records that the second scheduler writes with the records in
the recording.

Format: lines of JSON, gzipped. The first line is the header (``RecordingHeader``). The last line is the end
record. If it is missing, the engine was killed or the file was truncated. Each other line is one record,
without empty parts at its end:

    [op, now, facts, answer, decisions, orders]

    op         the kind of call: a key of ``RECORD_SHAPES``. For an event, it is the event's msgspec tag
    now        seconds on the engine's clock; ``null`` for most queries and for evictions
    facts      the call's input as plain values
    answer     the call's result as plain values; its form depends on ``op``
    decisions  the entries of the decision log that were made during the call
    orders     the resulting actions, without actions that the answer records already

Requests are numbered by arrival. Floats keep all digits, so they are read back exactly. Infinity is written
as ``null``. It occurs only in two answers: "never promoted", and the eviction key of an unknown program.

A recording contains token counts, and the first 8 bytes of block hashes. For each request it has only the
hashes after the prefix that the request shares with its program's previous context. It also contains names
and command heads of tools, and the clients' ids, agent types, tenants and graph node names. It contains no
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
