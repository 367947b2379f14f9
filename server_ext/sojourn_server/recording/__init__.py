"""Recordings of a scheduler's events and answers, so that a replay can be compared with the original.

Imports ``core`` and the packages to its left; no engine. Start with ``recording_scheduler.py``.

Theory of operation
-------------------
Decisions are functions of events and times, and of nothing else. ``RecordingScheduler`` overrides
``handle`` and the questions and writes one record a call, in order: the event or the question, the
time, the answer, the decisions that were logged meanwhile, and the actions.

``simulator.parity_replay`` builds a second ``RecordingScheduler`` from the header, hands it the events
at their times, and compares the records that it makes with the recorded ones. Both sides write with
the same code, so everything that is recorded is compared.

Format
------
Lines of JSON, gzipped. The first is the header (``RecordingHeader``), the last the end record; without
it the engine was killed or the file truncated. Those between are

    [op, now, facts, answer, decisions, orders]

cut after the last part that is not empty; ``now`` is seconds on the engine's clock. The meaning of the
parts for each ``op`` is in ``RECORD_SHAPES``; an event's ``op`` is its tag. Requests are numbered by
their arrival. A float is written with as many digits as identify it, so it comes back bit for bit.
Infinite ones become ``null``: no event holds one, and of the answers only "never promoted" and the
eviction key of an unknown program.

A recording holds token counts and the first 8 bytes of each block's chained hash (of a request's chain
only what is new since its program's last one). It holds names and command heads of tools, and the ids,
agent types, tenants and graph node names of clients. It holds no text, no arguments and no results.
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
