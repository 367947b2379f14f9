"""Over a hundred preemptions change no token: KV that was copied out and in again is what would be computed.

On a real engine in float32 at temperature 0. The model is random and small, and *loud*: each next token
depends on all tokens before it. A test at the end spoils what comes back, and sees it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_tools import (
    BLOCK_TOKENS,
    LOUD_BLOCK_BYTES,
    MOST_OFF,
    count_preemptions,
    float32_engine,
    most_off,
    said,
    scheduler_of,
    with_tiers,
)
from sojourn_server.kv_offload.cpu_device_backend import CpuCopy, CpuDeviceBackend
from sojourn_server.launch.serve_command import SCHEDULER_CLS
from sojourn_server.policies.preemption_policies import MOST_PREEMPTIONS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

AMPLE_BLOCKS = 600
"""For all contexts at once."""
SHORT_BLOCKS = 48
"""For five that write long, of the 32 that would run at once."""
PROGRAMS = 96
"""Each is preempted three times at most, so that about 140 preemptions come together at any speed."""
HOST_BYTES = 160 * LOUD_BLOCK_BYTES
"""For most of what is away at once; the rest is computed again, so that both ways meet."""

POLICY = """
extends = "tetris"
# Tetris' gate keeps out who would not fit, and so hardly anybody is preempted: here everybody enters.
admission = "everyone"
# It chooses victims well once it knows what outputs come to, and not before: it is long in learning that.
output_length = { policy = "survival", min_outputs = 80 }
# On so small a model either way may be measured as the quicker one; what is computed again proves nothing.
recovery = "offload"
"""


class Report(NamedTuple):
    """What an engine said, and what it counted meanwhile."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    preempted: Counter[str]
    """Times that each request was preempted."""
    counters: dict[str, list[list[Any]]]
    stats: dict[str, Any]

    def counted(self, name: str, **labels: str) -> float:
        return sum(n for found, n in self.counters.get(name, ()) if found.items() >= labels.items())


def say(model: str, policy: Path | None, programs: int = PROGRAMS) -> Report:
    """Run programs of one request each, all at once, on stock with ample memory, or with ``policy`` and too
    little. Some write long outputs, others short ones. No two prompts begin alike."""
    from vllm import SamplingParams

    settings: dict[str, Any] = {"max_num_seqs": 80, "num_gpu_blocks_override": AMPLE_BLOCKS}
    if policy is not None:
        settings = {
            "max_num_seqs": 32,
            "num_gpu_blocks_override": SHORT_BLOCKS + 1,
            "scheduler_cls": SCHEDULER_CLS,
            "additional_config": {"sojourn": {"policy_file": str(policy), "strict": True}},
            **with_tiers(host_bytes=HOST_BYTES),
        }
    draw = random.Random(3)
    prompts, params = [], []
    for number in range(programs):
        kind, least, most = ("solver", 150, 300) if number % 2 else ("chat", 40, 120)
        prompts.append({"prompt_token_ids": [draw.randrange(10, 4000) for _ in range(draw.randint(20, 90))]})
        hint = json.dumps({"program_id": f"P{number}", "sojourn": {"agent_type": kind}})
        sampled = {"temperature": 0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        length = draw.randint(least, most)
        params.append(SamplingParams(max_tokens=length, extra_args={"agentic_context": hint}, **sampled))
    with (
        float32_engine(
            model, max_model_len=512, max_num_batched_tokens=512, disable_log_stats=False, **settings
        ) as llm,
        count_preemptions(llm) as preempted,
    ):
        answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert {answer.finish_reason for answer in answers} == {"length"}
        by_vllm = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert by_vllm == len(preempted)
        counters, stats = {}, {}
        if policy is not None:
            counters = json.loads(scheduler_of(llm).sojourn_call("drain_metrics", ""))["counters"]
            stats = json.loads(scheduler_of(llm).sojourn_call("stats", ""))
    tokens, logprobs = zip(*map(said, answers), strict=True)
    return Report(list(tokens), list(logprobs), Counter(preempted), counters, stats)


@pytest.fixture(scope="module")
def stock(loud_model: str) -> Report:
    return say(loud_model, None)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    target = tmp_path / "everybody-enters.toml"
    target.write_text(POLICY)
    return target


def test_a_hundred_preemptions_change_no_token(loud_model: str, stock: Report, policy: Path) -> None:
    ours = say(loud_model, policy)
    assert not stock.preempted, "with ample memory"
    assert len({tuple(tokens[:20]) for tokens in stock.tokens}) == len(stock.tokens), "they must differ"
    assert all(len(set(tokens)) > len(tokens) / 2 for tokens in stock.tokens), "nor may one repeat itself"
    assert ours.preempted.total() >= 100
    assert ours.counted("sojourn_preemptions_total", mode="offload") >= 100
    moves = ours.stats["tiers"]["moves"]
    assert moves["stored"] + moves["saved"] > 100
    assert moves["loaded"] * BLOCK_TOKENS > 3000
    assert ours.counted("sojourn_lost_tokens_total", cause="preempted") > 1000, "and some was computed again"
    assert ours.tokens == stock.tokens
    assert max(map(most_off, ours.logprobs, stock.logprobs)) < MOST_OFF
    # Three times, while there is another victim (``MOST_PREEMPTIONS``).
    assert max(ours.preempted.values()) <= 2 * MOST_PREEMPTIONS


@pytest.mark.nightly
def test_kv_that_comes_back_spoilt_would_show(
    loud_model: str, stock: Report, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So equal tokens say that what comes back is right, and not that nobody reads it."""
    monkeypatch.setattr(
        CpuDeviceBackend, "to_device", lambda *args: CpuCopy(0.0)
    )  # blocks keep what somebody else left
    ours = say(loud_model, policy, programs=24)
    assert ours.stats["tiers"]["moves"]["loaded"] > 0
    assert sum(its != other for its, other in zip(ours.tokens, stock.tokens, strict=False)) > 5
