"""Nothing changes a token where steps are planned ahead of each other, as they are on CUDA.

On a real engine with vLLM's batch queue of two, in float32 at temperature 0, on the loud model: each next
token hangs on all tokens before it. Loads fail while a step that was planned before anybody knew is under
way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import LOUD_BLOCK_BYTES, one_thread, with_tiers
from multi_turn_programs import OUTPUT_TOKENS, PROGRAMS, generate
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend
from sojourn_server.policies.preset import preset_names

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
AMPLE_BYTES = 350 * LOUD_BLOCK_BYTES
"""Of host memory, for all contexts."""
SHORT_BYTES = 60 * LOUD_BLOCK_BYTES
"""For a sixth of them: the disk has the rest."""
FAILING = 0.4
"""Share of the loads that fail."""

SHORT = {"turns": 2, "output_tokens": OUTPUT_TOKENS // 2}
"""For each preset: an engine for each takes its time."""


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_thread(monkeypatch):
        yield


@pytest.fixture(scope="module")
def stock(loud_model: str) -> list[list[int]]:
    """What vLLM says that plans one step at a time."""
    return generate(loud_model, None, hints=False)[0]


@pytest.fixture(scope="module")
def stock_in_short(loud_model: str) -> list[list[int]]:
    return generate(loud_model, None, hints=False, **SHORT)[0]


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


@pytest.fixture
def failing_loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Some loads fail from now on."""
    draw, counts = random.Random(8), Counter[str]()
    original = CpuDeviceBackend.to_device

    def fails(device: Any, *args: Any, **kwargs: Any) -> Any:
        if draw.random() < FAILING:
            counts["failed"] += 1
            raise RuntimeError("failed on purpose")
        return original(device, *args, **kwargs)

    monkeypatch.setattr(CpuDeviceBackend, "to_device", fails)
    return counts


def tiers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return with_tiers(host_bytes=SHORT_BYTES, disk=str(folder), disk_bytes=1024 * MIB)


def test_stock_says_the_same(loud_model: str, stock: Any, steps_ahead: None, planned_ahead: Any) -> None:
    assert generate(loud_model, None, hints=False)[0] == stock
    assert len({tuple(tokens) for tokens in stock}) == PROGRAMS, "the programs must differ"
    assert planned_ahead["ahead"] > 100


@pytest.mark.parametrize(
    ("policy", "below"),
    [
        *((policy, "host and disk") for policy in preset_names()),
        # Without tiers no policy has a part in which steps differ: one of each kind.
        *((policy, "no tiers") for policy in ("continuum", "saga", "tetris")),
    ],
)
def test_every_preset_says_what_stock_says(
    loud_model: str,
    stock_in_short: Any,
    steps_ahead: None,
    planned_ahead: Any,
    policy: str,
    below: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = tiers(tmp_path, monkeypatch) if below != "no tiers" else {}
    tokens, report = generate(loud_model, {"policy": policy}, hints=True, **SHORT, **settings)
    assert tokens == stock_in_short
    assert planned_ahead["ahead"] > 50
    if settings:
        moves = report["stats"]["tiers"]["moves"]
        assert moves.get("saved", 0) + moves.get("stored", 0) > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("policy", ["mori", "continuum", "saga"])
def test_loads_that_fail_change_no_token(
    loud_model: str, stock: Any, failing_loads: Any, policy: str, ahead: bool
) -> None:
    settings = with_tiers(host_bytes=AMPLE_BYTES)
    if ahead:
        with asynchronous_scheduling():
            tokens, report = generate(loud_model, {"policy": policy}, hints=True, **settings)
    else:
        tokens, report = generate(loud_model, {"policy": policy}, hints=True, **settings)
    assert tokens == stock
    assert failing_loads["failed"] > 0
    ledger, moves = report["stats"]["ledger"], report["stats"]["tiers"]["moves"]
    assert moves["loaded"] > 0
    assert moves["discarded"] > 0
    # Each loaded block counts once, for the request that it arrived for; an aborted one there is none.
    assert 0 < ledger["host_tokens"] <= moves["loaded"] * 32
