"""Forced tokens on the real engine, whatever the sampling, and after preemptions."""

from __future__ import annotations

from typing import Any

import pytest
from engine_tools import count_preemptions, float32_engine
from sojourn_server.launch.serve_command import FORCED_TOKENS

pytestmark = pytest.mark.engine


def test_the_output_is_what_was_asked_whatever_the_sampling_and_after_preemptions(tiny_model: str) -> None:
    from vllm import SamplingParams

    wanted: list[tuple[list[int], dict[str, Any]]] = [
        ([11, 5000, 49151, 3, 3, 3, 77], {"temperature": 0}),
        ([400 + i for i in range(60)], {"temperature": 1.5, "top_p": 0.5, "seed": 1}),
        ([9], {"temperature": 0, "min_tokens": 1}),
    ]
    # 100 blocks hold three and a half of these: the rest is preempted and resumed.
    for r in range(5):
        wanted.append(([(i * 13 + r * 1009) % 49_000 + 10 for i in range(600)], {"ignore_eos": True}))
    prompts = [{"prompt_token_ids": [100 + (n * 500 * 7 + i) % 40_000 for i in range(300)]} for n in range(8)]
    params = [SamplingParams(max_tokens=len(i), extra_args={"replay_ids": i}, **more) for i, more in wanted]
    with (
        float32_engine(
            tiny_model,
            max_model_len=2048,
            max_num_seqs=8,
            num_gpu_blocks_override=100,
            logits_processors=[FORCED_TOKENS],
        ) as llm,
        count_preemptions(llm) as preempted,
    ):
        said = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    assert said == [ids for ids, _ in wanted]
    assert preempted, "the cache was large enough; the test shows nothing"
