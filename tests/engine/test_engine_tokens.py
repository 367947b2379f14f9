"""Nothing changes a token: stock = extension without hints = each policy = blocks from tiers below, in steps
one after the other and in steps planned ahead of each other, as on CUDA.

In float32 at temperature 0, since in bfloat16 a prefix hit alone already changes late digits. The engines
differ in nothing but the scheduler and what lies below the device. The model is random, small and *loud*:
each next token hangs on all tokens before it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import LOUD_BLOCK_BYTES, one_thread, with_tiers
from multi_turn_programs import OUTPUT_TOKENS, PROGRAMS, generate
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
AMPLE_BYTES = 350 * LOUD_BLOCK_BYTES
"""Of host memory, for all contexts."""
SHORT_BYTES = 60 * LOUD_BLOCK_BYTES
"""For a sixth of them: the disk has the rest."""
SHORT = {"turns": 2, "output_tokens": OUTPUT_TOKENS // 2}
"""The load of the engines that are compared policy by policy."""
FAILING = 0.4
"""Share of the loads that fail."""


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with one_thread(monkeypatch):
        yield


@pytest.fixture(scope="module")
def stock(loud_model: str) -> list[list[int]]:
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


def disk(folder: Path) -> dict[str, Any]:
    return with_tiers(host_bytes=SHORT_BYTES, disk=str(folder), disk_bytes=1024 * MIB)


def test_no_hints_and_leases_under_pressure_give_the_tokens_of_stock(
    loud_model: str, stock: list[list[int]]
) -> None:
    silent, _ = generate(loud_model, {"policy": "continuum"}, hints=False)
    leased, report = generate(loud_model, {"policy": "continuum"}, hints=True)
    assert sum(len(tokens) for tokens in stock) >= 1000
    assert len({tuple(tokens) for tokens in stock}) == PROGRAMS, "the programs must differ"
    assert all(len(set(tokens)) > len(tokens) / 2 for tokens in stock), "nor may one repeat itself"
    assert silent == stock
    assert leased == stock
    kinds = [(d["kind"], d["reason"]) for d in report["decisions"]]
    assert ("keep", "hinted") in kinds
    assert ("release", "pressure") in kinds, "the leases must have been under pressure"
    assert report["stats"]["device_tokens"] > 0


@pytest.mark.parametrize(
    ("policy", "below", "ahead"),
    [
        ("continuum", "disk", True),
        ("saga", "host", True),
        ("mori", "disk", True),
        ("tetris", "host", False),
        ("tetris", "disk", True),
        ("sojourn", "disk", False),
        ("sojourn", "host", True),
        ("observe", "host", False),
        ("observe", "nothing", True),
    ],
)
def test_every_policy_says_what_stock_says(
    loud_model: str,
    stock_in_short: list[list[int]],
    planned_ahead: Counter[str],
    tmp_path: Path,
    policy: str,
    below: str,
    ahead: bool,
) -> None:
    """Each policy meets steps of both kinds and, with the tests beside this one, host memory, a disk and
    neither meet steps of both kinds."""
    settings = {"host": with_tiers(host_bytes=AMPLE_BYTES), "disk": disk(tmp_path), "nothing": {}}[below]
    with asynchronous_scheduling() if ahead else nullcontext():
        tokens, report = generate(loud_model, {"policy": policy}, hints=True, **SHORT, **settings)
    assert tokens == stock_in_short
    assert (planned_ahead["ahead"] > 50) is ahead
    if settings:
        moves = report["stats"]["tiers"]["moves"]
        assert moves.get("saved", 0) + moves.get("stored", 0) > 0


def hostile_hint(program: int, turn: int) -> str:
    """False, malformed and contradictory contexts, another one each turn; some turns have no program."""
    theft = {"program_id": f"P{(program + turn) % PROGRAMS}", "sojourn": {"v": 1, "final": True}}
    lies = {"expected_output_length": 1, "expected_resume": False, "priority": 2**31}
    greed = {"kv_retention_ttl_seconds": 1e308, "sojourn": {"v": 1, "expected_steps_left": 1e308}}
    end = {"type": "program_end", "program_id": f"P{program}", "seq": turn}
    riding = {"sojourn": {"v": 1, "emitter": "e", "events": [end, {"type": "nonsense"}, 7]}}
    name = {"program_id": f"P{program}"}
    contexts = [theft, {**name, **lies}, {**name, **greed}, {**name, **riding}, {"program_id": "x" * 10_000}]
    texts = [*map(json.dumps, contexts), "{", "\0\ud800", "x" * (1 << 20)]
    return texts[(program + turn) % len(texts)]


def every_hint(program: int, turn: int) -> str:
    """All that a client can say: the truth from every other program, half of each number from the others."""
    factor = 1.0 if program % 2 else 0.5
    ends = (turn + 1 == SHORT["turns"]) is (factor == 1.0)
    ours = {"v": 1, "agent_type": "talker", "node": "talk", "final": ends, "tenant": f"t{program % 2}"}
    numbers = {"deadline_seconds": 30.0, "kv_retention_ttl_seconds": 2.0}
    context = {
        "program_id": f"P{program}",
        "priority": round(program % 3 * factor),
        "expected_resume": not ends,
        "expected_output_length": round(SHORT["output_tokens"] * factor),
        **{name: value * factor for name, value in numbers.items()},
        "sojourn": {**ours, "expected_steps_left": (SHORT["turns"] - turn - 1) * factor},
    }
    return json.dumps(context)


@pytest.mark.parametrize(
    ("policy", "hints"), [("sojourn", every_hint), ("sojourn", hostile_hint), ("continuum", hostile_hint)]
)
def test_no_hint_changes_a_token(
    loud_model: str, stock_in_short: list[list[int]], policy: str, hints: Any
) -> None:
    tiers = with_tiers(host_bytes=SHORT_BYTES) if policy == "sojourn" else {}
    tokens, report = generate(loud_model, {"policy": policy}, hints=hints, **SHORT, **tiers)
    assert tokens == stock_in_short
    assert policy == "sojourn" or any(decision["kind"] == "keep" for decision in report["decisions"])


def test_what_was_in_host_memory_gives_the_tokens_of_stock(loud_model: str, stock: list[list[int]]) -> None:
    """Programs are moved below by order and ahead of need, and saved as the device loses them."""
    tokens, report = generate(
        loud_model, {"policy": "mori"}, hints=True, **with_tiers(host_bytes=AMPLE_BYTES)
    )
    assert tokens == stock
    assert report["stats"]["host_tokens"] > 1000
    assert report["stats"]["lost_tokens"] == {}
    assert report["stats"]["tiers"]["moves"]["stored"] > 0
    kinds = {decision["kind"] for decision in report["decisions"]}
    assert {"to_device", "to_host"} <= kinds


def test_what_was_on_disk_gives_the_tokens_of_stock_also_to_a_later_engine(
    loud_model: str, stock: list[list[int]], tmp_path: Path
) -> None:
    settings = with_tiers(host_bytes=20 * LOUD_BLOCK_BYTES, disk=str(tmp_path), disk_bytes=1024 * MIB)
    expected = [tokens[: 2 * OUTPUT_TOKENS] for tokens in stock]
    for engine in ("first", "later"):
        tokens, report = generate(loud_model, {"policy": "continuum"}, hints=True, turns=2, **settings)
        assert tokens == expected
        from_below = [row["tokens"]["host"] for row in report["ledger"] if row["turn"] == 1]
        assert len(from_below) == PROGRAMS
        assert any(from_below) == (engine == "later"), "only a disk can have what no turn has computed yet"
    assert list(tmp_path.glob("*/*/*.kv"))


def test_loads_that_fail_change_no_token(
    loud_model: str, stock: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail while a step that was planned before anybody knew is under way."""
    draw, counts = random.Random(8), Counter[str]()
    original = CpuDeviceBackend.to_device

    def fails(device: Any, *args: Any, **kwargs: Any) -> Any:
        if draw.random() < FAILING:
            counts["failed"] += 1
            raise RuntimeError("failed on purpose")
        return original(device, *args, **kwargs)

    monkeypatch.setattr(CpuDeviceBackend, "to_device", fails)
    with asynchronous_scheduling():
        tokens, report = generate(
            loud_model, {"policy": "mori"}, hints=True, **with_tiers(host_bytes=AMPLE_BYTES)
        )
    assert tokens == stock
    assert counts["failed"] > 0
    ledger, moves = report["stats"], report["stats"]["tiers"]["moves"]
    assert moves["loaded"] > 0
    assert moves["discarded"] > 0
    # Each loaded block counts once, for the request that it arrived for; an aborted one there is none.
    assert 0 < ledger["host_tokens"] <= moves["loaded"] * 32


@pytest.mark.nightly
def test_a_real_model_says_what_it_says_on_stock(engine_environment: None) -> None:
    """Of thirty layers and some hundred times the work. Moved below and up again, under leases: the device
    has room for half of what is kept."""
    from sojourn_server.models import resolve_model

    smol_model = resolve_model("smol", progress=False)
    # Half the usual outputs, for a step takes a tenth of a second: KV that is wrong shows in a turn's first.
    real = {"programs": 5, "turns": 2, "words": 40_000, "output_tokens": OUTPUT_TOKENS // 2}
    stock, _ = generate(smol_model, None, hints=False, **real)
    host = with_tiers(host_bytes=512 * MIB)
    tokens, report = generate(smol_model, {"policy": "mori"}, hints=True, **real, **host)
    assert len({tuple(each) for each in stock}) == real["programs"], "the programs must differ"
    assert tokens == stock
    assert report["stats"]["host_tokens"] > 0
    assert report["stats"]["lost_tokens"] == {}
    assert report["stats"]["tiers"]["moves"]["stored"] > 0
