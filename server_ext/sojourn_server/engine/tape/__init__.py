"""The tape: all that a steward was told and answered, so that it can be told again and must answer the same.

Theory of operation
-------------------
Decisions are functions of facts and times, and of nothing else. ``TapingSteward``
stands where the steward does and writes one record a call, in order: what was
handed in, the time, what came back, and the decisions that were logged meanwhile.
Answers that the engine gave in between (how many blocks a lease's end would free)
are facts too and are written down with the call that asked.

``lab.parity`` builds a second ``TapingSteward`` from the tape's header, tells it the
facts at their times, and compares the records it makes with the recorded ones. Both
sides write with the same code, so nothing that is taped can be left uncompared.

Format
------
Lines of JSON, gzipped. The first is the header (``header.Header``), the last the end
record; without it the engine was killed or the file truncated. Those between are

    [op, now, facts, answer, decisions]

cut after the last part that says something; ``now`` is seconds on the engine's clock.
What the parts mean for each ``op`` is in ``records.SHAPES``. Requests are numbered by
their arrival; a float is written with as many digits as identify it, so it comes back
bit for bit. Infinite ones become ``null``: no fact is infinite, and of the answers only
"never promoted" and the place of an unknown program in the order of reuse.

Of prompts and outputs a tape holds token counts and the first 8 bytes of each block's
chained hash (of a request's chain only what is new since its program's last one). Of
tools it holds names and command heads, as the history does; of clients their ids, agent
types, tenants and the names in their graphs. No text, no arguments, no results.
"""

from __future__ import annotations

from .desk import TapingDesk
from .file import MAX_TAPE_BYTES, TapeFile, encode
from .header import TAPE_VERSION, Header
from .reader import Record, TapeError, TapeReader, canonical
from .recording import Sink
from .records import SHAPES
from .steward import TapingSteward

__all__ = [
    "MAX_TAPE_BYTES",
    "SHAPES",
    "TAPE_VERSION",
    "Header",
    "Record",
    "Sink",
    "TapeError",
    "TapeFile",
    "TapeReader",
    "TapingDesk",
    "TapingSteward",
    "canonical",
    "encode",
]
