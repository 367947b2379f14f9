"""Forced tokens on the real engine."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

FORCED = "sojourn_server.vllm.forced_tokens:ForcedTokens"


@pytest.fixture(scope="module")
def llm(make_llm):
    # 100 blocks hold three and a half of the five requests below: the rest is preempted and resumed.
    return make_llm("stock", num_blocks=100, logits_processors=[FORCED])


def forced_params(ids, **more):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=len(ids), extra_args={"replay_ids": ids}, **more)


def token_prompt(first: int, length: int):
    return {"prompt_token_ids": [100 + (first * 7 + i) % 40_000 for i in range(length)]}


def outputs(llm, prompts, params):
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def test_the_output_is_what_was_asked_whatever_the_sampling(llm):
    ids = [[11, 5000, 49151, 3, 3, 3, 77], [400 + i for i in range(60)], [9]]
    params = [
        forced_params(ids[0], temperature=0),
        forced_params(ids[1], temperature=1.5, top_p=0.5, seed=1),
        forced_params(ids[2], temperature=0, min_tokens=1),
    ]
    assert outputs(llm, [token_prompt(i, 40 + i) for i in range(3)], params) == ids


def test_ids_survive_preemption(llm):
    from engine_tools import count_preemptions

    ids = [[(i * 13 + r * 1009) % 49_000 + 10 for i in range(600)] for r in range(5)]
    with count_preemptions(llm) as preempted:
        got = outputs(
            llm,
            [token_prompt(100 + r * 500, 300) for r in range(5)],
            [forced_params(i, ignore_eos=True) for i in ids],
        )
    assert got == ids
    assert preempted, "the cache was large enough; the test shows nothing"
