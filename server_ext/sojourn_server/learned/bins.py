"""Numbers of tokens in bins that grow evenly in the logarithm: what the network tells apart."""

from __future__ import annotations

import torch

BINS = 32
BINS_A_DOUBLING = 2
"""The last bin begins at 2^15.5 = 46,341 tokens, and ends nowhere: 65,536 is taken for its end."""

EDGES = tuple(2.0 ** (edge / BINS_A_DOUBLING) for edge in range(BINS + 1))
"""Bin i holds from ``EDGES[i]`` up to below ``EDGES[i + 1]`` tokens."""


def bin_of(tokens: torch.Tensor) -> torch.Tensor:
    """The bin of each number of ``tokens`` ≥ 1; beyond the last edge the last."""
    return torch.bucketize(tokens.float(), torch.tensor(EDGES[1:-1]), right=True)


def quantiles(probabilities: torch.Tensor, points: int) -> torch.Tensor:
    """Of each row of ``probabilities`` (rows × ``BINS``, each sums to 1) the ``points`` equally likely
    numbers of tokens, ascending: the middles of as many equal shares. Within a bin the logarithm is taken
    to be even.
    """
    rows = probabilities.shape[0]
    reached = probabilities.cumsum(dim=1)
    shares = (torch.arange(points) + 0.5) / points * reached[:, -1:]
    index = torch.searchsorted(reached, shares).clamp(max=BINS - 1)
    before = torch.cat([torch.zeros(rows, 1), reached], dim=1).gather(1, index)
    within = (shares - before) / probabilities.gather(1, index).clamp(min=1e-9)
    return torch.exp2((index + within.clamp(0.0, 1.0)) / BINS_A_DOUBLING)
