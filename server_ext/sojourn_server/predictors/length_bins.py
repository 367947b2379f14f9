"""Logarithmic bins of token counts: the classes of the length network."""

from __future__ import annotations

import torch

BIN_COUNT = 32
BINS_PER_DOUBLING = 2
"""Number of bins per doubling of the length. The last bin begins at 2^15.5 = 46,341 tokens and has no upper
limit; quantiles use 65,536 as its end."""

BIN_EDGES = tuple(2.0 ** (edge / BINS_PER_DOUBLING) for edge in range(BIN_COUNT + 1))
"""Bin i holds token counts from ``BIN_EDGES[i]`` up to, but not including, ``BIN_EDGES[i + 1]``."""


def bin_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return the bin index of each of ``tokens`` (≥ 1). Lengths beyond the last edge are in the last bin."""
    return torch.bucketize(tokens.float(), torch.tensor(BIN_EDGES[1:-1]), right=True)


def quantiles_of_bins(probabilities: torch.Tensor, points: int) -> torch.Tensor:
    """Return ``points`` equally likely token counts for each row of ``probabilities`` (rows × ``BIN_COUNT``).

    A row's distribution is divided into ``points`` equal parts; their medians are the counts, ascending.
    Within a bin, the logarithm of the length is assumed to be uniform.
    """
    rows = probabilities.shape[0]
    reached = probabilities.cumsum(dim=1)
    shares = (torch.arange(points) + 0.5) / points * reached[:, -1:]
    index = torch.searchsorted(reached, shares).clamp(max=BIN_COUNT - 1)
    before = torch.cat([torch.zeros(rows, 1), reached], dim=1).gather(1, index)
    within = (shares - before) / probabilities.gather(1, index).clamp(min=1e-9)
    return torch.exp2((index + within.clamp(0.0, 1.0)) / BINS_PER_DOUBLING)
