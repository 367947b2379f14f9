"""Attacks over HTTP on a real server and a gateway in front of it, as hostile clients made them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_tools import SMALL_SERVER
from event_flood_client import CONNECTIONS
from gateway_process import GatewayProcess
from prometheus_client.parser import text_string_to_metric_families
from sojourn.wire_codec import MAX_BATCH_BYTES, MAX_EVENT_NAME_BYTES
from sojourn_server.launch.engine_server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MAX_PROGRAMS = 200
FLAGS = (
    "--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "256",
    "--enable-prompt-tokens-details", "--sojourn-option", f"max_programs={MAX_PROGRAMS}",
)  # fmt: skip
MAX_COMPLETION_S = 90.0
"""For a completion of 4 tokens during the flood; without one it takes 50 ms on a quiet machine. It once took
as long as the flood, which here ends only with the test."""
HALF_REQUESTS = 300
MAX_RSS_GROWTH_BYTES = 64 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with EngineServer("tiny", serve_args=FLAGS, env=SMALL_SERVER, log_path=log) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "tenants.toml").write_text('[tenants]\nalice = "ka"\nbob = "kb"\n')
    with GatewayProcess(
        [server.url], folder / "gateway.log", "--tenants", str(folder / "tenants.toml")
    ) as gateway:
        yield gateway


def call(url: str, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.request(
        method, url + path, headers=headers, timeout=MAX_COMPLETION_S, trust_env=False, **more
    )


def complete(url: str, first: int, key: str | None = None, **more: Any) -> dict[str, Any]:
    """A completion of 4 tokens after a prompt of its own."""
    prompt = [1000 + first * 7 + i for i in range(300)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = call(url, "POST", "/v1/completions", key, json={**body, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def report(url: str, events: list[dict[str, Any]], emitter: str = "e") -> list[dict[str, Any]]:
    """Outcomes of events; a server that is busy is asked again when it says so."""
    batch = {"v": 1, "emitter": emitter, "events": events}
    for _ in range(30):
        answer = post_events(url, json=batch)
        if answer.status_code != 503:
            break
        time.sleep(float(answer.headers["retry-after"]))
    assert answer.status_code == 200, answer.text
    return list(answer.json()["outcomes"])


def post_events(url: str, key: str | None = None, **body: Any) -> httpx.Response:
    return call(url, "POST", "/sojourn/v1/events", key, **body)


def hint(program_id: str, **members: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"agentic_context": json.dumps({"program_id": program_id, **members})}}


def resident_bytes(server: EngineServer) -> int:
    """Memory of the server and its engine, which are a process group."""
    shown = subprocess.run(["ps", "-eo", "pgid=,rss="], capture_output=True, text=True, check=True).stdout
    return 1024 * sum(int(rss) for pgid, rss in map(str.split, shown.splitlines()) if int(pgid) == server.pid)


def test_a_flood_of_events_neither_stops_generation_nor_loses_others_events(
    server: EngineServer,
) -> None:
    flood = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("event_flood_client.py")), str(server.port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert flood.stdout is not None
        for _ in range(CONNECTIONS):
            assert flood.stdout.readline()
        for number in range(5):
            complete(server.url, 100 + number)
            name = f"good{number}"
            own = [{"type": "program_start", "program_id": name, "seq": 0}]
            own += [{"type": "heartbeat", "program_id": name, "seq": seq} for seq in range(1, 4)]
            answer = call(
                server.url, "POST", "/sojourn/v1/events", json={"v": 1, "emitter": "good", "events": own}
            )
            assert answer.status_code == 200, "a small client's events are not refused for another's flood"
            assert [one["outcome"] for one in answer.json()["outcomes"]] == ["applied"] * 4
        assert flood.poll() is None, "it went on for all the time"
    finally:
        flood.kill()
        flood.communicate()
    assert call(server.url, "GET", "/sojourn/v1/programs?limit=1").json()["total"] <= MAX_PROGRAMS


def test_invented_ids_take_the_memory_of_as_many_as_are_kept(server: EngineServer) -> None:
    def invent(rounds: range) -> None:
        for number in rounds:
            events = [
                {"type": "program_start", "program_id": f"invented{number}-{n}", "seq": n}
                for n in range(1000)
            ]
            assert {one["outcome"] for one in report(server.url, events, emitter=f"e{number}")} == {"applied"}

    invent(range(2))
    before = resident_bytes(server)
    invent(range(2, 12))
    shown = call(server.url, "GET", "/sojourn/v1/programs?limit=1").json()
    assert shown["total"] <= MAX_PROGRAMS
    assert shown["forgotten"] >= 12_000 - MAX_PROGRAMS
    assert resident_bytes(server) - before < MAX_RSS_GROWTH_BYTES


def test_a_hint_of_a_mebibyte_is_no_hint_and_no_error(server: EngineServer) -> None:
    told = complete(server.url, 200, **hint("large", step_id="x" * (1 << 20)))
    assert told["choices"][0]["text"] == complete(server.url, 200)["choices"][0]["text"]
    assert call(server.url, "GET", "/sojourn/v1/programs/large").status_code == 404


def test_fat_names_and_a_thousand_tools_are_bounded(server: EngineServer) -> None:
    fat = "n" * MAX_EVENT_NAME_BYTES
    tool = {"type": "tool_start", "program_id": "fat"}
    tools = [{**tool, "seq": n + 1, "call_id": f"c{n}", "tool": f"{n}".rjust(256, "n")} for n in range(1024)]
    report(server.url, [{"type": "program_start", "program_id": "fat", "seq": 0}])
    for start in range(0, 1024, 256):
        assert {one["outcome"] for one in report(server.url, tools[start : start + 256])} == {"applied"}
    fatter = {**tool, "seq": 2000, "call_id": "c", "tool": "n" * 65536}
    unknown = {"type": fatter["tool"], "program_id": "fat", "seq": 2001}
    for outcome in report(server.url, [fatter, unknown, {**tool, "seq": 2002, "program_id": "n" * 65536}]):
        assert outcome["outcome"] in ("rejected", "unsupported")
        assert len(json.dumps(outcome)) < 1000
    answer = call(server.url, "GET", "/sojourn/v1/programs/fat")
    assert answer.json()["tools_running"] == 1024
    assert len(answer.json()["tools"]) <= 256
    complete(server.url, 300, **hint("fat", sojourn={"v": 1, "agent_type": fat, "node": fat, "tenant": fat}))
    page = call(server.url, "GET", "/metrics").text
    labels = [
        value
        for family in text_string_to_metric_families(page)
        if family.name.startswith("sojourn_")
        for sample in family.samples
        for value in sample.labels.values()
    ]
    assert labels
    assert max(map(len, labels)) <= MAX_EVENT_NAME_BYTES


def test_a_batch_beyond_the_limit_is_refused(server: EngineServer) -> None:
    assert (
        call(server.url, "POST", "/sojourn/v1/events", content=b" " * (MAX_BATCH_BYTES + 1)).status_code
        == 413
    )
    assert call(server.url, "POST", "/sojourn/v1/events", content=b"[" * MAX_BATCH_BYTES).status_code == 400


NAMES_OF_OTHERS = (
    b'"program_id":"alice/p"',
    b'"program_id":"p"',
    b'"program_id":"alice/p","\xff":1',
    b'"program_id":"alice/p","x":' + b"[" * 900 + b"]" * 900,
    b'"program_id":"alice/p","\\ud800":1',
    b'"program_id":"bob/../alice/p"',
)
"""Of alice's program, in forms that a gateway may fail to rename."""


