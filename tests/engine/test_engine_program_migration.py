"""A program moves to another engine: its KV goes by the disk that both share, and no token changes.

On real engines in float32 at temperature 0, with a model so *loud* that each next token hangs on all tokens
before it: KV that was another's would show. A test spoils it, and sees it. Servers that are asked over HTTP
are in ``test_engine_gateway.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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
from migrating_programs import OUTPUT_TOKENS, PATIENCE_S, PROGRAMS, Turn, contexts_after_two_turns, third
from sojourn_server.kv_offload.cpu_device_backend import CpuCopy, CpuDeviceBackend

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20


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

    A process has one connector beside a model, so ``a`` has ended when another begins.
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
    monkeypatch.setattr(CpuDeviceBackend, "to_device", lambda *args: CpuCopy(0.0))
    with engine(loud_model, root, "spoilt") as b:
        for program, context in contexts.items():
            turn = say(b, program, third(program, context))
            assert turn.cached_tokens > 0
            assert turn.tokens != stayed[program].tokens
