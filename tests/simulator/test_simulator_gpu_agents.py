"""benchmarks/gpu without a GPU: loads, plan, gates, page, simulator, and the cut of a CUDA library."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from script_modules import load_script
from trace_windows import write_windows


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/gpu/engine.py")


@pytest.fixture(scope="module")
def loads(script: Any) -> Any:
    import engine_loads  # engine.py has put its folder on the path

    return engine_loads


@pytest.fixture(scope="module")
def tokens() -> Any:
    return load_script("benchmarks/gpu/engine_tokens.py")


@pytest.fixture
def traces(loads: Any, tmp_path: Path) -> Any:
    return loads.read_programs(write_windows(tmp_path / "traces.jsonl", programs=120))


def test_a_load_fills_the_device_so_many_times_with_programs_of_its_kind(loads: Any, traces: Any) -> None:
    for load in loads.LOADS:
        programs, shortened = loads.draw_programs(traces, load, loads.H200, 0)
        assert programs == loads.draw_programs(traces, load, loads.H200, 0)[0]
        assert programs != loads.draw_programs(traces, load, loads.H200, 1)[0]
        contexts = [program.max_context_tokens for program in programs]
        assert 0 <= sum(contexts) - load.ratio * loads.H200.pool_tokens < max(contexts)
        longest_s = max(turn.idle_s for program in programs for turn in program.turns)
        is_long = load.tools == loads.LONG_TOOLS
        assert longest_s == (loads.H200.max_gap_s[load.tools] if is_long else 0.2)
        assert (shortened > 0) is is_long
        for program in programs:
            low, high = loads.H200.first_prompt_tokens
            assert low <= program.turns[0].prompt_tokens <= high
            for before, after in zip(program.turns, program.turns[1:], strict=False):
                assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
    with pytest.raises(ValueError, match="expected 196608 tokens: name a directory with more traces"):
        loads.draw_programs(traces[:4], loads.LOADS[0], loads.H200, 0)


def test_the_plan_takes_the_most_important_runs_and_pays_for_each_start(loads: Any) -> None:
    costs = {(arm.name, load.name): 30.0 for arm in loads.ARMS for load in loads.LOADS}

    def plan(budget_s: float, done: Any = ()) -> tuple[list[Any], list[Any]]:
        runs = loads.plan_runs(budget_s, loads.ARMS, loads.LOADS, costs, range(2), loads.H200, done)
        return [run for run in runs if not run.left_out], [run for run in runs if run.left_out]

    chosen, out = plan(loads.H200.start_s + 4 * 30)
    assert [run.arm.name for run in chosen] == ["vLLM", "sojourn + 1x", "vLLM + 1x", "sojourn"]
    assert {run.load for run in chosen} == {loads.LOADS[0]}
    assert plan(loads.H200.start_s + 4 * 30 - 1)[0] == chosen[:3]
    assert plan(loads.H200.start_s + 5 * 30)[0] == chosen  # one arm on the next load has nothing beside it
    assert {run.left_out for run in out} == {"does not fit the budget"}
    every, none = plan(1e6)
    assert none == []
    assert len(every) == len(chosen) + len(out)
    assert [run.arm.group for run in every] == sorted(run.arm.group for run in every)
    turned = [run.arm.name for run in every if run.seed == 1 and run.load == loads.LOADS[0]]
    assert turned.index("sojourn + 1x") < turned.index("vLLM")
    first = {(run.arm.name, run.load.name, run.seed) for run in chosen}
    assert not first & {(run.arm.name, run.load.name, run.seed) for run in plan(1e6, first)[0]}


def test_session_gate_keeps_a_slot_until_the_program_ends() -> None:
    from engine_gates import SessionGate

    async def run() -> None:
        gate = SessionGate(1)
        await gate.enter("a", 10)
        gate.turn_ended("a", 12)
        await gate.enter("a", 20)
        other = asyncio.ensure_future(gate.enter("b", 10))
        await asyncio.sleep(0)
        assert not other.done()
        gate.program_ended("a")
        await asyncio.wait_for(other, 10)

    asyncio.run(run())


def test_thunderagents_gate_holds_back_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine_gates

    monkeypatch.setattr(engine_gates.ThunderAgentRouter, "tick_s", 0.01)

    async def run() -> None:
        gate = engine_gates.ThunderAgentGate(1_000)
        await gate.enter("a", 600)
        other = asyncio.ensure_future(gate.enter("b", 600))
        await asyncio.sleep(0.05)
        assert not other.done()
        gate.turn_ended("a", 650)
        await gate.enter("a", 700)
        gate.program_ended("a")
        await asyncio.wait_for(other, 10)

    asyncio.run(run())


def test_the_simulator_runs_the_same_turns_and_finds_what_vllm_alone_lost(loads: Any, traces: Any) -> None:
    from engine_agents import simulate_agents

    load = loads.LOADS[1]
    programs, _ = loads.draw_programs(traces, load, loads.H200, 0)
    arms = {arm.name: arm for arm in loads.ARMS}
    stock, sojourn = (
        simulate_agents(arms[name], load, programs, "h200", loads.H200, 0)
        for name in ("vLLM", "sojourn + 1x")
    )
    assert stock["turns"] == sojourn["turns"] == 5 * len(programs)
    assert sum(sojourn["tokens_by_source"].values()) > sum(stock["tokens_by_source"].values())
    assert sojourn["completion_s"]["mean"] < stock["completion_s"]["mean"]


def found(tokens: list[list[int]], loaded: int = 0, staged: int = 0, **other: Any) -> dict[str, Any]:
    """What an arm's process tells."""
    moves = {"stored": 3, "saved": 1, "staged": staged}
    return {
        "tokens": tokens, "async": True, "layout": "LBNHC", "layout asked for": None,
        "attention": "TRITON_ATTN", "runner": "vllm.v1.worker.gpu.model_runner",
        "stats": {"tiers": {"moves": moves}, "ledger": {"host_tokens": loaded}, "leases": {"count": 0}},
        **other,
    }  # fmt: skip


