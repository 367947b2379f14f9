"""Helpers to start, query and inspect engines in this process, for the tests of this directory."""

from __future__ import annotations

import gc
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from gc_tools import imports, old_objects_passed_over, pass_over_more
from sojourn_server.launch.kv_options import KvOffloadOptions, offload_transfer_config

BLOCK_TOKENS = 32
VOCABULARY = 4096
"""Vocabulary size of the models that are made for these tests."""
LOUD_BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 32 * 4
"""Bytes of a block of the loud model in float32: keys and values of two layers with one head of 32
numbers."""
MOST_OFF = 1e-4
"""Maximum difference of a logprob. In float32 it changes in the sixth decimal with the order of additions,
which depends on the other requests of the batch. The limit is twenty times the largest measured
difference."""

SMALL_SERVER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment of a server whose engine core has its worker in its own process, so that it starts in two
thirds of the time. Tests of pairs, of servers' tiers and of hidden states use the default, a separate worker
process."""

ON_RAY = {
    # Engines, gateways and Ray share a few cores, so none should wait for the others in a busy loop.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    **SMALL_SERVER,
    # Models are cached in the user's home, but the gateway's own home is a new folder.
    "HOME": str(Path.home()),
}
"""Environment of servers that a gateway starts on Ray."""

SPOIL = "SOJOURN_TEST_SPOIL"
"""Environment variable with the path of a file. While the file exists, the first received block of a layer is
zeroed."""
FAIL = "SOJOURN_TEST_FAIL"
"""Environment variable with the path of a file. While the file exists, only the first half of received blocks
is filled."""

EMPTY_STEP_S = 0.005
"""Seconds between steps of an engine in this process whose requests all wait for a clock or a copy."""

NEEDS_SHARED_MEMORY = pytest.mark.skipif(
    Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").free < 512 << 20,
    reason="vLLM's several workers need 512 MiB of /dev/shm: docker run --shm-size=1g",
)

open_engines: set[int] = set()
"""Ids of this process's open engines. Garbage collections must scan them, to free their memory."""


@contextmanager
def float32_engine(model: str, **settings: Any) -> Iterator[Any]:
    """Yield an LLM in which equal contexts give equal tokens, and close it afterwards. ``settings`` are
    vLLM's."""
    from vllm import LLM

    if not open_engines:
        pass_over_more()  # exclude the imports of earlier engines
    usual = {"dtype": "float32", "block_size": BLOCK_TOKENS, "enforce_eager": True, "seed": 0}
    llm = LLM(model=model, **{**usual, **settings})
    rest_after_empty_steps(llm)
    open_engines.add(id(llm))
    try:
        yield llm
    finally:
        open_engines.remove(id(llm))
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def rest_after_empty_steps(llm: Any) -> None:
    """Have an in-process LLM rest after a step that computed nothing, as the loop of an engine process does.
    Without that, an engine whose requests wait for a clock or a copy keeps a core busy for nothing."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return  # it has a process, and that loop
    step = core.step_fn

    def step_and_rest() -> Any:
        outputs, model_executed = step()
        if not model_executed and core.scheduler.has_requests():
            time.sleep(EMPTY_STEP_S)
        return outputs, model_executed

    core.step_fn = step_and_rest


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


def with_vllm_tier(host_bytes: int) -> dict[str, Any]:
    """The same with vLLM's own offloading, as ``sojourn serve --tier-backend vllm`` sets it up."""
    from vllm.config import KVTransferConfig

    options = KvOffloadOptions(host_gib=str(host_bytes / (1 << 30)), backend="vllm")
    config = offload_transfer_config(options, cpu_build=True, stock=False)
    return {"kv_transfer_config": KVTransferConfig(**config)}


def save_tokenizer(model: str, target: str | Path) -> Any:
    """Write a tokenizer with the first ``VOCABULARY`` tokens of a model's tokenizer, and return it. The
    model's own has twelve times as many tokens, which take an engine seconds to load and copy."""
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


def save_random_model(make: Callable[[], Any], target: str | Path, tokenizer: str) -> str:
    """Write the model that ``make`` returns, in float32 and with the same random weights each time, and a
    tokenizer. Returns ``target``."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        make().to(torch.float32).save_pretrained(target)
    save_tokenizer(tokenizer, target)
    return str(target)


@contextmanager
def new_processes() -> Iterator[Callable[..., Any]]:
    """Yield ``run(call, *arguments, **more)``, which runs ``call`` in a process without engines and returns
    its result.

    Each process is forked from one that has only imported vLLM, because the import takes ten seconds.
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
    # Otherwise each engine would search all modules, and wrap again what an earlier engine has wrapped.
    cpu.register_triton_kernel_overrides = staticmethod(cache(cpu.register_triton_kernel_overrides))


def _in_a_fork(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_with_new_garbage_only, call, *args, **more).result()


def _with_new_garbage_only(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Run ``call``. A closing engine collects garbage four times; here this scans only objects that the call
    made."""
    with old_objects_passed_over():
        return call(*args, **more)


def said(answer: Any) -> tuple[list[int], list[float]]:
    """Tokens of an output that was asked for with ``logprobs=0``, and the logprob of each."""
    tokens = list(answer.token_ids)
    return tokens, [by[token].logprob for by, token in zip(answer.logprobs, tokens, strict=True)]


def most_off(here: Sequence[float], there: Sequence[float]) -> float:
    """Largest difference between two equally long sequences of logprobs."""
    return max(abs(one - other) for one, other in zip(here, there, strict=True))


def scheduler_of(llm: Any) -> Any:
    """The scheduler object inside an in-process LLM."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def count_preemptions(llm: Any) -> Iterator[list[str]]:
    """Yield a list that collects the ids of requests preempted inside the ``with`` block."""
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
