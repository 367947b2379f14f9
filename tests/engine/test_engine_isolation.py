"""What the fixture of this directory promises: several engines in one process, each its own scheduler."""

from __future__ import annotations

import pytest
from engine_tools import scheduler_of

pytestmark = pytest.mark.engine


def generate(llm, first):
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [1000 + first + i for i in range(200)]}
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_engines_of_two_policies_live_side_by_side(make_llm):
    stock, ours = make_llm("stock"), make_llm("continuum")
    assert type(scheduler_of(stock)).__module__.startswith("vllm.")
    assert type(scheduler_of(ours)).__module__.startswith("sojourn_server.vllm")
    assert make_llm("stock") is stock

    cold = [generate(llm, 0) for llm in (stock, ours)]
    assert [cached for _, cached in cold] == [0, 0]  # they share no cache
    warm = [generate(llm, 0) for llm in (ours, stock)]
    assert [cached for _, cached in warm] == [192, 192]
    assert cold[0][0] == cold[1][0]
