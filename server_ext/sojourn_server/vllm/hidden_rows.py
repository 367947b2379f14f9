"""What travels from worker to scheduler with a step's results, where hidden states are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

CARRIED_AS = "sojourn_hidden_states"
"""Name under which they travel on vLLM's ``ModelRunnerOutput``, which is pickled with all it has."""


class HiddenRows(NamedTuple):
    """A row each of requests that were sampled in one step."""

    request_ids: tuple[str, ...]
    states: torch.Tensor
    """Requests × hidden size, in host memory, in the model's own precision."""
