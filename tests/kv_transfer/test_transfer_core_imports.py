"""The rules of traffic have no clock, thread, socket or file: else virtual time would prove nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import sojourn_server.kv_transfer

FOLDER = Path(sojourn_server.kv_transfer.__file__).parent
PURE = [
    "staging_buffers",
    "incoming_prompt_table",
    "load_table",
    "peer_table",
    "push_table",
    "transfer_actions",
    "transfer_context",
    "transfer_core",
    "transfer_limits",
    "transfer_link",
    "transfer_wire",
]
FORBIDDEN = {
    "asyncio",
    "logging",
    "os",
    "random",
    "secrets",
    "select",
    "socket",
    "threading",
    "time",
    "torch",
}


@pytest.mark.parametrize("name", PURE)
def test_it_imports_nothing_that_acts(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == 1:
            assert node.module in PURE, f"{name} imports {node.module}, which acts"
    assert not found & FORBIDDEN
