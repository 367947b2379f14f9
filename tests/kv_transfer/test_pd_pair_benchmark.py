"""The benchmarks of real pairs, without engines: who is sent where, what samples say, what a page has."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.routing.routing_events import PairRole

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def prefill_decode_pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("prefill_decode_pair")


def engine(name: str, role: PairRole) -> Any:
    return SimpleNamespace(name=name, role=role, peer=f"unix:/nowhere/{name}")


FOUR = [
    engine("p0", PairRole.PREFILL), engine("d0", PairRole.DECODE),
    engine("p1", PairRole.PREFILL), engine("d1", PairRole.DECODE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arm", "case", "share"),
    [
        ("prefill side", "burst", 0.0),
        ("decode side", "burst", 1.0),
        ("shorter queue", "burst", 0.5),
    ],
)
def test_each_arm_has_its_own_readers(
    prefill_decode_pair: Any, monkeypatch: pytest.MonkeyPatch, arm: str, case: str, share: float
) -> None:
    options = prefill_decode_pair.read_options(["--requests", "8"])
    router_module = import_module("prefill_decode_router")
    sent: list[tuple[str, str, float]] = []

    async def through(
        http: Any, prefill: Any, decode: Any, body: Any, name: str, of: float, *told: Any
    ) -> Any:
        sent.append((prefill.name, decode.name, of))
        await asyncio.sleep(0)
        for tell in told:
            tell()
        return "answered"

    monkeypatch.setattr(router_module, "through", through)
    questions = prefill_decode_pair.cases(options)[case]

    async def ask() -> None:
        side, tokens = prefill_decode_pair.ARMS[arm](), prefill_decode_pair.pool_tokens(options)
        router = router_module.Router(FOUR, side, tokens)
        for question in questions:
            router.know(question)
        await asyncio.gather(
            *(router.answer(None, "m", one, f"t{at}", 8) for at, one in enumerate(questions))
        )

    asyncio.run(ask())
    assert sum(of for _, _, of in sent) / len(sent) == pytest.approx(share, abs=0.01)
    if case == "burst":
        assert {name: sum(name in pair for pair in sent) for name in ("p0", "p1")} == {"p0": 4, "p1": 4}
        assert {name: sum(name in pair for pair in sent) for name in ("d0", "d1")} == {"d0": 4, "d1": 4}


def test_what_is_stored_is_whole_blocks_and_nothing_new_fills_another(prefill_decode_pair: Any) -> None:
    options = prefill_decode_pair.read_options([])
    cases = prefill_decode_pair.cases(options)
    assert len(cases["burst"]) == 20
    for question in [*cases["burst"], *cases["alone"]]:
        assert question.stored_blocks == len(question.prompt) // 64
        assert (len(question.prompt) + prefill_decode_pair.OUTPUT_TOKENS) // 64 == question.stored_blocks
    assert cases["burst"][0].stored_blocks * 64 >= 6_000
    assert prefill_decode_pair.cases(options) == cases, "all arms send the same"


def samples(prefill_decode_pair: Any, *read: tuple[int, int]) -> list[Any]:
    """A second apart; a link has something to read until it has read all."""
    last = read[-1]
    return [
        prefill_decode_pair.Sample(
            float(at), {"p0": one[0], "d0": one[1]}, {"p0": one[0] < last[0], "d0": one[1] < last[1]}
        )
        for at, one in enumerate(read)
    ]


def test_links_are_compared_window_by_window(prefill_decode_pair: Any) -> None:
    turns = samples(prefill_decode_pair, (0, 0), (10, 0), (10, 10))
    assert prefill_decode_pair.windows(turns, 1.0) == 2.0, "one after the other"
    assert prefill_decode_pair.windows(turns, 2.0) == 1.0
    assert prefill_decode_pair.windows(turns, 5.0) is None
    uneven = samples(prefill_decode_pair, (0, 0), (30, 10), (60, 20), (60, 20))
    assert prefill_decode_pair.windows(uneven, 1.0) == 1.5
    assert prefill_decode_pair.busy_s(turns) == {"p0": 1.0, "d0": 2.0}


def test_rows_are_medians_against_the_prefill_side(prefill_decode_pair: Any, tmp_path: Path) -> None:
    options = prefill_decode_pair.read_options([])

    def run(wall_s: float) -> dict[str, Any]:
        return {
            "wall_s": wall_s, "first_token_s": wall_s / 2, "mean_first_token_s": wall_s / 2,
            "prefilled_s": wall_s / 3, "read_bytes": {"p0": 1, "d0": 1}, "busy_s": {"p0": 2.0, "d0": 4.0},
            "max_over_mean": 1.0, "windows_max_over_mean": None, "most_off": 0.0,
            "lines": [{"at_s": 0.0, "read_bytes": [0, 0]}, {"at_s": 1.0, "read_bytes": [5, 6]}],
        }  # fmt: skip

    found = {
        ("burst", "prefill side"): [run(12.0), run(99.0), run(10.0)],
        ("burst", "shorter queue"): [run(6.0)],
    }
    rows = prefill_decode_pair.rows_of(found)
    assert [row["wall_s"] for row in rows] == [12.0, 6.0]
    assert [row["times_as_fast"] for row in rows] == [1.0, 2.0]
    assert rows[1]["busy_share"] == 0.5
    pytest.importorskip("matplotlib")
    prefill_decode_pair.plot(rows, ["p0", "d0"], tmp_path / "prefill_decode_pair.svg")
    assert (tmp_path / "prefill_decode_pair.svg").stat().st_size
    made = SimpleNamespace(
        versions={}, machine={"cores": 2, "processor": "a CPU"}, command="prefill_decode_pair.py"
    )
    assert "| 20 at once | shorter queue | 6.00 | 2.00 |" in prefill_decode_pair.page(
        rows, options, made, 60.0
    )
