"""Over a hundred preemptions change no token: KV that was copied out and in again is what would be computed.

On a real engine in float32 at temperature 0. The model is random and small, and *loud*: its weights are so
large that each next token hangs on all tokens before it. (The tiny model of the other tests says one word
again and again, whatever is in its cache.) A test at the end spoils what comes back, and sees it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
    one_thread,
    said,
    scheduler_of,
    with_tiers,
)
from sojourn_server.kv_offload.cpu_device_backend import CpuCopy, CpuDeviceBackend
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


class Wanted(NamedTuple):
    """A program of one request."""

    kind: str
    prompt: list[int]
    output_tokens: int


class Said(NamedTuple):
    """What a request came to."""

    tokens: list[int]
    logprobs: list[float]


@dataclass
class Report:
    """What an engine counted meanwhile."""

    said: list[Said]
    preemptions: int
    """As vLLM counts them."""
    times: Counter[str]
    """Of each request that was preempted."""
    counters: dict[str, list[list[Any]]] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def logprobs(self) -> list[list[float]]:
        return [one.logprobs for one in self.said]

    def counted(self, name: str, **labels: str) -> float:
        return sum(n for found, n in self.counters.get(name, ()) if found.items() >= labels.items())


def load(count: int = PROGRAMS, seed: int = 3) -> list[Wanted]:
    """Of two kinds, every other one writes long; no two begin alike."""
    draw = random.Random(seed)
    wanted = []
    for number in range(count):
        kind, least, most = ("solver", 150, 300) if number % 2 else ("chat", 40, 120)
        prompt = [draw.randrange(10, 4000) for _ in range(draw.randint(20, 90))]
        wanted.append(Wanted(kind, prompt, draw.randint(least, most)))
    return wanted


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_thread(monkeypatch):
        yield


def engine(model: str, policy: Path | None, **settings: Any) -> AbstractContextManager[Any]:
    """Stock with ample memory, or ours with too little."""
    if policy is not None:
        settings["scheduler_cls"] = "sojourn_server.vllm.scheduler.make_scheduler"
        settings["additional_config"] = {"sojourn": {"policy_file": str(policy), "strict": True}}
        settings |= with_tiers(host_bytes=HOST_BYTES)
    return float32_engine(
        model,
        max_model_len=512,
        max_num_seqs=32 if policy is not None else 80,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=SHORT_BLOCKS + 1 if policy is not None else AMPLE_BLOCKS,
        disable_log_stats=False,
        **settings,
    )


def say(llm: Any, wanted: list[Wanted]) -> Report:
    """All at once, as programs of their kinds; stock hears nothing of what is in ``extra_args``."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=one.output_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args={
                "agentic_context": json.dumps({"program_id": f"P{n}", "sojourn": {"agent_type": one.kind}})
            },
        )
        for n, one in enumerate(wanted)
    ]
    prompts = [{"prompt_token_ids": one.prompt} for one in wanted]
    before = vllm_preemptions(llm)
    with count_preemptions(llm) as preempted:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    heard = []
    for output in outputs:
        (answer,) = output.outputs
        assert answer.finish_reason == "length"
        heard.append(Said(*said(answer)))
    report = Report(heard, round(vllm_preemptions(llm) - before), Counter(preempted))
    scheduler = scheduler_of(llm)
    if hasattr(scheduler, "sojourn_call"):
        report.counters = json.loads(scheduler.sojourn_call("drain_metrics", ""))["counters"]
        report.stats = json.loads(scheduler.sojourn_call("stats", ""))
    return report


def vllm_preemptions(llm: Any) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


@pytest.fixture(scope="module")
def stock(loud_model: str) -> Report:
    with engine(loud_model, None) as llm:
        return say(llm, load())


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    target = tmp_path / "everybody-enters.toml"
    target.write_text(POLICY)
    return target


def test_a_hundred_preemptions_change_no_token(loud_model: str, stock: Report, policy: Path) -> None:
    with engine(loud_model, policy) as llm:
        ours = say(llm, load())
    assert stock.preemptions == 0, "with ample memory"
    assert len({tuple(one.tokens[:20]) for one in stock.said}) == len(stock.said), "they must differ"
    assert all(len(set(one.tokens)) > len(one.tokens) / 2 for one in stock.said), "nor may one repeat itself"
    assert ours.preemptions == ours.times.total() >= 100
    assert ours.counted("sojourn_preemptions_total", mode="offload") >= 100
    moves = ours.stats["tiers"]["moves"]
    assert moves["stored"] + moves["saved"] > 100
    assert moves["loaded"] * BLOCK_TOKENS > 3000
    assert ours.counted("sojourn_lost_tokens_total", cause="preempted") > 1000, "and some was computed again"
    assert [one.tokens for one in ours.said] == [one.tokens for one in stock.said]
    assert max(map(most_off, ours.logprobs, stock.logprobs)) < MOST_OFF
    # Three times, while there is another victim (``MOST_PREEMPTIONS``).
    assert max(ours.times.values()) <= 2 * MOST_PREEMPTIONS


@pytest.mark.nightly
def test_kv_that_comes_back_spoilt_would_show(
    loud_model: str, stock: Report, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So equal tokens say that what comes back is right, and not that nobody reads it."""
    monkeypatch.setattr(
        CpuDeviceBackend, "to_device", lambda *args: CpuCopy(0.0)
    )  # blocks keep what somebody else left
    with engine(loud_model, policy) as llm:
        ours = say(llm, load()[:24])
    assert ours.stats["tiers"]["moves"]["loaded"] > 0
    wrong = sum(one.tokens != its.tokens for one, its in zip(ours.said, stock.said, strict=False))
    assert wrong > 5
