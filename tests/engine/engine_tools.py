"""Engines in this process: begun, asked and looked into; imported by the tests of this directory."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from forked_processes.sitecustomize import inspect_models_here, spin_for_a_moment_only
from gc_tools import imports, old_objects_passed_over, pass_over_more

BLOCK_TOKENS = 32
VOCABULARY = 4096
"""Of the models that are made for these tests."""
LOUD_BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 32 * 4
"""Of a block of the loud model in float32: keys and values, of two layers with one head of 32 numbers."""
MOST_OFF = 1e-4
"""Of a logprob: in float32 the order of additions, which hangs on who else is in the batch, shows in the
sixth decimal. Twenty times what was seen."""

SMALL_SERVER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment of a server whose engine core has its worker in its own process: it starts in two thirds of the
time. The pairs, the tiers below servers and the hidden states are tested with a worker apart, the default."""

ON_RAY = {
    # Engines, gateways and Ray on a few cores: none should wait for the others in a loop.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    **SMALL_SERVER,
    # The models are kept there; the gateway's own home is a new one.
    "HOME": os.environ.get("HOME", ""),
}
"""Environment of servers that a gateway starts on Ray."""

open_engines: set[int] = set()
"""Of this process: they must stay in sight of the collections, which free their memory."""


@contextmanager
def float32_engine(model: str, **settings: Any) -> Iterator[Any]:
    """An LLM in which equal contexts give equal tokens, closed afterwards. ``settings`` are vLLM's."""
    from vllm import LLM

    if not open_engines:
        pass_over_more()  # what engines before have imported
    usual = {"dtype": "float32", "block_size": BLOCK_TOKENS, "enforce_eager": True, "seed": 0}
    llm = LLM(model=model, **{**usual, **settings})
    open_engines.add(id(llm))
    try:
        yield llm
    finally:
        open_engines.remove(id(llm))
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def with_tiers(**extra: Any) -> dict[str, Any]:
    """Settings of an engine with host memory below its device, and a disk if ``extra`` names one."""
    from vllm.config import KVTransferConfig

    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="SojournConnector",
            kv_connector_module_path="sojourn_server.vllm.kv_offload_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
    }


def save_tokenizer(model: str, target: str | Path) -> Any:
    """Write the first ``VOCABULARY`` tokens of a model's tokenizer, and return that. The model's has twelve
    times as many, which take an engine seconds to load and copy."""
    import transformers

    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(target)
    file = Path(target) / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    parts = document["model"]
    parts["vocab"] = {token: number for token, number in parts["vocab"].items() if number < VOCABULARY}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in parts["merges"])
    parts["merges"] = [pair for pair in pairs if "".join(pair) in parts["vocab"]]
    file.write_text(json.dumps(document), encoding="utf-8")
    return transformers.AutoTokenizer.from_pretrained(target)


@contextmanager
def one_thread(patch: Any) -> Iterator[None]:
    """Steps of so small a model are so short that threads would mostly wait for each other. ``patch`` is
    pytest's ``MonkeyPatch``, which its owner takes back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def new_processes() -> Iterator[Callable[..., Any]]:
    """``run(call, *arguments, **more)``: what ``call`` returns in a process that has made no engine before.

    Each is forked from one that has imported vLLM, which takes ten seconds, and does nothing else.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as parent:
        parent.submit(import_engine).result()
        yield lambda *call, **more: parent.submit(_in_a_fork, *call, **more).result()


@cache
def import_engine() -> None:
    """Import what an engine in this process needs, for many engines one after the other."""
    with imports():
        import_module("vllm.entrypoints.llm")
        import_module("vllm.v1.worker.cpu_worker")
        cpu = import_module("vllm.platforms.cpu").CpuPlatform
    # Each engine would look through all modules, and wrap what the one before has wrapped.
    cpu.register_triton_kernel_overrides = staticmethod(cache(cpu.register_triton_kernel_overrides))
    inspect_models_here()
    spin_for_a_moment_only()


def _in_a_fork(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_with_new_garbage_only, call, *args, **more).result()


def _with_new_garbage_only(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call it. When an engine closes, it collects garbage four times: only what the call has made."""
    with old_objects_passed_over():
        return call(*args, **more)


def said(answer: Any) -> tuple[list[int], list[float]]:
    """Tokens of an output that was asked for with ``logprobs=0``, and the logprob of each."""
    tokens = list(answer.token_ids)
    return tokens, [by[token].logprob for by, token in zip(answer.logprobs, tokens, strict=True)]


def most_off(here: Sequence[float], there: Sequence[float]) -> float:
    """How far the logprobs of as many tokens lie apart at most."""
    return max(abs(one - other) for one, other in zip(here, there, strict=True))


def scheduler_of(llm: Any) -> Any:
    """The scheduler object inside an in-process LLM."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def count_preemptions(llm: Any) -> Iterator[list[str]]:
    """Collects the ids of the requests preempted meanwhile."""
    scheduler = scheduler_of(llm)
    original = scheduler._preempt_request
    preempted: list[str] = []

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = watched
    try:
        yield preempted
    finally:
        del scheduler._preempt_request
