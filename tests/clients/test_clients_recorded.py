"""Requests of real coding agents, recorded on 30 November 2026: engine and gateway take the same program from
each. Texts are ours, and what names no program is shortened: prompts, tools, options of the model, headers of
the HTTP library. ``test_clients_real.py`` sends whole ones every night."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.api.client_identity import ClientIdentity, identify
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.generation_request import parse_generation_request

RECORDED = json.loads(Path(__file__).with_name("recorded_requests.json").read_text())
CLAUDE, CODEX, OPENCODE = (
    next(each["headers"][header] for each in RECORDED if each["client"] == client and each["role"] == "turn")
    for client, header in (
        ("Claude Code", "x-claude-code-session-id"), ("Codex", "thread-id"), ("OpenCode", "x-session-id"),
    )
)  # fmt: skip
OF_CODEX = {"agent_type": "collab_spawn", "parent_id": CODEX, "root_id": CODEX}


def expected(shape: dict[str, Any]) -> ClientIdentity | None:
    headers = shape["headers"]
    match shape["client"], shape["role"]:
        case "Claude Code", "sub-agent":
            return ClientIdentity(f"{CLAUDE}/{headers['x-claude-code-agent-id']}", CLAUDE, CLAUDE)
        case "Claude Code", _:
            return ClientIdentity(CLAUDE)
        case "Codex", "sub-agent":
            return ClientIdentity(headers["x-client-request-id"], **OF_CODEX)
        case "Codex", _:
            return ClientIdentity(CODEX)
        case "OpenCode", "sub-agent":
            return ClientIdentity(headers["x-session-affinity"], OPENCODE)
        case "OpenCode", _:
            return ClientIdentity(OPENCODE)
        case "Pi", _:
            return ClientIdentity(headers["session_id"])
    return None  # Qwen Code, whose base URL names the session


@pytest.mark.parametrize("shape", RECORDED, ids=lambda shape: f"{shape['client']}, {shape['role']}")
def test_a_recorded_request_has_its_program_parent_and_root(shape: dict[str, Any]) -> None:
    headers, body = shape["headers"], shape["body"]
    user_id = body.get("metadata", {}).get("user_id")
    at_engine = identify(headers, None, user_id, body.get("prompt_cache_key"))
    assert at_engine == expected(shape)
    parsed = parse_generation_request(ClientApi(shape["path"]), json.dumps(body).encode(), headers)
    assert parsed.program == at_engine
    assert parsed.stream
    without_headers = identify({}, None, user_id, body.get("prompt_cache_key"))
    if shape["client"] in ("Claude Code", "Codex") and shape["role"] == "turn":
        assert without_headers == at_engine, "the body names the program too"
