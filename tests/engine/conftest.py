"""Real engines on small models, in this process; a module's engines are closed at its end."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tools import VOCABULARY, import_engine, open_engines, rest_after_empty_steps, save_tokenizer
from gc_tools import imports, old_objects_passed_over, pass_over_more

HERE = Path(__file__).parent

LLM_DEFAULTS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "seed": 0,
    "disable_log_stats": True,
}
KV_BLOCKS = 256
"""Default number of KV blocks of an engine. The minimum for 2,048 tokens is 64 blocks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn only sojourn's own warnings into errors, because vLLM and torch warn about themselves."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:::sojourn"))


@pytest.fixture(scope="session", autouse=True)
def engine_environment() -> Iterator[None]:
    """Run the engine core in this process, so that a test can reach its scheduler."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def tiny_model(engine_environment: None) -> Iterator[str]:
    """Directory of the tiny model. From now on, garbage collections do not scan the engine's imports."""
    with imports():
        pytest.importorskip("vllm")
    import_engine()
    from sojourn_server.models import resolve_model

    with old_objects_passed_over():
        yield resolve_model("tiny", progress=False)


@pytest.fixture(scope="session")
def loud_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model with the shape of ``tiny``, whose weights are so large that each token depends on
    all previous ones. (``tiny`` itself repeats one word, whatever is in its cache.)"""
    import torch
    import transformers

    target = tmp_path_factory.mktemp("loud")
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False  # tied embeddings make it repeat the last token
    config.initializer_range = 0.15
    config.vocab_size = VOCABULARY
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(target)
    save_tokenizer(tiny_model, target)
    return str(target)


@pytest.fixture(scope="module")
def make_llm(tiny_model: str) -> Iterator[Callable[..., Any]]:
    """``make_llm(policy, *, sojourn=None, num_blocks=KV_BLOCKS, **engine_args) -> LLM``.

    ``policy`` ``None`` or ``"stock"`` is vLLM's own scheduler. The LLMs of a module live until its end. Two
    calls with the same settings return the same LLM.
    """
    from vllm import LLM

    made: dict[str, Any] = {}

    def make(
        policy: str | None = None,
        *,
        sojourn: dict[str, Any] | None = None,
        num_blocks: int = KV_BLOCKS,
        **engine_args: Any,
    ) -> LLM:
        settings = {**LLM_DEFAULTS, "num_gpu_blocks_override": num_blocks, **engine_args}
        if policy not in (None, "stock"):
            settings["scheduler_cls"] = "sojourn_server.vllm.scheduler.make_scheduler"
            settings["additional_config"] = {
                **settings.get("additional_config", {}),
                "sojourn": {"policy": policy, **(sojourn or {})},
            }
        key = repr(sorted(settings.items()))
        if key not in made:
            if not open_engines:
                pass_over_more()
            made[key] = LLM(model=tiny_model, **settings)
            rest_after_empty_steps(made[key])
            open_engines.add(id(made[key]))
        return made[key]

    yield make
    for llm in made.values():
        open_engines.remove(id(llm))
        llm.llm_engine.engine_core.shutdown()
    made.clear()
    gc.collect()
