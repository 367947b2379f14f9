"""``sojourn explain`` prints what the route answers."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console
from sojourn_server.cli.explain import explanation_view
from sojourn_server.metrics.turn_explanation import Explanation

FOUND = {
    "program_id": "[red]a",
    "turn": 2,
    "text": "Turn 2: 1.50 s to the first token.",
    "before": {"gap_s": 9.0, "tool": "bash:\x1b[31mpytest", "leased_at_return": False},
    "seconds": {"queued": 0.5, "prefilling": 1.0, "decoding": 2.0, "wall": 3.5},
    "first_token_s": 1.5,
    "usual_first_token_s": None,
    "tokens": {"prompt": 60, "device": 8, "host": 0, "new": 20, "tail": 2, "lost": {"expired": 30}},
    "lost_to": "[b]thief",
    "recompute_s": 1.0,
    "saved_s": None,
    "outcome": "stopped",
    "decisions": [
        {"seq": 3, "at_s": 0.5, "kind": "keep", "reason": "policy_off", "ttl_s": 0},
        {"seq": 4, "at_s": 1.0, "kind": "keep", "reason": "ttl", "ttl_s": 2.5},
    ],
    "advice": [{"hint": "kv_retention_ttl_seconds", "text": "A hinted TTL of 9.0 s.", "saves_s": 0.8}],
    "unknown": ["which tool"],
    "turns": [1, 2],
}


def test_the_table_has_phases_tokens_losses_and_hints() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(explanation_view(msgspec.convert(FOUND, Explanation)))
    text = out.getvalue()
    for part in (
        "[red]a",
        "lost: expired",
        "computed again; taken by [b]thief",
        "20      computed for the first time",
        "ended: stopped",
        "decision 3: no lease (policy_off)",
        "decision 4: keep (ttl)",
        "no lease",
        "ttl_s=2.5",
        "about 0.80 s (estimate)",
        "unknown: which",
    ):
        assert part in text
    assert "\x1b" not in text
