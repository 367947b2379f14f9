"""The network: a hidden state in, how likely each length of what is left out (Tetris §2.2)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from .bins import BINS

PARAMETERS = 302_000
"""The paper's figure. How wide the layer between is follows from it and from the model's hidden size."""

MAX_STATE = 1e4
"""Beyond, an entry of a hidden state is cut: one wild number must not drown all others."""


class LengthNetwork(nn.Module):
    """Two layers. Of each hidden state only the direction counts, since its scale is the model's affair;
    beside it the network is told how much was written, which the paper's has to find out by itself. What
    it begins with hangs on ``seed`` alone: torch's own random numbers belong to the engine.

    Raises ``ValueError`` for a hidden size below 1, or so large that nothing is left between.
    """

    def __init__(self, hidden_size: int, *, seed: int = 0) -> None:
        super().__init__()
        width = round((PARAMETERS - BINS) / (hidden_size + 2 + BINS)) if hidden_size >= 1 else 0
        if width < 2:
            raise ValueError(
                f"hidden size {hidden_size}; expected 1 to {2 * (PARAMETERS - BINS) // 3 - BINS - 2}"
            )
        self.hidden_size = hidden_size
        self.first = nn.utils.skip_init(nn.Linear, hidden_size + 1, width)
        self.last = nn.utils.skip_init(nn.Linear, width, BINS)
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.first, self.last):
            for values in layer.parameters():  # as ``nn.Linear`` does it
                nn.init.uniform_(values, -(layer.in_features**-0.5), layer.in_features**-0.5, generator)

    def forward(self, states: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """``states``: rows × hidden size; ``written``: tokens generated so far, a row each. Returns scores,
        rows × ``BINS``, whose softmax are probabilities of what is left."""
        seen = nn.functional.layer_norm(states.clamp(-MAX_STATE, MAX_STATE), (self.hidden_size,))
        far = torch.log2(1.0 + written.float()).unsqueeze(1) / 8.0
        return cast(torch.Tensor, self.last(nn.functional.gelu(self.first(torch.cat([seen, far], dim=1)))))
