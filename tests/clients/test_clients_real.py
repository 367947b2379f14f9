"""Real coding agents against ``sojourn serve``, and against a gateway in front of it: each session is one
program, its sub-agent another, and its context is found again in each turn.

The newest releases of npm and pip are installed into ``.tox/clients``. docs/coding-agents.md has a row for
each client, which must say what the run saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from coding_clients import CLIENTS, FINISHED, ROOT, CodingClient
from gateway_process import GatewayProcess
from request_recorder import VARIABLE
from sojourn_server.api.client_identity import HEADER_ROWS
from sojourn_server.launch.engine_server import EngineServer

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = ROOT / "docs" / "coding-agents.md"
FOUND_SHARE = 0.9
"""Minimum share of a later prompt's tokens that the cache has. The rest is the last tool's output."""
FLAGS = (
    "--logits-processors", "scripted_answers:ScriptedAnswers", "--middleware", "request_recorder.record",
    "--hf-overrides", '{"max_position_embeddings": 65536}', "--max-model-len", "65536",
    "--num-gpu-blocks-override", "6000", "--served-model-name", "tiny",
)  # fmt: skip


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "requests.jsonl"


@pytest.fixture(scope="module")
def engine(requests: Path) -> Iterator[EngineServer]:
    env = {
        "PYTHONPATH": str(Path(__file__).parent),
        VARIABLE: str(requests),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    log = requests.with_name("engine.log")
    with EngineServer("tiny", serve_args=FLAGS, env=env, log_path=log) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(engine: EngineServer, requests: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess([engine.url], requests.with_name("gateway.log")) as process:
        yield process


def programs(engine: EngineServer) -> dict[str, dict[str, Any]]:
    """Return all programs of the engine, with their ledgers, by their ids."""
    url = f"{engine.url}/sojourn/v1/programs"
    with httpx.Client(trust_env=False, timeout=30) as http:
        ids = [each["program_id"] for each in http.get(url).json()["programs"]]
        return {each: http.get(f"{url}/{each}").json() for each in ids}


def run_session(client: CodingClient, engine: EngineServer, url: str, home: Path) -> list[dict[str, Any]]:
    """Run the script *main* and return the session's programs, the main one first, after the checks that
    hold for each client."""
    before = programs(engine)
    running = client.start(url, home, "Do it. SCRIPT-main-7")
    try:
        output, _ = running.communicate(timeout=240)
    finally:
        running.kill()
    assert FINISHED in output, output
    new = [each for name, each in programs(engine).items() if name not in before]
    main, *helpers = sorted(new, key=lambda each: each["parent_program_id"] or "")
    assert main["parent_program_id"] is None
    assert [each["parent_program_id"] for each in helpers] == [main["program_id"]] * len(helpers)
    assert len(helpers) == (client.agents and not client.session_in_url)
    return [main, *helpers]


def found_again(program: dict[str, Any]) -> bool:
    """Return whether each turn found the context of the one before. A title request is not such a turn."""
    longest = max(row["tokens"]["prompt"] for row in program["ledger"])
    turns = [row["tokens"] for row in program["ledger"] if row["tokens"]["prompt"] > longest * 0.8]
    return len(turns) > 2 and all(each["device"] > FOUND_SHARE * each["prompt"] for each in turns[1:])


def tools_seen(session: list[dict[str, Any]]) -> str:
    """Return the names of the tools that the engine saw, without their commands."""
    called = {row["tool_before"] for each in session for row in each["ledger"] if row["tool_before"]}
    return ", ".join(sorted({name.partition(":")[0].rpartition("__")[2] for name in called}))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_session_is_a_program(
    client: CodingClient, engine: EngineServer, gateway: GatewayProcess, requests: Path, tmp_path: Path
) -> None:
    version = client.install()
    requests.write_text("")
    session = run_session(client, engine, engine.url, tmp_path / f"{tmp_path.name}-engine")
    sent = [json.loads(line) for line in requests.read_text().splitlines()]
    sent = [each for each in sent if each["method"] == "POST"]
    assert {each["status"] for each in sent} == {200}
    assert any(each["path"].endswith(client.api) for each in sent)
    rows = [row for row in HEADER_ROWS for each in sent if each["headers"].get(row.program)]
    parents = {
        name for row in rows for name in (row.agent, row.parent) for each in sent if name in each["headers"]
    }
    cells = (
        client.name, version, f"`{client.api}`",
        f"`{rows[0].program}`" if rows else "the base URL",
        f"`{parents.pop()}`" if parents else "–",
        tools_seen(session), "yes" if found_again(session[0]) else "no",
    )  # fmt: skip
    through = run_session(client, engine, gateway.url, tmp_path / f"{tmp_path.name}-gateway")
    assert tools_seen(through) == tools_seen(session)
    assert found_again(through[0])

    row = f"| {' | '.join(cells)} |"
    same = [line for line in PAGE.read_text().splitlines() if line.split("|")[3:] == row.split("|")[3:]]
    assert any(line.startswith(f"| {client.name} |") for line in same), f"write into {PAGE}:\n{row}"
