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
MAX_REPLAY_IDS = 65_536

_vocab_size: int | None = None
"""Size of the vocabulary; ``None`` until a logits processor is built in this process. The API server builds
none, so the engine checks the ids again: one beyond the vocabulary would crash it."""


def replay_ids(params: SamplingParams) -> list[int] | None:
    """Return the request's forced token ids, if any. ``ValueError`` is answered with status 400."""
    ids: Any = (params.extra_args or {}).get(ARGUMENT)
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise ValueError(f"{ARGUMENT} is a {type(ids).__name__}; expected a list of token ids")
    if not 0 < len(ids) <= MAX_REPLAY_IDS:
        raise ValueError(f"{ARGUMENT} has {len(ids)} ids; expected 1 to {MAX_REPLAY_IDS}")
    for position, value in enumerate(ids):
        # type() instead of isinstance(): True is an int but not a token id
        if type(value) is not int:
            raise ValueError(
                f"{ARGUMENT}[{position}] is {value!r}, a {type(value).__name__}; expected an integer"
            )
        if value < 0 or (_vocab_size is not None and value >= _vocab_size):
            bound = "" if _vocab_size is None else f" below the vocabulary size {_vocab_size}"
            raise ValueError(f"{ARGUMENT}[{position}] is {value}; expected a token id ≥ 0{bound}")
    return ids


class ForcedTokens(LogitsProcessor):
    """Forces tokens in model runner V1, by rows of vLLM's persistent batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        replay_ids(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        global _vocab_size
        _vocab_size = int(vllm_config.model_config.get_vocab_size())
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
            ids = _forcible(params)
            if ids:
                rows[row] = (ids, output)
            else:
                rows.pop(row, None)  # a new request may reuse the row
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


def _forcible(params: SamplingParams) -> list[int]:
    """Return the request's forced ids, cut before the first id beyond the vocabulary."""
    ids: list[int] = (params.extra_args or {}).get(ARGUMENT) or []
    bound = _vocab_size
    if bound is not None and ids and max(ids) >= bound:
        position = next(index for index, value in enumerate(ids) if value >= bound)
        logger.error(
            "%s[%d] is %d, beyond the vocabulary of %d tokens; forcing ends there",
            ARGUMENT, position, ids[position], bound,
        )  # fmt: skip
        return ids[:position]
    return ids
