"""A logits processor that gives each engine step a fixed duration, for ``simulator_validation.py --paced``.

    SOJOURN_PACE='[step_s, token_s, pair_s, kv_token_s, request_s]' PYTHONPATH=benchmarks \\
        sojourn serve tiny --logits-processors paced_steps:PacedForcedTokens

The worker computes as usual, then sleeps until the step has lasted the sum of the costs of its tokens,
attention pairs, KV reads and requests. With a small model, everything is real except the duration of a step,
and that does not depend on other load. Importing this module changes vLLM's model runner.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from sojourn_server.vllm.forced_tokens import ForcedTokens
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

VARIABLE = "SOJOURN_PACE"

_step_s, _token_s, _pair_s, _kv_token_s, _request_s = json.loads(os.environ[VARIABLE])
_execute_model, _sample_tokens = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
_until_s = 0.0


class PacedForcedTokens(ForcedTokens):
    """Forces tokens exactly like its parent class. Importing this module changes the model runner."""


def step_s(planned: Any) -> float:
    """Return the seconds that a planned step must last; 0 for a step without tokens."""
    if not planned.total_num_scheduled_tokens:
        return 0.0
    before = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
    cached = planned.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    seconds = _step_s
    for request_id, new in planned.num_scheduled_tokens.items():
        context = before[request_id]
        pairs = new * context + new * (new + 1) // 2
        seconds += _request_s + new * _token_s + pairs * _pair_s + (context + new) * _kv_token_s
    return seconds


def _execute(self: Any, planned: Any, *args: Any, **kwargs: Any) -> Any:
    global _until_s
    _until_s = time.monotonic() + step_s(planned)
    return _execute_model(self, planned, *args, **kwargs)


def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = _sample_tokens(self, *args, **kwargs)
    time.sleep(max(0.0, _until_s - time.monotonic()))
    return output


GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = _execute, _sample
