"""Rows of programs and live frames, as a server sends them."""

from __future__ import annotations

from typing import Any

from sojourn_server.metrics.live_frame import EngineRow, LiveFrame, ProgramRow


def row(program_id: str, **fields: Any) -> ProgramRow:
    values = {
        "program_id": program_id, "engine": "0", "tenant": None, "status": "acting", "name": None,
        "parent_program_id": None, "turns": 3, "context_tokens": 12_345, "requests": 0, "tool": "bash:pytest",
        "since_s": 90.0, "running": False, "placed": None, "device_blocks": 64, "lease_blocks": 64,
        "lease_until_s": 130.0, "lease_reason": "this_tool", "reused_tokens": 9000, "lost_tokens": 0,
        "saved_s": 1.0, "ttft_s": 0.42,
    }  # fmt: skip
    return ProgramRow(**{**values, **fields})


def frame(*programs: ProgramRow, engines: int = 1, untracked_requests: int = 0) -> LiveFrame:
    rows = [
        EngineRow(
            engine=str(number), now_s=100.0, policy="sojourn", block_tokens=16, block_bytes=1 << 20,
            blocks={"running": 10, "leased": 20, "cached": 30, "free": 40},
            tiers={"host": {"used": 1, "free": 3}},
            programs={"acting": 2, "reasoning": 1}, requests=2, running_requests=1, leases=1, turns=9,
            prompt_tokens=1000, device_tokens=700, host_tokens=100,
            lost_tokens={"evicted": 150, "expired": 50}, untracked_requests=untracked_requests,
        )
        for number in range(engines)
    ]  # fmt: skip
    return LiveFrame(
        seq=1,
        full=True,
        unix_s=0.0,
        interval_s=0.5,
        engines=rows,
        programs=list(programs),
        total=len(programs),
    )
