"""Logits processors that make a request emit given tokens, to replay a recorded trajectory on a real engine.

A request has ``vllm_xargs={"replay_ids": [...]}``. Its n-th output token is then the n-th id, for any
sampling parameters. After the last id the model samples as usual. To avoid that, end the ids with the
end-of-message token, or set ``max_tokens`` to their number. Everything else is real: prefill, KV, scheduling,
stopping, tool parsing. Preemption is harmless: the index of the next id is the request's number of output
tokens, which preemption does not change.

Model runner V1 (the CPU, and CUDA with ``VLLM_USE_V2_MODEL_RUNNER=0``) needs vLLM's option
``--logits-processors sojourn_server.vllm.forced_tokens:ForcedTokens``. Model runner V2, the CUDA default,
needs ``:ForcedTokensV2`` instead. Neither class is an entry point, because both runners load the same entry
points and each rejects the other's classes. Speculative decoding is not supported, because drafted tokens
would have to be forced too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from .compat import LogitsProcessor, LogitsProcessorV2, MoveDirectionality

if TYPE_CHECKING:
    from .compat import BatchUpdate, LogitsContext, LogitsProcRequestState, SamplingParams, VllmConfig

# A child of vLLM's logger uses its handlers.
logger = logging.getLogger("vllm.sojourn.forced_tokens")

ARGUMENT = "replay_ids"
MAX_REPLAY_IDS = 65_536
"""Maximum number of token ids in a request's ``replay_ids``."""

_vocab_size: int | None = None
"""Size of the vocabulary. It is ``None`` until a logits processor is built in this process. The API server
builds none, so it validates requests without the size. The engine checks the ids again, because an id beyond
the vocabulary would crash it."""


def replay_ids(params: SamplingParams) -> list[int] | None:
    """Return the request's forced token ids; ``None`` without any. Raises ``ValueError`` for an invalid list.
    The server then answers with status 400."""
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
    """Forces tokens in model runner V1. State is stored per row of vLLM's persistent batch. A step takes
    O(rows of requests with forced tokens)."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError`` for ids that cannot be forced. Runs in the API server."""
        replay_ids(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        _remember_vocabulary(vllm_config)
        # row -> (forced ids, the request's output tokens so far: the list that vLLM itself appends to)
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return false, because the processor changes the arg max."""
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
        """Force the next tokens by changing ``logits`` ([rows, vocabulary]) in place, and return it. A forced
        row has one finite logit."""
        forced = [
            (row, ids[len(output)]) for row, (ids, output) in self._rows.items() if len(output) < len(ids)
        ]
        if forced:
            _force(logits, torch.tensor(forced, dtype=torch.long).to(logits.device, non_blocking=True))
        return logits


class ForcedTokensV2(LogitsProcessorV2):
    """Forces tokens in model runner V2. State is stored per request slot. The tests cover only its
    interface, because model runner V2 needs CUDA; ``benchmarks/gpu/engine.py`` runs it.

    A table on the device has one row of forced ids for each slot. The table is as wide as the longest list
    so far. The device itself computes how many output tokens a request has: its position plus one, minus the
    prompt's length. So ``apply`` never waits for the device.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError`` for ids that cannot be forced. Runs in the API server."""
        replay_ids(sampling_params)

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        _remember_vocabulary(vllm_config)
        self._states = req_states
        self._lengths: dict[int, int] = {}  # forced slots, on the host
        self._staged: dict[int, list[int]] = {}
        self._table = torch.full((req_states.max_num_reqs, 1), -1, dtype=torch.long, device=req_states.device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Prepare the slot ``req_idx`` for a new request. Return whether the request has forced tokens."""
        ids = _forcible(sampling_params)
        was_forced = self._lengths.pop(req_idx, None) is not None
        if ids:
            self._lengths[req_idx] = len(ids)
        if ids or was_forced:
            self._staged[req_idx] = ids
        return bool(ids)

    def apply_staged_writes(self) -> None:
        """Write the token ids that ``add_request`` collected to the table on the device."""
        if not self._staged:
            return
        longest = max(map(len, self._staged.values()))
        if longest > self._table.shape[1]:
            grown = self._table.new_full((self._table.shape[0], longest), -1)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        for slot, ids in self._staged.items():
            self._table[slot] = -1
            if ids:
                self._table[slot, : len(ids)] = torch.tensor(ids, dtype=torch.long).to(
                    self._table.device, non_blocking=True
                )
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Force the next tokens by changing ``logits`` ([rows, vocabulary]) in place, and return it. A forced
        row has one finite logit. ``ctx.expanded_idx_mapping`` maps each row to its request slot."""
        if not any(int(slot) in self._lengths for slot in ctx.idx_mapping_np):
            return logits
        slots = ctx.expanded_idx_mapping.long()
        position = ctx.pos.long() + 1 - self._prompt_lengths()[slots].long()
        width = self._table.shape[1]
        token = self._table[slots, position.clamp(0, width - 1)]
        forced = (token >= 0) & (position >= 0) & (position < width)
        # Selecting rows by a device mask would make the host wait for the number of rows.
        chosen = logits.gather(1, token.clamp(min=0).unsqueeze(1))
        replacement = torch.full_like(logits, float("-inf"))
        replacement.scatter_(1, token.clamp(min=0).unsqueeze(1), torch.zeros_like(chosen))
        torch.where(forced.unsqueeze(1), replacement, logits, out=logits)
        return logits

    def _prompt_lengths(self) -> torch.Tensor:
        return self._states.prompt_len.gpu


def _forcible(params: SamplingParams) -> list[int]:
    """Return the request's forced ids, cut before the first id beyond the vocabulary."""
    ids: list[int] = (params.extra_args or {}).get(ARGUMENT) or []
    bound = _vocab_size
    if bound is not None and ids and max(ids) >= bound:
        position = next(index for index, value in enumerate(ids) if value >= bound)
        logger.error(
            "%s[%d] is %d, beyond the vocabulary of %d tokens; forcing ends there",
            ARGUMENT,
            position,
            ids[position],
            bound,
        )
        return ids[:position]
    return ids


def _force(logits: torch.Tensor, forced: torch.Tensor) -> None:
    """Force tokens by changing ``logits`` in place. ``forced`` has shape [n, 2]: (row, token id)."""
    rows, tokens = forced[:, 0], forced[:, 1]
    logits[rows] = float("-inf")
    logits[rows, tokens] = 0.0


def _remember_vocabulary(vllm_config: VllmConfig) -> None:
    global _vocab_size
    _vocab_size = int(vllm_config.model_config.get_vocab_size())
