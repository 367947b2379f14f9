"""Small models for real engines, and the environment of engines in this process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tools import VOCABULARY, import_engine, save_random_model
from gc_tools import imports, old_objects_passed_over

HERE = Path(__file__).parent


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
    """Directory of the tiny model. From now on, garbage collections do not scan the engine's imports, and
    engines in this process use one thread: steps of a small model are so short that threads would mostly wait
    for each other."""
    with imports():
        pytest.importorskip("vllm")
    import_engine()
    import torch
    from sojourn_server.models import resolve_model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with old_objects_passed_over(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield resolve_model("tiny", progress=False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def loud_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model with the shape of ``tiny``, whose weights are so large that each token depends on
    all previous ones. (``tiny`` itself repeats one word, whatever is in its cache.)"""
    import transformers

    target = tmp_path_factory.mktemp("loud")
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False  # tied embeddings make it repeat the last token
    config.initializer_range = 0.15
    config.vocab_size = VOCABULARY
    return save_random_model(lambda: transformers.LlamaForCausalLM(config), target, tiny_model)


@pytest.fixture
def planned_ahead(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts steps that were planned while another's results were unknown."""
    from vllm.v1.engine.core import EngineCore

    counts: Counter[str] = Counter()
    original = EngineCore.step_with_batch_queue

    def counted(core: Any) -> Any:
        assert core.batch_queue_size == 2
        counts["ahead"] += bool(core.batch_queue)
        return original(core)

    monkeypatch.setattr(EngineCore, "step_with_batch_queue", counted)
    return counts
