"""benchmarks/simulator_validation.py: a small run of both worlds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from script_modules import benchmark

truth = benchmark("simulator_validation")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_both_worlds_lose_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    result = tmp_path / "truth.json"
    monkeypatch.setattr(sys, "argv", ["simulator_validation.py", "--smoke", "--json", str(result)])
    # Without a process of its own for the worker, a server starts in two thirds of the time.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # The second server starts beside the first, and is used after it: leases depend on the speed of steps.
    server_of, starting = truth.server_of, dict[str, Future[Any]]()

    @contextmanager
    def started_server(scenario: Any, policy: str) -> Iterator[Any]:
        for each in scenario.policies if not starting else ():
            starting[each] = pool.submit(servers.enter_context, server_of(scenario, each))
        yield starting[policy].result()

    monkeypatch.setattr(truth, "server_of", started_server)
    with ExitStack() as servers, ThreadPoolExecutor() as pool, pytest.raises(SystemExit) as end:
        # Its exit code speaks of seconds too, which this machine may not keep to.
        truth.main()
    assert result.exists(), end.value.code
    for found in json.loads(result.read_text())["results"]:
        assert found["real"]["regenerated_tokens"] > 1000
        assert found["agrees"]["regenerated_tokens"], found
        assert found["error"]["prompt_tokens"] == found["error"]["output_tokens"] == 0.0
    policies = [found["policy"] for found in json.loads(result.read_text())["results"]]
    assert policies == ["stock", "continuum"]
