"""Lengths in bins, and back: against counting, and against walking along the shares."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sojourn_server.predictors.length_network import BIN_COUNT, BIN_EDGES, bin_of, quantiles_of_bins  # noqa: E402


def the_bin(tokens: int) -> int:
    return int(bin_of(torch.tensor([tokens]))[0])


def counted(tokens: int) -> int:
    """Edges that it has reached, exactly: edge i squared is 2^i."""
    return min(BIN_COUNT - 1, sum(tokens * tokens >= 2**edge for edge in range(1, BIN_COUNT)))


def test_a_bin_ends_where_the_next_begins_and_two_make_a_doubling() -> None:
    assert len(BIN_EDGES) == BIN_COUNT + 1
    assert (BIN_EDGES[0], BIN_EDGES[2], BIN_EDGES[-1]) == (1.0, 2.0, 65536.0)
    assert all(later / edge == pytest.approx(math.sqrt(2)) for edge, later in pairwise(BIN_EDGES))


@given(st.integers(1, 200_000))
def test_each_number_is_in_the_bin_whose_edges_hold_it(tokens: int) -> None:
    assert the_bin(tokens) == counted(tokens)


# -- quantiles ---------------------------------------------------------------------------------


def naive(probabilities: list[float], points: int, shift: float) -> list[float]:
    """Walk along the bins until the share, or ``shift`` more, is reached; in a bin the logarithm is even."""
    found = []
    for point in range(points):
        left = (point + 0.5) / points + shift
        index = 0
        while index < BIN_COUNT - 1 and left > probabilities[index]:
            left -= probabilities[index]
            index += 1
        within = left / probabilities[index] if probabilities[index] else 0.0
        found.append(2.0 ** ((index + min(1.0, max(0.0, within))) / 2))
    return found


weights = st.lists(st.integers(0, 1000), min_size=BIN_COUNT, max_size=BIN_COUNT).filter(any)


@given(weights, st.integers(1, 12))
def test_quantiles_are_those_of_one_that_walks(parts: list[int], points: int) -> None:
    row = torch.tensor([parts], dtype=torch.float64)
    row /= row.sum()
    (found,) = quantiles_of_bins(row.float(), points).tolist()
    # Where a share ends at a bin's edge and empty bins follow, either side of the gap is right.
    lower, upper = (naive(row[0].tolist(), points, shift) for shift in (-1e-5, 1e-5))
    for value, least, most in zip(found, lower, upper, strict=True):
        assert least * (1 - 1e-3) <= value <= most * (1 + 1e-3)
    assert found == sorted(found)
    assert found[0] >= 1.0
    assert found[-1] <= BIN_EDGES[-1]