def test_an_arm_fails_with_other_tokens_without_a_reference_and_where_nothing_was_loaded(
    tokens: Any,
) -> None:
    alone, host = {"arm": "vLLM alone"}, {"arm": "host memory", "policy": "sojourn", "host_blocks": 9}
    disk, brief = {**host, "disk": True}, {**host, "dtype": "bfloat16"}
    right, wrong = [[1, 2, 3, 4] * 4], [[1, 2, 3, 5] * 4]
    expected: dict[tuple[str, ...], list[list[int]]] = {}
    assert "to compare with" in tokens.token_row(host, found(right, 5), expected)["failed"]
    assert "failed" not in tokens.token_row(alone, found(right), expected)
    good = tokens.token_row(host, found(right, 5), expected)
    assert "failed" not in good
    assert (good["tokens"], good["differ"], good["tokens loaded"], good["blocks saved"]) == (16, 0, 5, 4)
    assert tokens.token_row(host, found(wrong, 5), expected)["failed"] == "other tokens"
    assert tokens.token_row(host, found(right), expected)["failed"] == "nothing was loaded"
    assert tokens.token_row(disk, found(right, 5), expected)["failed"] == "nothing was read from disk"
    assert "failed" not in tokens.token_row(disk, found(right, 5, staged=1), expected)
    assert tokens.token_row(host, {"failed": "why"}, expected)["failed"] == "why"
    lost = tokens.token_row(host, found(right, 5, **{"layout asked for": "BLHNC"}), expected)
    assert lost["failed"] == "vLLM did not take the layout BLHNC"
    old = found(right, 5, runner="vllm.v1.worker.gpu_model_runner")
    assert tokens.token_row(host, old, expected)["failed"] == "ran on vllm.v1.worker.gpu_model_runner"
    leases = {"arm": "leases", "policy": "continuum"}
    assert tokens.token_row(leases, found(right), expected)["failed"] == "no lease was held"
    held = found(right, stats={"tiers": {}, "leases": {"count": 2}})
    assert "failed" not in tokens.token_row(leases, held, expected)
    # Rounding alone makes some tokens differ in bfloat16. That data type has a reference of its own.
    assert "to compare with" in tokens.token_row(brief, found(right, 5), expected)["failed"]
    tokens.token_row({**alone, "dtype": "bfloat16"}, found(right), expected)
    assert "failed" not in tokens.token_row(brief, found([[1, 2, 3, 5] + [1, 2, 3, 4] * 3], 5), expected)
    assert tokens.token_row(brief, found(wrong, 5), expected)["failed"] == "other tokens"


