"""A logits processor that makes a request emit given tokens, to replay a recorded trajectory on an engine.

A request has ``vllm_xargs={"replay_ids": [...]}``. Its n-th output token is then the n-th id, for any
sampling parameters. After the last id the model samples as usual. To avoid that, end the ids with the
end-of-message token, or set ``max_tokens`` to their number. Everything else is real: prefill, KV, scheduling,
stopping, tool parsing. Preemption is harmless: the index of the next id is the request's number of output
tokens, which preemption does not change.

vLLM's option is ``--logits-processors sojourn_server.vllm.forced_tokens:ForcedTokens``. It needs model
runner V1: the CPU's, and on CUDA ``VLLM_USE_V2_MODEL_RUNNER=0``. The class is no entry point, because both
runners load the same entry points and V2 rejects it. Speculative decoding is not supported, because drafted
tokens would have to be forced too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from .compat import LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from .compat import BatchUpdate, SamplingParams, VllmConfig

# A child of vLLM's logger uses its handlers.
logger = logging.getLogger("vllm.sojourn.forced_tokens")

ARGUMENT = "replay_ids"


class ForcedTokens(LogitsProcessor):
    """Forces tokens in model runner V1, by rows of vLLM's persistent batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError``, answered with status 400, if the request's ids are no token ids. The API
        server does not know the vocabulary's size, so ``_forcible`` checks that."""
        ids: Any = (sampling_params.extra_args or {}).get(ARGUMENT)
        if ids is None:
            return
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{ARGUMENT} is a {type(ids).__name__}; expected a list of at least one id")
        for position, value in enumerate(ids):
            if type(value) is not int or value < 0:  # True is an instance of int too
                raise ValueError(f"{ARGUMENT}[{position}] is {value!r}; expected a token id ≥ 0")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        # row -> (forced ids, the request's output tokens so far: the list that vLLM itself appends to)
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows for requests that leave, enter or move, in the order that vLLM prescribes."""
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, _prompt, output in batch_update.added:
            rows.pop(row, None)  # a new request may reuse the row
            if ids := self._forcible(params):
                rows[row] = (ids, output)
        for source, target, direction in batch_update.moved:
            moving, displaced = rows.pop(source, None), rows.pop(target, None)
            if moving is not None:
                rows[target] = moving
            if displaced is not None and direction is MoveDirectionality.SWAP:
                rows[source] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force the next tokens: one finite logit in a row of ``logits`` ([rows, vocabulary]), in place."""
        forced = [
            (row, ids[len(output)]) for row, (ids, output) in self._rows.items() if len(output) < len(ids)
        ]
        if forced:
            rows, tokens = torch.tensor(forced, dtype=torch.long).T.to(logits.device, non_blocking=True)
            logits[rows] = float("-inf")
            logits[rows, tokens] = 0.0
        return logits

    def _forcible(self, params: SamplingParams) -> list[int]:
        """Return the request's forced ids, cut before the first id beyond the vocabulary, which would crash
        the engine."""
        ids: list[int] = (params.extra_args or {}).get(ARGUMENT) or []
        end = next((index for index, value in enumerate(ids) if value >= self._vocab_size), None)
        if end is not None:
            what = "%s[%d] is %d, beyond the vocabulary of %d tokens; forcing ends there"
            logger.error(what, ARGUMENT, end, ids[end], self._vocab_size)
        return ids[:end]
