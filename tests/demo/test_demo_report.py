"""The figures of the demo, from records made by hand."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from rich.console import Console
from sojourn_server.demo.demo_agent import DemoProgramRecord, DemoTurnRecord
from sojourn_server.demo.demo_report import arm_figures, document, recomputed_prompt_tokens, table
from sojourn_server.demo.demo_run import ArmRecord

FACTS = {"pool": "KV for 100 tokens", "pool_blocks": 4, "seed": 0}


def turn(prompt: int, cached: int, output: int = 10, start_s: float = 0.0) -> DemoTurnRecord:
    return DemoTurnRecord(
        start_s=start_s,
        first_tool_s=start_s + 1,
        end_s=start_s + 2,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        command="true",
    )


def program(*turns: DemoTurnRecord, ended_s: float = 10.0, **fields: Any) -> DemoProgramRecord:
    return DemoProgramRecord(
        task="t", arrived_s=0.0, ended_s=ended_s, turns=turns, **{"fixed": True, **fields}
    )


def arm(name: str, *programs: DemoProgramRecord, ttft_s: float = 1.0) -> ArmRecord:
    return ArmRecord(
        name=name, programs=programs, ttft_mean_s=ttft_s, preemptions=3, wall_s=20.0, decisions={}
    )


def printed(result: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(table(result))
    return " ".join(out.getvalue().split())


def test_again_is_what_was_there_before() -> None:
    # The second turn adds 40 new tokens to 110 old ones. With 96 cached, the rest of a block that was not
    # full is computed again; more than expected is no debt.
    for cached, again in ((0, 110), (96, 14), (110, 0), (140, 0)):
        assert recomputed_prompt_tokens([turn(100, 0), turn(150, cached)]) == again
    assert recomputed_prompt_tokens([turn(100, 32)]) == 0  # a first turn has no past of its own
    assert recomputed_prompt_tokens([]) == 0


def test_figures_of_an_arm() -> None:
    figures = arm_figures(
        arm("stock", program(turn(100, 0), turn(150, 96)), program(turn(100, 64), ended_s=30.0))
    )
    assert figures["completions_s"] == [10.0, 30.0]
    assert figures["completion_mean_s"] == figures["completion_p50_s"] == 20.0
    assert figures["completion_p95_s"] == 29.0
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["prefill_tokens"]) == (350, 160, 190)
    assert figures["prefill_again_tokens"] == 14
    assert figures["hit_rate"] == pytest.approx(160 / 350, abs=1e-4)
    assert (figures["ttft_mean_s"], figures["preemptions"], figures["wall_s"]) == (1.0, 3, 20.0)
    assert (figures["programs"], figures["repositories_fixed"]) == (2, 2)


def test_ratios_are_stock_over_sojourn_with_fixed_keys() -> None:
    stock = arm("stock", program(turn(100, 0), turn(150, 0), ended_s=30.0), ttft_s=6.0)
    ours = arm("sojourn", program(turn(100, 0), turn(150, 88), ended_s=10.0), ttft_s=2.0)
    found = document([stock, ours], FACTS)
    assert found["ratio"] == {
        "completion_mean": 3.0,
        "completion_p95": 3.0,
        "ttft_mean": 3.0,
        "prefill_again": 5.0,
    }
    assert list(found["arms"]) == ["stock", "sojourn"]
    assert found["pool_blocks"] == 4
    json.dumps(found, allow_nan=False)
    text = printed(found)
    assert "│ completion, mean │ 30.0 s │ 10.0 s │ 3.00 │" in text
    assert "│ repositories fixed │ 1/1 │ 1/1 │" in text
    assert "KV for 100 tokens" in text


def test_an_arm_with_failed_programs_has_no_ratios() -> None:
    # The failed program of the sojourn arm ended after 1 s, so that arm looks three times as fast.
    stock = arm("stock", program(turn(100, 0), ended_s=30.0), program(turn(100, 0), ended_s=30.0))
    ours = arm(
        "sojourn",
        program(turn(100, 0), ended_s=19.0),
        program(turn(100, 0), ended_s=1.0, error="broke", fixed=False),
    )
    for first, second in ((stock, ours), (ours, stock)):
        result = document([first, second], FACTS)
        assert set(result["ratio"].values()) == {None}
        assert "stock ÷ sojourn" not in printed(result)
    assert "no measurement: 1 of 2 programs of sojourn failed, and ended early" in printed(result)
    assert "│ programs failed │ 1 │ 0 │" in printed(document([ours, stock], FACTS))
    whole = printed(document([stock, stock], FACTS))
    assert "failed" not in whole
    both = printed(document([ours, arm("stock", program(turn(9, 0), error="broke"))], FACTS))
    assert "1 of 2 programs of sojourn and 1 of 1 programs of stock failed, and ended early" in both
