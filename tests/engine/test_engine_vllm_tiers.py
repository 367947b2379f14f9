"""With host memory by vLLM's own offloading (``--tier-backend vllm``), an engine says what stock says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import LOUD_BLOCK_BYTES, one_thread
from multi_turn_programs import gaps_to_the_best, generate
from sojourn_server.launch.kv_options import KvOffloadOptions, offload_transfer_config
from test_engine_models import GROUP_BLOCKS, HOST_BYTES, MOST_OFF_BFLOAT16, in_a_process, make_model

__all__ = ["in_a_process", "make_model"]  # fixtures
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

AMPLE_BLOCKS, SHORT_BLOCKS = 350, 48
"""Of host memory: for all contexts of the loud model, and for a few."""
FAILING = 0.3
"""Share of the copies that fail."""


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_thread(monkeypatch):
        yield


def host_memory(size: int) -> dict[str, Any]:
    """Settings of an engine with host memory as ``sojourn serve`` sets it up."""
    from vllm.config import KVTransferConfig

    options = KvOffloadOptions(host_gib=str(size / (1 << 30)), backend="vllm")
    return {
        "kv_transfer_config": KVTransferConfig(
            **offload_transfer_config(options, cpu_build=True, stock=False)
        )
    }


@pytest.fixture(scope="module")
def stock(loud_model: str) -> list[list[int]]:
    return generate(loud_model, None, hints=False)[0]


@pytest.mark.parametrize(
    ("policy", "blocks", "ahead", "failing"),
    [
        ("observe", AMPLE_BLOCKS, False, 0.0),
        ("sojourn", SHORT_BLOCKS, True, 0.0),
        ("mori", AMPLE_BLOCKS, True, FAILING),
    ],
)
def test_every_token_is_stocks_and_the_ledger_knows_where_kv_was(
    loud_model: str,
    stock: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    blocks: int,
    ahead: bool,
    failing: float,
) -> None:
    from sojourn_server.vllm.cpu_offload_worker import CpuOffloadWorker

    draw, copied, failed = random.Random(8), Counter[bool](), Counter[bool]()
    copy = CpuOffloadWorker.copy

    def maybe(worker: Any, device: Any, chunks: Any, *, is_load: bool) -> int:
        if draw.random() < failing:
            failed[is_load] += 1
            raise OSError("failed on purpose")
        copied[is_load] += 1
        return copy(worker, device, chunks, is_load=is_load)

    monkeypatch.setattr(CpuOffloadWorker, "copy", maybe)
    with asynchronous_scheduling() if ahead else nullcontext():
        tokens, report = generate(
            loud_model, {"policy": policy}, hints=True, **host_memory(blocks * LOUD_BLOCK_BYTES)
        )
    assert tokens == stock
    ledger, tiers = report["stats"], report["stats"]["tiers"]
    assert copied[True] > 0
    assert ledger["host_tokens"] > (0 if failing else 500)
    assert ledger["host_tokens"] == sum(row["tokens"]["host"] for row in report["ledger"])
    assert sum(tiers["host"].values()) == blocks
    if failing:
        assert failed[True] > 0
        assert tiers["moves"]["discarded"] > 0
    else:
        assert ledger["device_tokens"] + ledger["host_tokens"] + sum(ledger["lost_tokens"].values()) == 4352
        assert (ledger["lost_tokens"] == {}) is (blocks == AMPLE_BLOCKS)


def test_windows_beside_full_attention_say_what_they_say_on_stock(make_model: Callable[[str], str]) -> None:
    model = make_model("sliding windows and full attention")
    tokens, _ = generate(model, None, hints=False, blocks=GROUP_BLOCKS)
    with asynchronous_scheduling():
        found, report = generate(
            model, {"policy": "sojourn"}, hints=True, blocks=GROUP_BLOCKS, **host_memory(HOST_BYTES)
        )
    assert found == tokens
    assert report["stats"]["host_tokens"] > 1000
    assert report["stats"]["lost_tokens"] == {}


def test_a_model_with_states_continues_from_the_right_state(
    make_model: Callable[[str], str], in_a_process: Callable[..., Any]
) -> None:
    """Our own tiers refuse it. Judged as in ``test_engine_models.py``, in bfloat16."""
    model = make_model("states and full attention")
    tokens, report = in_a_process(
        generate, model, {"policy": "observe"}, hints=True, blocks=36, dtype="bfloat16",
        **host_memory(4 * HOST_BYTES),
    )  # fmt: skip
    gaps = in_a_process(gaps_to_the_best, model, tokens, dtype="bfloat16")
    assert sum(gap > MOST_OFF_BFLOAT16 for gap in gaps) / len(gaps) < 0.02
    assert report["stats"]["host_tokens"] > 1000
