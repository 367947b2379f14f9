"""A program moves to another engine: its KV goes by the disk that both share, and no token changes.

On real engines in float32 at temperature 0, with a model so *loud* that each next token hangs on all tokens
before it: KV that was another's would show. A test spoils it, and sees it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from engine_tools import (
    BLOCK_TOKENS,
    MOST_OFF,
    float32_engine,
    most_off,
    one_thread,
    said,
    scheduler_of,
    with_tiers,
)
from sojourn_server.launch.server import EngineServer
from sojourn_server.tiers.host_memory import HostMemory

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
PROGRAMS = ("P0", "P1", "P2")
FIRST_TOKENS, TOOL_TOKENS, OUTPUT_TOKENS = 600, 60, 40
PATIENCE_S = 60.0


class Turn(NamedTuple):
    """What a turn came to."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """Hashes that are the same in every engine, and one thread."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONHASHSEED", "0")
    with one_thread(patch):
        yield
    patch.undo()


def engine(model: str, root: Path | None, name: str | None) -> AbstractContextManager[Any]:
    """One with host memory, and a store of this name in ``root``."""
    disk: dict[str, Any] = {}
    if root is not None:
        disk = {"disk": str(root), "disk_bytes": 64 * MIB, "disk_name": name}
    return float32_engine(
        model,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=129,
        scheduler_cls="sojourn_server.vllm.scheduler.make_scheduler",
        additional_config={"sojourn": {"policy": "continuum", "strict": True}},
        **with_tiers(host_bytes=8 * MIB, **disk),
    )


def ask(llm: Any, operation: str, **arguments: Any) -> Any:
    return json.loads(scheduler_of(llm).sojourn_call(operation, json.dumps(arguments)))


def say(llm: Any, program: str, prompt: list[int]) -> Turn:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args={"agentic_context": json.dumps({"program_id": program})},
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (answer,) = output.outputs
    return Turn(*said(answer), output.num_cached_tokens)


def words(program: str, turn: int, count: int) -> list[int]:
    """Made up, and spread over the vocabulary."""
    first = 1 + PROGRAMS.index(program) * 7 + turn
    return [10 + (7919 * first * (index + 3) + 104_729 * index * index) % 4000 for index in range(count)]


def contexts_after_two_turns(speak: Callable[[str, list[int]], list[int]]) -> dict[str, list[int]]:
    """Of each program, what its third turn's prompt begins with."""
    contexts = {}
    for program in PROGRAMS:
        context = words(program, 0, FIRST_TOKENS)
        context += [*speak(program, context), *words(program, 1, TOOL_TOKENS)]
        contexts[program] = [*context, *speak(program, context)]
    return contexts


def third(program: str, context: list[int]) -> list[int]:
    return [*context, *words(program, 2, TOOL_TOKENS)]


def persist(llm: Any, program: str) -> Any:
    """As a gateway does: asks until all is on disk."""
    deadline = time.monotonic() + PATIENCE_S
    while (told := ask(llm, "persist", program_id=program))["state"] == "writing":
        assert time.monotonic() < deadline, told
        core = llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():  # as the loop of an engine in a process of its own
            core.step_fn()
    return told


