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
        side, tokens = prefill_decode_pair.ARMS[arm], prefill_decode_pair.pool_tokens(options)
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
