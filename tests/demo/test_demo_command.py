"""``sojourn demo`` as a command: what it refuses, what it writes, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from echo_engine import EchoEngine
from sojourn_server.demo.report import RATIOS
from sojourn_server.demo.script import Tokenizer
from sojourn_server.models import is_cached, model_directory


def sojourn_demo(*arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sojourn_server.cli", "demo", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "stock,stock"], "at most once"),
        (["--arms", "lru"], "--arms lru"),
        (["--url", "http://127.0.0.1:9"], "--url names one server"),
        (
            ["--url", "http://127.0.0.1:9", "--arms", "sojourn", "--programs", "1", "--model", "tiny"],
            "does not answer",
        ),
        (["--model", "no/such", "--arms", "stock"], "no tokenizer.json"),
    ],
)
def test_what_cannot_work_is_said_with_a_next_step(arguments: list[str], message: str) -> None:
    result = sojourn_demo(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "next:" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not is_cached("tiny"), reason="tiny has not been made yet")
@pytest.mark.parametrize("garbled", [False, True])
def test_against_a_running_server(tmp_path: Path, garbled: bool) -> None:
    def answer(number: int, command: str) -> Any:
        return "false" if garbled and number == 2 else command

    tokenizer = Tokenizer(model_directory("tiny"))
    with EchoEngine(answer, decode=tokenizer.decode) as engine:
        target = tmp_path / "result.json"
        result = sojourn_demo(
            "--url",
            engine.url + "/v1",
            "--arms",
            "sojourn",
            "--programs",
            "1",
            "--model",
            "tiny",
            "--json",
            str(target),
        )
    assert result.returncode == (1 if garbled else 0), result.stderr
    found = json.loads(target.read_text())
    assert set(found["ratio"]) == set(RATIOS)
    assert found["pool_blocks"] is None
    figures = found["arms"]["sojourn"]
    assert (figures["programs"], figures["repositories_fixed"]) == (1, 0 if garbled else 1)
    assert ("forced" in result.stderr) is garbled


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_arms_on_the_real_engine(tmp_path: Path) -> None:
    """Two programs in a pool for three: nothing is evicted, so both arms must find every full block again."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    result = sojourn_demo(
        "--programs", "2", "--model", "tiny", "--json", str(tmp_path / "r.json"),
        "--plot", str(tmp_path / "r.png"),
        timeout_s=560.0,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["arms"]) == ["stock", "sojourn"]
    for figures in found["arms"].values():
        assert (figures["programs"], figures["repositories_fixed"], figures["preemptions"]) == (2, 2, 0)
        assert figures["turns"] == 20
        assert figures["ttft_mean_s"] > 0
        for program in figures["details"]:
            turns = program["turns"]
            for before, turn in pairwise(turns):
                known = before["prompt_tokens"] + before["output_tokens"]
                assert 0 <= known - turn["cached_tokens"] <= found["block_tokens"]
    assert all(value is None or value > 0 for value in found["ratio"].values())
    assert (tmp_path / "r.png").stat().st_size > 1000
