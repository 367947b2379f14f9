"""Nothing changes a token: stock = extension without hints = each policy = blocks from tiers below, in steps
one after the other and in steps planned ahead of each other, as on CUDA.

In float32 at temperature 0, since in bfloat16 a prefix hit alone already changes late digits. The engines
differ in nothing but the scheduler and what lies below the device. The model is random, small and *loud*:
each next token hangs on all tokens before it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import BLOCK_TOKENS, LOUD_BLOCK_BYTES, with_tiers, with_vllm_tier
from multi_turn_programs import OUTPUT_TOKENS, PROGRAMS, generate
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
AMPLE_BLOCKS, SHORT_BLOCKS = 350, 48
"""Of host memory: for all contexts, and for a few."""
HOST_BYTES = 120 * LOUD_BLOCK_BYTES
"""For a third of the contexts, so that host memory evicts too, to the disk where there is one."""
SHORT = {"turns": 2, "output_tokens": OUTPUT_TOKENS // 2}
"""The load of the engines that are compared policy by policy."""
FAILING = 0.3
"""Share of the loads that fail."""
POLICIES = ("observe", "continuum", "saga", "mori", "tetris", "sojourn")
TIERS = ("our host memory", "our host memory and disk", "vLLM's host memory")
CASES = [("observe", "nothing", True), *itertools.product(POLICIES, TIERS, (False, True))]
EVERY_RUN = {
    CASES[0],
    ("observe", "our host memory", False),
    ("continuum", "our host memory and disk", True),
    ("saga", "our host memory", True),
    ("mori", "our host memory and disk", True),
    ("mori", "vLLM's host memory", True),
    ("tetris", "vLLM's host memory", False),
    ("tetris", "our host memory and disk", True),
    ("sojourn", "our host memory and disk", False),
    ("sojourn", "our host memory", True),
}


@pytest.fixture(autouse=True)
def equal_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(scope="module")
def stock(loud_model: str) -> list[list[int]]:
    return generate(loud_model, None, hints=False)[0]


@pytest.fixture(scope="module")
def stock_in_short(loud_model: str) -> list[list[int]]:
    return generate(loud_model, None, hints=False, **SHORT)[0]


def disk(folder: Path, host_bytes: int) -> dict[str, Any]:
    return with_tiers(host_bytes=host_bytes, disk=str(folder), disk_bytes=1024 * MIB)


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
    [case if case in EVERY_RUN else pytest.param(*case, marks=pytest.mark.nightly) for case in CASES],
    ids=str,
)
def test_every_policy_says_what_stock_says_while_loads_fail(
    loud_model: str,
    stock_in_short: list[list[int]],
    planned_ahead: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: str,
    below: str,
    ahead: bool,
) -> None:
    """In every run each policy meets steps of both kinds, and so does each tier."""
    from sojourn_server.vllm.cpu_offload_worker import CpuOffloadWorker

    draw, loads = random.Random(8), Counter[str]()

    def maybe_fail() -> None:
        fails = draw.random() < FAILING
        loads["failed" if fails else "done"] += 1
        if fails:
            raise OSError("failed on purpose")

    ours, theirs = CpuDeviceBackend.to_device, CpuOffloadWorker.copy

    def to_device(device: Any, *args: Any, **more: Any) -> Any:
        maybe_fail()
        return ours(device, *args, **more)

    def copy(worker: Any, device: Any, chunks: Any, *, is_load: bool) -> int:
        if is_load:
            maybe_fail()
        return theirs(worker, device, chunks, is_load=is_load)

    monkeypatch.setattr(CpuDeviceBackend, "to_device", to_device)
    monkeypatch.setattr(CpuOffloadWorker, "copy", copy)
    settings = {
        "nothing": {},
        "our host memory": with_tiers(host_bytes=HOST_BYTES),
        "our host memory and disk": disk(tmp_path, HOST_BYTES),
        "vLLM's host memory": with_vllm_tier(HOST_BYTES),
    }[below]
    with asynchronous_scheduling() if ahead else nullcontext():
        tokens, report = generate(loud_model, {"policy": policy}, hints=True, **SHORT, **settings)
    assert tokens == stock_in_short
    assert (planned_ahead["ahead"] > 50) is ahead
    if settings:
        assert loads["failed"] > 0
        assert loads["done"] > 0
        stats = report["stats"]
        assert stats["tiers"]["moves"]["discarded"] > 0
        # Each loaded block counts once, for the request that it arrived for; an aborted one there is none.
        if below.startswith("our"):
            assert stats["host_tokens"] <= stats["tiers"]["moves"]["loaded"] * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("policy", "blocks", "ahead"), [("observe", AMPLE_BLOCKS, False), ("sojourn", SHORT_BLOCKS, True)]
)
def test_the_ledger_knows_what_was_in_vllms_host_memory(
    loud_model: str, stock: list[list[int]], policy: str, blocks: int, ahead: bool
) -> None:
    settings = with_vllm_tier(blocks * LOUD_BLOCK_BYTES)
    with asynchronous_scheduling() if ahead else nullcontext():
        tokens, report = generate(loud_model, {"policy": policy}, hints=True, **settings)
    assert tokens == stock
    ledger = report["stats"]
    assert ledger["host_tokens"] > 500
    assert ledger["host_tokens"] == sum(row["tokens"]["host"] for row in report["ledger"])
    assert sum(ledger["tiers"]["host"].values()) == blocks
    assert ledger["device_tokens"] + ledger["host_tokens"] + sum(ledger["lost_tokens"].values()) == 4352
    assert (ledger["lost_tokens"] == {}) is (blocks == AMPLE_BLOCKS)


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
    tiers = with_tiers(host_bytes=HOST_BYTES) if policy == "sojourn" else {}
    tokens, report = generate(loud_model, {"policy": policy}, hints=hints, **SHORT, **tiers)
    assert tokens == stock_in_short
    assert policy == "sojourn" or any(decision["kind"] == "keep" for decision in report["decisions"])


def test_what_was_in_host_memory_gives_the_tokens_of_stock(loud_model: str, stock: list[list[int]]) -> None:
    """Programs are moved below by order and ahead of need, and saved as the device loses them."""
    tokens, report = generate(
        loud_model, {"policy": "mori"}, hints=True, **with_tiers(host_bytes=AMPLE_BLOCKS * LOUD_BLOCK_BYTES)
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
    settings = disk(tmp_path, 20 * LOUD_BLOCK_BYTES)
    expected = [tokens[: 2 * OUTPUT_TOKENS] for tokens in stock]
    for engine in ("first", "later"):
        tokens, report = generate(loud_model, {"policy": "continuum"}, hints=True, turns=2, **settings)
        assert tokens == expected
        from_below = [row["tokens"]["host"] for row in report["ledger"] if row["turn"] == 1]
        assert len(from_below) == PROGRAMS
        assert any(from_below) == (engine == "later"), "only a disk can have what no turn has computed yet"
    assert list(tmp_path.glob("*/*/*.kv"))


@pytest.mark.nightly
def test_a_real_model_says_what_it_says_on_stock(tiny_model: str) -> None:
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