def test_a_hostile_tenant_ends_reads_and_delays_nothing_of_another(
    gateway: GatewayProcess, server: EngineServer
) -> None:
    alice = hint("p", kv_retention_ttl_seconds=200)
    complete(gateway.url, 400, "ka", **alice)
    good = b'{"type":"program_start","program_id":"mine","seq":9}'
    for number, name in enumerate(NAMES_OF_OTHERS):
        end = b'{"type":"program_end","seq":%d,%s}' % (number, name)
        body = b'{"v":1,"emitter":"hostile%d","events":[%s,%s]}' % (number, end, good)
        answer = post_events(gateway.url, "kb", content=body)
        assert answer.status_code == 200, answer.text
        # Events of a program without a home wait for one.
        assert answer.json()["outcomes"][1]["outcome"] == "deferred", "one bad event spoils no other"
    forged = [
        {"type": "program_end", "program_id": "alice/p", "seq": 1},
        {"type": "program_end", "program_id": "p", "seq": 2},
    ]
    for program in ("alice/p", "p", "x" * 250):
        greedy = {"priority": 2**31, "kv_retention_ttl_seconds": 1e308, "deadline_seconds": 1e-9}
        own = {"v": 1, "emitter": "hostile", "tenant": "alice", "events": forged}
        complete(gateway.url, 500, "kb", **hint(program, **greedy, root_program_id="alice/p", sojourn=own))
        complete(gateway.url, 501, "kb", session_id=program, vllm_xargs={"session_id": "alice/p"})
    for path in ("alice%2Fp", "alice/p", "..%2Falice%2Fp"):
        assert call(gateway.url, "GET", f"/sojourn/v1/programs/{path}", "kb").status_code == 404
    shown = call(gateway.url, "GET", "/sojourn/v1/programs", "kb").text
    assert '"alice' not in shown.replace('"alice/p"', ""), "bob may call a program of his own alice/p"
    known = call(server.url, "GET", "/sojourn/v1/programs/alice%2Fp").json()
    assert known["status"] != "ended"
    assert known["turns"] == 1
    usage = complete(gateway.url, 400, "ka", **alice)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 256, "its KV is still there"


def test_half_requests_at_the_gateway_are_closed_and_delay_nobody(gateway: GatewayProcess) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nX-Half: "
    opened = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(HALF_REQUESTS)]
    try:
        for one in opened:
            one.sendall(half)
        complete(gateway.url, 600, "ka")
        deadline = time.monotonic() + 240.0
        for one in opened:
            one.settimeout(max(0.1, deadline - time.monotonic()))
            with one.makefile("rb") as answer:
                assert answer.read().startswith(b"HTTP/1.1 408 Request Timeout")
    finally:
        for one in opened:
            one.close()
