"""The length network: from a hidden state to probabilities of the remaining length (Tetris §2.2)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from .length_bins import BIN_COUNT

PARAMETER_COUNT = 302_000
"""Number of parameters, as in the paper. With the model's hidden size it determines the width of the hidden
layer."""

MAX_STATE_MAGNITUDE = 1e4
"""Entries of hidden states are clipped to this magnitude, so that an outlier does not dominate."""


class LengthNetwork(nn.Module):
    """Two linear layers over normalised hidden states, whose scale depends on the model.

    The number of generated tokens is a second input; the paper's network has to infer it. The initial weights
    depend on ``seed`` only, because torch's global random state belongs to the engine. Raises ``ValueError``
    for a hidden size below 1, or too large for the number of parameters.
    """

    def __init__(self, hidden_size: int, *, seed: int = 0) -> None:
        super().__init__()
        width = (
            round((PARAMETER_COUNT - BIN_COUNT) / (hidden_size + 2 + BIN_COUNT)) if hidden_size >= 1 else 0
        )
        if width < 2:
            raise ValueError(
                f"hidden size {hidden_size}; expected 1 to "
                f"{2 * (PARAMETER_COUNT - BIN_COUNT) // 3 - BIN_COUNT - 2}"
            )
        self.hidden_size = hidden_size
        self.first = nn.utils.skip_init(nn.Linear, hidden_size + 1, width)
        self.last = nn.utils.skip_init(nn.Linear, width, BIN_COUNT)
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.first, self.last):
            for values in layer.parameters():  # as ``nn.Linear`` does
                nn.init.uniform_(values, -(layer.in_features**-0.5), layer.in_features**-0.5, generator)

    def forward(self, states: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """Scores (rows × ``BIN_COUNT``) whose softmax is the distribution of the remaining length.

        ``states``: rows × hidden size; ``written``: tokens written so far, one per row."""
        seen = nn.functional.layer_norm(
            states.clamp(-MAX_STATE_MAGNITUDE, MAX_STATE_MAGNITUDE), (self.hidden_size,)
        )
        far = torch.log2(1.0 + written.float()).unsqueeze(1) / 8.0
        return cast(torch.Tensor, self.last(nn.functional.gelu(self.first(torch.cat([seen, far], dim=1)))))