def test_the_page_compares_arms_and_says_what_failed_and_what_did_not_run(script: Any, loads: Any) -> None:
    load = loads.LOADS[0].name

    def run(arm: str, mean_s: float, **other: Any) -> dict[str, Any]:
        figures = {"mean": mean_s, "p50": mean_s, "p95": 2 * mean_s}
        return {
            "arm": arm, "load": load, "seed": 0, "turns": 3, "programs": 2, "programs_finished": 2,
            "completion_s": figures, "slowdown": figures, "ttft_s": figures, "tpot_s": {"mean": 0.01},
            "prompt_tokens": 100, "tokens_by_source": {"device": 40, "host": 30}, "regenerated_tokens": 7,
            "preemptions": 1, **other,
        }  # fmt: skip

    rows = [
        run("sojourn + 1x", 5.0),
        run("vLLM", 10.0),
        run("vLLM", 99.0, seed=1),
        {**run("sojourn", 1.0), "failed": "5 requests"},
    ]
    rows.append({"arm": "vLLM + 1x", "load": load, "seed": 0, "failed": "ServerStartError: why"})
    rows.append(run("an earlier arm", 7.0))
    found = {
        "commands": ["python x"], "made_with": "a GPU", "rows": rows, "remarks": ["By hand."],
        "setup": {"pool_tokens": 1000, "limit_s": 100.0},
        "loads": {f"{load}, seed {seed}": f"with seed {seed} two" for seed in (0, 1)},
        "left_out": [
            {"load": load, "arm": arm, "seed": 0, "expected s": 9, "left out": "no time"} for arm in "ab"
        ],
    }  # fmt: skip
    page: str = script.page({"device": "GPU", "agents": found})
    assert page.endswith("By hand.\n")
    assert page.index("| vLLM | 0 | 2 of 2 | 10.0, 10.0, 20.0 |") < page.index(
        "| sojourn + 1x | 0 | 2 of 2 |"
    )
    assert "| vLLM | 1.0 | 2.0 |" in page
    assert "over sojourn |" not in page  # a run with failed requests is compared with nothing
    assert "5 requests" in page
    assert "ServerStartError: why" in page
    assert f"| {load} | 0 | a (9 s); b (9 s) | no time |" in page


def test_wrong_arguments_are_named(script: Any, capsys: Any, monkeypatch: Any) -> None:
    for given, said in (
        (["--parts", "token"], "--parts of agents, simulator, tokens"),
        (["--arms", "vLLm"], "--arms of vLLM; sojourn + 1x"),
        ([], "need --traces"),
        (["--parts", "tokens", "--dry-run"], "need --traces"),
        (["--parts", "simulator", "--traces", "x"], "needs --profile"),
    ):
        monkeypatch.setattr("sys.argv", ["engine.py", "--out", "x", *given])
        with pytest.raises(SystemExit):
            script.main()
        assert said in capsys.readouterr().err


