"""The length network: predicts the remaining output length from a hidden state (Tetris §2.2)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from .length_bins import BIN_COUNT

PARAMETER_COUNT = 302_000
"""Approximate number of parameters, as in the paper. This number and the model's hidden size determine the
width of the network's hidden layer."""

MAX_STATE_MAGNITUDE = 1e4
"""Maximum magnitude of an entry of a hidden state. Larger entries are clipped, so that outliers do not
dominate."""


class LengthNetwork(nn.Module):
    """Predicts remaining output length from a hidden state with two linear layers.

    Hidden states are normalised, since their scale depends on the model. The number of generated tokens is a
    second input, which the paper's network has to infer. The initial weights depend only on ``seed``, because
    torch's global random state belongs to the engine. Raises ``ValueError`` for a hidden size below 1, or
    too large for the number of parameters.
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
        """Return scores (rows × ``BIN_COUNT``) whose softmax is the distribution of the remaining length.

        ``states``: rows × hidden size. ``written``: number of tokens generated so far, one per row."""
        seen = nn.functional.layer_norm(
            states.clamp(-MAX_STATE_MAGNITUDE, MAX_STATE_MAGNITUDE), (self.hidden_size,)
        )
        far = torch.log2(1.0 + written.float()).unsqueeze(1) / 8.0
        return cast(torch.Tensor, self.last(nn.functional.gelu(self.first(torch.cat([seen, far], dim=1)))))
