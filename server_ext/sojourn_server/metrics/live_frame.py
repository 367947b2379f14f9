"""Types of a live frame: what ``GET /sojourn/v1/stream`` sends, and the web page and ``sojourn top`` draw.

A full frame replaces all frames before it. It has every program, with the exceptions described at
``EngineRow.error`` and ``LiveFrame.total``. A delta has each program that has a request or a lease, and each
program that changed since the frame before. A program that a delta leaves out has neither request nor lease.
Times (``…_s``) are seconds on the clock of the row's engine, whose ``now_s`` is in the same frame.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

FRAME_VERSION = 2
PROBE_ID = "sojourn-probe"
"""Part of the id of each request that ``sojourn doctor``, ``profile`` and ``replay`` send."""


class ProgramSummary(msgspec.Struct, frozen=True):
    """One program, as far as an engine's tables tell."""

    program_id: str
    tenant: str | None
    status: str
    """A value of ``ProgramStatus``: reasoning, acting, gated (its request is held back), ended or expired."""
    name: str | None
    """The program's name, or else its agent type."""
    parent_program_id: str | None
    turns: int
    """Number of finished turns."""
    context_tokens: int
    """Prompt plus output tokens of the last finished turn."""
    requests: int
    """Number of requests in the engine."""
    tool: str | None
    """Tool of this gap, as the client reported it or the model called it. It runs, unless ``tool_ended``."""
    since_s: float
    """Arrival of the oldest live request, else the end of the last turn, else the first contact."""
    running: bool
    """Whether any request of the program has its blocks; false while all requests wait."""
    placed: str | None
    """Tier in which the placement policy has placed the program: device, host, disk, or waiting (no tier
    keeps its KV); ``None``: not placed, as under a policy without placement."""
    device_blocks: int
    """Cached blocks on the device that the program owns. A block with several owners counts for each."""
    lease_blocks: int
    """Blocks of the program's lease; 0: it has none."""
    lease_until_s: float | None
    """Deadline of the lease. The lease does not end while a request of the program waits."""
    lease_reason: str | None
    reused_tokens: int
    """Prompt tokens that were not computed, because their KV was on the device or in host memory. The sum
    over all turns."""
    lost_tokens: int
    """Prompt tokens that were computed again, because their KV was lost. The sum over all turns."""
    saved_s: float
    """Estimated seconds that computing ``reused_tokens`` would have taken."""
    ttft_s: float | None = None
    """Time to first token, in seconds, of the newest request that has one; ``None``: none has."""
    host_blocks: int = 0
    """Blocks of the last turn's context in host memory. They may be on the device too. For a long context the
    number is an estimate, because only some blocks are looked up."""
    disk_blocks: int = 0
    """Blocks of the last turn's context on disk, counted like ``host_blocks``."""
    tool_ended: bool = False
    """Whether the client reported the end of a tool in this gap, and reports no other tool that runs."""


class ProgramRow(ProgramSummary, array_like=True, frozen=True):
    """A ``ProgramSummary`` of a live frame, sent as a JSON array in the order of the fields. A new field
    needs a new ``FRAME_VERSION``."""

    engine: str = "0"
    """Name of the engine in ``LiveFrame.engines``."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Block counts of a large pool may be some seconds old; those of a small pool are exact."""

    engine: str
    now_s: float
    policy: str | None = None
    error: str | None = None
    """Why the engine's other fields are missing; ``None`` if the engine answered. If the engine does not
    answer, a full frame shows its programs as last known, without requests and leases. With any other error,
    it shows none of them."""
    answer_s: float | None = None
    """Seconds that the engine took to answer. The engine answers between two steps, so the time is at most
    one step plus the wait in the queue."""
    spent_s: float = 0.0
    """CPU seconds that the engine spent on this frame, between two of its steps."""
    block_tokens: float = 0.0
    block_bytes: int = 0
    blocks: dict[str, int] = {}
    """Blocks on the device by state: running, leased, cached, free."""
    tiers: dict[str, dict[str, int]] = {}
    """Blocks below the device, by tier (host, disk) and state (used, free)."""
    programs: dict[str, int] = {}
    """Number of programs by status."""
    requests: int = 0
    running_requests: int = 0
    leases: int = 0
    forgotten: int = 0
    """Programs that were removed from a full table."""
    mean_running: float = 0.0
    """Mean number of requests in recent steps."""
    prefill_share: float = 0.0
    """Share of the time of recent steps that computing prompts took."""
    turns: int = 0
    """Finished turns since the engine's start. The token counts below are sums over these turns."""
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    new_tokens: int = 0
    tail_tokens: int = 0
    output_tokens: int = 0
    preempted_tokens: int = 0
    """Tokens computed again after preemptions; not part of ``prompt_tokens``."""
    lost_tokens: dict[str, int] = {}
    """Prompt tokens computed again, by cause."""
    grants_leases: bool = True
    """Whether the engine's policy grants leases. The default policy does not: it places whole programs. If
    false, viewers show no column of leases."""
    untracked_requests: int = 0
    """Requests without a program that have arrived since the engine's start, except those of ``sojourn``
    commands. Each engine of a prefill/decode pair counts the same request."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to the operation ``snapshot``."""

    engine: EngineRow
    programs: list[ProgramRow]
    total: int
    full: bool


class LiveFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame of ``GET /sojourn/v1/stream``."""

    v: int = FRAME_VERSION
    seq: int
    """Number of the frame. It grows within a stream, with gaps."""
    full: bool
    """Whether all programs were asked for; else the frame is a delta."""
    unix_s: float
    """Time of the frame on the server's wall clock."""
    interval_s: float
    """Seconds between two frames."""
    gateway: bool = False
    engines: list[EngineRow]
    programs: list[ProgramRow]
    total: int
    """Number of programs that the engines know. If it is above ``len(programs)`` in a full frame, the other
    programs are not shown."""


def merge_rows(rows: Iterable[ProgramRow]) -> list[ProgramRow]:
    """Return one row for each program. If several engines know a program, the row with the most requests in
    the engine is returned; if requests are equal, the row with the most turns."""
    best: dict[tuple[str | None, str], ProgramRow] = {}
    for row in rows:
        known = best.get((row.tenant, row.program_id))
        if known is None or (row.requests, row.turns) > (known.requests, known.turns):
            best[row.tenant, row.program_id] = row
    return list(best.values())
