"""``sojourn profile`` against a server whose prefill costs a known time for each token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_completions_server import FakeServer
from profile_command import invoke, measure_little
from sojourn_server.cli.console import CliError
from sojourn_server.policies.costs.engine_profile import EngineProfile
from sojourn_server.profiling.prefill_measurement import lengths_up_to, measure_prefill
from sojourn_server.replay.completions_client import Completion, ServedModel


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)


def test_lengths_double_up_to_the_longest() -> None:
    assert lengths_up_to(4095) == [1000, 2000, 4000, 4095]
    assert lengths_up_to(16000) == [1000, 2000, 4000, 8000, 16000]
    assert lengths_up_to(4000) == [1000, 2000, 4000]
    assert lengths_up_to(2048) == [512, 1024, 2048]
    assert lengths_up_to(1000) == [250, 500, 1000]
    assert lengths_up_to(1) == [1]


def test_a_profile_is_measured_written_and_readable(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "profile.toml"
    with FakeServer(seconds_per_token=5e-5, max_model_len=4001, sojourn=True, block_size=32) as server:
        result = invoke(
            "--url", server.url, "-o", str(target), "--repeats", "2", "--json", "-", "--no-decode"
        )
        assert result.exception is None, result.output
        prompts = [request["prompt"] for request in server.requests]
    profile = EngineProfile.from_toml(target.read_text())
    assert [tokens for tokens, _ in profile.points] == [1000, 2000, 4000]
    assert all(seconds >= tokens * 5e-5 for tokens, seconds in profile.points)
    # The fake sleeps in proportion; HTTP and JSON add to that, more on a busy machine.
    assert 4000 * 5e-5 * 0.9 <= profile.prefill.seconds(4000) <= 4000 * 5e-5 * 5
    assert (profile.model, profile.engine, profile.block_size) == ("fake", "fake 1.2", 32)
    assert profile.hardware
    assert profile.measured_at.endswith("Z")
    assert len({tuple(prompt[:32]) for prompt in prompts}) == len(prompts) == 7
    document = json.loads(result.stdout)
    assert document["prefill"]["b_s_per_token"] == profile.prefill.b_s_per_token
    assert document["residual_s"] >= 0
    assert profile.steps is None


def test_each_failure_says_what_to_do_next() -> None:
    with FakeServer(api_key="k", max_model_len=None, status=500) as server:
        assert "--api-key" in invoke("--url", server.url).exception.next_step
        unknown = invoke("--url", server.url, "--api-key", "k").exception
        assert isinstance(unknown, CliError)
        assert "--max-context" in unknown.next_step
        broken = invoke("--url", server.url, "--api-key", "k", "--max-context", "100").exception
        assert "HTTP 500" in broken.message
        gone = server.url
    assert "sojourn serve" in invoke("--url", gone).exception.next_step


class ModelledClient:
    """Answers in a virtual time that it owns."""

    def __init__(self, *, cached: int = 0) -> None:
        self.now = 0.0
        self.lengths: list[int] = []
        self.cached = cached

    async def complete(self, model: str, prompt: list[int], max_tokens: int) -> Completion:
        assert max_tokens == 1
        self.lengths.append(len(prompt))
        seconds = 0.5 + 1e-3 * len(prompt) + 1e-7 * len(prompt) ** 2
        self.now += seconds
        return Completion(
            ttft_s=seconds,
            latency_s=seconds,
            tpot_s=None,
            prompt_tokens=len(prompt),
            output_tokens=1,
            cached_tokens=self.cached,
            output_ids=None,
        )


async def measure(client: ModelledClient, budget_s: float) -> Any:
    served = ServedModel(name="m", max_context_tokens=None, speaks_sojourn=False, engine="e")
    return await measure_prefill(
        client,  # type: ignore[arg-type]
        served,
        max_tokens=32_000,
        repeats=3,
        budget_s=budget_s,
        vocabulary=1000,
        clock=lambda: client.now,
        rng=random.Random(0),
    )


async def test_a_budget_leaves_out_the_longest_lengths_and_is_kept() -> None:
    client = ModelledClient()
    measured = await measure(client, budget_s=60.0)
    assert client.now <= 60.0
    assert [tokens for tokens, _ in measured.points] == [1000, 2000, 4000, 8000]
    assert measured.notes == ["the time budget of 60 s left out these lengths: 16000, 32000"]
    roomy = ModelledClient()
    assert [tokens for tokens, _ in (await measure(roomy, 1e6)).points][-1] == 32_000
    assert len(roomy.lengths) == 1 + 3 * 6
