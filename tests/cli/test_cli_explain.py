"""``sojourn explain`` prints what the route answers."""

from __future__ import annotations

import io

from rich.console import Console
from sojourn_server.cli.explain import print_explanation


def test_the_table_has_phases_tokens_losses_and_hints() -> None:
    out = io.StringIO()
    found = {
        "program_id": "[red]a",
        "text": "Turn 2: 1.50 s to the first token.",
        "before": {"gap_s": 9.0, "tool": "bash:pytest", "leased_at_return": False},
        "seconds": {"queued": 0.5, "prefilling": 1.0, "decoding": 2.0, "wall": 3.5},
        "tokens": {"prompt": 60, "device": 8, "host": 0, "new": 20, "tail": 2, "lost": {"expired": 30}},
        "lost_to": "thief",
        "outcome": "stopped",
        "decisions": [{"seq": 4, "at_s": 1.0, "kind": "keep", "reason": "ttl", "ttl_s": 2.5}],
        "advice": [{"hint": "ttl_s", "text": "A hinted TTL of 9.0 s.", "saves_s": 0.8}],
        "unknown": ["which tool"],
    }
    print_explanation(found, Console(file=out, width=100))
    text = out.getvalue()
    for part in (
        "[red]a",
        "lost: expired",
        "taken by thief",
        "ttl_s=2.5",
        "about 0.80 s (estimate)",
        "unknown: which",
    ):
        assert part in text