def test_onto_refuses_runs_of_another_vllm_and_names_the_difference(
    script: Any, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    setup = {"model runner": "V1", "vLLM": "0.1", "model": "tiny", "pool_tokens": 1_024}
    document = {"device": "CPU: shows that it runs, the figures mean nothing"}
    (tmp_path / "x.json").write_text(json.dumps({**document, "agents": {"setup": setup}}))
    given = ["--small", "--traces", "x", "--out", "x", "--onto", str(tmp_path / "x.json")]
    monkeypatch.setattr("sys.argv", ["engine.py", *given])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        script.main()
    said = capsys.readouterr().err
    assert "vLLM 0.1, here " in said
    assert "pool_tokens" not in said


def test_a_dry_run_continues_a_document_of_other_parts(
    script: Any, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    write_windows(tmp_path / "traces.jsonl", programs=120)
    (tmp_path / "x.json").write_text(json.dumps({"device": "GPU", "tokens": {}}))
    given = ["--dry-run", "--traces", str(tmp_path), "--out", "x", "--onto", str(tmp_path / "x.json")]
    monkeypatch.setattr("sys.argv", ["engine.py", *given])
    assert script.main() == 0
    assert " runs, " in capsys.readouterr().out


def test_other_arms_run_beside_a_server_that_dies_while_it_warms_up(
    script: Any, traces: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    import engine_agents

    async def warm_up(url: str, setup: Any) -> Any:
        if url == "stock":
            raise OSError("out of memory")
        return engine_agents.AloneSpeed(request_s=1.0, prompt_token_s=0.0, output_token_s=0.0)

    monkeypatch.setattr(
        script,
        "started",
        lambda arms, *_: nullcontext({a.server: SimpleNamespace(url=a.policy) for a in arms}),
    )
    monkeypatch.setattr(script, "warm_up", warm_up)
    monkeypatch.setattr(script, "make_model", lambda *_: "model")
    monkeypatch.setattr(script, "run_agents", lambda *_: {"failed": "it ran"})
    monkeypatch.setattr(script, "read_programs", lambda _: traces)
    monkeypatch.setattr(script, "write", lambda *_: None)
    arguments = SimpleNamespace(
        setup=script.H200, traces=None, arms="vLLM;sojourn", loads="1", seeds=1, budget_s=1e6, logs=tmp_path,
        runner="V2", commit="c",
    )  # fmt: skip
    document: dict[str, Any] = {"agents": {"rows": []}}
    script._run_agents(arguments, document, True, tmp_path, time.monotonic())
    failed = {row["arm"]: row["failed"] for row in document["agents"]["rows"]}
    assert failed == {"vLLM": "OSError: out of memory", "sojourn": "it ran"}
    assert document["agents"]["alone"]["arm"] == "sojourn"


def test_an_end_of_the_job_stops_servers_that_are_still_starting(
    loads: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    import engine_agents

    stopped, stopped_in_time = threading.Event(), []

    class Starting:
        stop = stopped.set

        def start(self) -> None:
            stopped_in_time.append(stopped.wait(20))

    class Ended:
        stop = stopped.set

        @property
        def start(self) -> Any:
            sys.exit(143)  # as the handler of SIGTERM does

    servers = iter([Starting(), Ended()])
    monkeypatch.setattr(engine_agents, "server_of", lambda *_: next(servers))
    with (
        pytest.raises(SystemExit),
        engine_agents.started(loads.ARMS[:2], "model", loads.H200, True, "V2", tmp_path),
    ):
        pass
    assert stopped_in_time == [True]


def test_a_cut_library_keeps_code_for_the_device_at_its_place(tmp_path: Path) -> None:
    pack = load_script("benchmarks/gpu/pack.py")

    def entry(kind: int, architecture: int, code: bytes) -> bytes:
        head = struct.pack("<HHIQIIHHI", kind, 1, 64, len(code), 0, 0, 0, 0, architecture)
        return head.ljust(64, b"\0") + code

    big = pack.SMALL_BYTES + 1
    codes = [b"k" * big, b"o" * big, b"p" * big, b"s" * 10, b"flash_fwd_hdim64_bf16".ljust(big, b"f")]
    codes += [b"flash_fwd_hdim128_bf16_paged".ljust(big, b"g")]
    kinds = [(2, 90), (2, 80), (1, 90), (2, 80), (2, 90), (2, 90)]
    entries = b"".join(entry(*kind, code) for kind, code in zip(kinds, codes, strict=True))
    container = b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(entries)) + entries
    library = tmp_path / "x.so"
    before = b"host code \x50\xed\x55\xba" + b"\xff" * 40 + container + b"the end"
    library.write_bytes(before)
    assert pack.cut_library(library) == (3 * big, 2 * big + 10)
    after = library.read_bytes()
    for code, kept in zip(codes, (True, False, False, True, False, True), strict=True):
        at = before.index(code)
        assert after[at : at + len(code)] == (code if kept else bytes(len(code)))
    assert after.endswith(b"the end")