@pytest.fixture(scope="module")
def moved(loud_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The shared disk with the contexts that ``a`` has written, these, and what ``a`` would say next.

    A process has one connector beside a model, so ``a`` has ended when another begins; in the last test both
    live.
    """
    root = tmp_path_factory.mktemp("kv")
    with engine(loud_model, root, "a") as a:
        contexts = contexts_after_two_turns(lambda program, context: say(a, program, context).tokens)
        told = {program: persist(a, program) for program in PROGRAMS}
        written = {path: path.stat().st_mtime_ns for path in root.glob("*/*/*.kv")}
        stayed = {program: say(a, program, third(program, contexts[program])) for program in PROGRAMS}
    return root, contexts, told, written, stayed


def test_the_engine_it_moves_to_loads_it_and_says_what_the_old_one_would(loud_model: str, moved: Any) -> None:
    root, contexts, told, written, stayed = moved
    for program, context in contexts.items():
        assert (told[program]["state"], told[program]["shared"]) == ("done", True)
        assert told[program]["context_tokens"] == len(context)
        assert told[program]["stored_tokens"] >= 0.95 * len(context)
    with engine(loud_model, root, "b") as b:
        for program, context in contexts.items():
            turn = say(b, program, third(program, context))
            assert turn.cached_tokens >= 0.95 * len(context), "the target's share of the moved prefix"
            (row,) = ask(b, "program", program_id=program)["ledger"]
            assert row["tokens"]["host"] == turn.cached_tokens
            assert turn.tokens == stayed[program].tokens
            assert most_off(turn.logprobs, stayed[program].logprobs) < MOST_OFF
        moves = ask(b, "stats")["tiers"]["moves"]
        assert moves["shared"] == sum(one["stored_tokens"] for one in told.values()) // BLOCK_TOKENS
    assert len({tuple(turn.tokens) for turn in stayed.values()}) == len(PROGRAMS), "they must differ"
    assert all(len(set(turn.tokens)) > OUTPUT_TOKENS / 2 for turn in stayed.values())
    there = {path: path.stat().st_mtime_ns for path in written}
    assert there == written, "a reader neither writes nor deletes"


@pytest.mark.parametrize("name", ["no disk", "a disk of its own"])
def test_without_the_shared_disk_all_is_computed_and_the_tokens_are_the_same(
    loud_model: str, moved: Any, tmp_path: Path, name: str
) -> None:
    _, contexts, _, _, stayed = moved
    with engine(loud_model, None if name == "no disk" else tmp_path, "b") as alone:
        program = PROGRAMS[0]
        turn = say(alone, program, third(program, contexts[program]))
        assert turn.cached_tokens == 0
        assert turn.tokens == stayed[program].tokens
        assert ask(alone, "stats")["tiers"]["moves"].get("shared", 0) == 0


def test_kv_that_comes_spoilt_would_show(
    loud_model: str, moved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So equal tokens say that what comes is right, and not that nobody reads it."""
    root, contexts, _, _, stayed = moved
    monkeypatch.setattr(HostMemory, "to_device", lambda *args: None)
    with engine(loud_model, root, "spoilt") as b:
        for program, context in contexts.items():
            turn = say(b, program, third(program, context))
            assert turn.cached_tokens > 0
            assert turn.tokens != stayed[program].tokens


def test_two_servers_and_a_gateways_calls(loud_model: str, tmp_path: Path) -> None:
    """Over HTTP, each engine in processes of its own, and idle while it is asked to write."""
    with server(loud_model, tmp_path, "a") as a, server(loud_model, tmp_path, "b") as b:
        contexts = contexts_after_two_turns(lambda program, context: complete(a, program, context).tokens)
        for engine in (a, b):
            assert call(engine, "GET", "/sojourn/v1/capabilities").json()["tiers"]["disk"]["shared"] is True
        unknown = call(a, "POST", "/sojourn/v1/programs/nobody/persist")
        assert unknown.status_code == 404
        for program, context in contexts.items():
            deadline = time.monotonic() + PATIENCE_S
            while True:
                answer = call(a, "POST", f"/sojourn/v1/programs/{program}/persist")
                assert answer.status_code == 200, answer.text
                told = answer.json()
                if told["state"] != "writing":
                    break
                assert time.monotonic() < deadline, told
                time.sleep(0.02)
            assert told["state"] == "done"
            assert told["stored_tokens"] >= 0.95 * len(context)
            turn = complete(b, program, third(program, context))
            (row,) = call(b, "GET", f"/sojourn/v1/programs/{program}").json()["ledger"]
            assert row["tokens"]["host"] >= 0.95 * len(context)
            events = [{"type": "program_end", "program_id": program, "seq": 0, "status": "cancelled"}]
            batch = {"v": 1, "emitter": "gateway", "events": events}
            assert call(a, "POST", "/sojourn/v1/events", json=batch).status_code == 200
            stayed = complete(a, f"{program}-stays", third(program, context))
            assert turn.tokens == stayed.tokens
            assert most_off(turn.logprobs, stayed.logprobs) < MOST_OFF


@contextmanager
def server(model: str, root: Path, name: str) -> Iterator[EngineServer]:
    args = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager"]
    args += ["--num-gpu-blocks-override", "129", "--served-model-name", "loud"]
    args += ["--kv-host-gib", "0.01", "--kv-disk", str(root), "--kv-disk-gib", "0.1", "--kv-disk-name", name]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with EngineServer(model, serve_args=args, api_key="k3y", env=env) as running:
        yield running


def call(server: EngineServer, method: str, path: str, **kwargs: Any) -> httpx.Response:
    return httpx.request(
        method, server.url + path, headers=server.headers, timeout=60, trust_env=False, **kwargs
    )


def complete(server: EngineServer, program: str, prompt: list[int]) -> Turn:
    body = {
        "model": "loud",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": {"agentic_context": json.dumps({"program_id": program})},
    }
    response = call(server, "POST", "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    told = response.json()["choices"][0]["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in told["tokens"]]
    return Turn(tokens, told["token_logprobs"], 0)
