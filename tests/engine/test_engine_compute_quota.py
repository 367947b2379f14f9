"""A compute quota cuts prompts into many steps and changes nothing of what is said: on a real engine.

In float32 at temperature 0, on a model whose every token hangs on all before it. One engine, with a quota
that cuts and with one that is never reached, which plans what stock does (``tests/vllm`` shows it).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_tools import BLOCK_TOKENS, MOST_OFF, float32_engine, most_off, one_thread, said, scheduler_of
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

QUOTA_S = 0.02
PROFILE = EngineProfile(
    model="loud",
    hardware="none",
    engine="vllm",
    block_size=BLOCK_TOKENS,
    prefill=PrefillCurve(0.0, 1e-4, 0.0),
    points=(),
    # A block behind 600 tokens takes the whole quota, so all but the shortest prompts are cut.
    steps=StepCosts(step_s=0.0, token_s=1e-4, pair_s=1e-6, kv_token_s=0.0, request_s=0.0),
)


@pytest.fixture(scope="module")
def llm(loud_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("quota") / "profile.toml"
    path.write_text(PROFILE.to_toml())
    ours = {"policy": "observe", "strict": True, "compute_quota_s": QUOTA_S, "profile_file": str(path)}
    with (
        pytest.MonkeyPatch.context() as patch,
        one_thread(patch),
        float32_engine(
            loud_model,
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            num_gpu_blocks_override=400,
            disable_log_stats=True,
            scheduler_cls="sojourn_server.vllm.scheduler.make_scheduler",
            additional_config={"sojourn": ours},
        ) as made,
    ):
        yield made


def say(llm: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """All at once, on an empty prefix cache; tokens and logprobs of each."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [said(output.outputs[0]) for output in llm.generate(asked, params, use_tqdm=False)]


def told(llm: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(scheduler_of(llm).sojourn_call("drain_metrics", ""))
    return answer


def test_first_tokens_and_all_others_are_those_without_a_quota(llm: Any) -> None:
    draw = random.Random(4)
    shared = [draw.randrange(10, 4000) for _ in range(320)]
    prompts = [[draw.randrange(10, 4000) for _ in range(draw.randrange(20, 700))] for _ in range(10)]
    prompts += [[*shared, *(draw.randrange(10, 4000) for _ in range(100))] for _ in range(4)]
    ours = say(llm, prompts)
    counted = told(llm)
    ((_, cuts),) = counted["counters"]["sojourn_quota_cuts_total"]
    assert cuts > 20
    ((_, used),) = counted["histograms"]["sojourn_step_quota_ratio"]
    assert used["count"] > 20

    quota = scheduler_of(llm).sojourn_quota
    quota.quota = replace(quota.quota, quota_s=1e9)
    stock = say(llm, prompts)
    assert "sojourn_quota_cuts_total" not in told(llm)["counters"]
    assert len({tuple(tokens) for tokens, _ in stock}) == len(stock), "or equal tokens would say nothing"
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in stock]
    assert max(most_off(here, there) for (_, here), (_, there) in zip(ours, stock, strict=True)) < MOST_OFF

    # What is off where a prompt is read wrong: by one token in the middle of it.
    changed = [prompt.copy() for prompt in prompts]
    for prompt in changed:
        prompt[len(prompt) // 2] = 5
    wrong = say(llm, changed)
    assert (
        max(most_off(here, there) for (_, here), (_, there) in zip(wrong, stock, strict=True))
        > 100 * MOST_OFF
    )
