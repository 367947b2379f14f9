"""Recordings of a scheduler's events and actions, so that a replay can be compared with the original.

A scheduler's decisions depend only on its events and their times. ``RecordingScheduler`` is a
``ProgramScheduler`` whose ``handle`` also writes each event with the resulting actions and decisions. Queries
change nothing, so they are not recorded. ``simulator.parity_replay`` builds a second scheduler from the
header, handles the same events at the same times, and compares actions and decisions.

Format: lines of JSON, gzipped. The first line is the header (``RecordingHeader``). The last line is the end
record, ``{"ended": reason, "totals": {…}}``. If it is missing, the engine was killed or the file was cut.
Each other line is one event:

    [now, [kind, field, …], [[[kind, field, …], …], [decision, …]]]

    now        seconds on the engine's clock
    event      the name of the event's class, then its fields in order
    outcome    the actions and the new entries of the decision log; or the name of the exception

Floats keep all digits, so they are read back exactly. There are ids, agent types, tenants, graph nodes, names
and command heads of tools, token counts, and the first digits of block hashes, but no text, arguments or
results. Of a request's block hashes only those are written that its program's last ones do not have.
"""

from .recording_file import (
    EndRecord,
    RecordingError,
    RecordingFile,
    RecordingHeader,
    RecordingReader,
    encode_record,
)
from .recording_scheduler import RecordingScheduler

__all__ = [
    "EndRecord", "RecordingError", "RecordingFile", "RecordingHeader", "RecordingReader",
    "RecordingScheduler", "encode_record",
]  # fmt: skip
