"""A trace file with made-up programs for the loads of benchmarks/gpu/engine.py."""

from __future__ import annotations

import json
from pathlib import Path


def write_windows(path: Path, programs: int = 60, turns: int = 6) -> Path:
    """Write programs of 10,000 tokens that grow by 1,000 a turn. Every other one has a gap of 20 s."""
    lines = []
    for number in range(programs):
        made = [
            {
                "prompt_tokens": 10_000 + 1_000 * turn,
                "output_tokens": 120,
                "gap_s": 20.0 if number % 2 and turn == 1 else 0.2,
                "gap_kind": "tool",
            }
            for turn in range(turns)
        ]
        lines.append(json.dumps({"program_id": f"p{number}", "turns": made}))
    path.write_text("\n".join(lines) + "\n")
    return path
