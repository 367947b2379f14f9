"""Lengths in bins, and back: against counting, and against walking along the shares. The network's size and
inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sojourn_server.predictors.length_network import (  # noqa: E402
    BIN_COUNT,
    BIN_EDGES,
    MAX_STATE_MAGNITUDE,
    PARAMETER_COUNT,
    LengthNetwork,
    bin_of,
    quantiles_of_bins,
)


@given(st.integers(1, 200_000))
def test_each_number_is_in_the_bin_whose_edges_hold_it(tokens: int) -> None:
    # Edges that it has reached, exactly: edge i squared is 2^i.
    reached = sum(tokens * tokens >= 2**edge for edge in range(1, BIN_COUNT))
    assert bin_of(torch.tensor([tokens])).tolist() == [min(BIN_COUNT - 1, reached)]


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


# -- the network ---------------------------------------------------------------------------------


def states(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hidden_size", [576, 4096, 8192])
def test_it_is_as_large_as_the_papers_whatever_the_model(hidden_size: int) -> None:
    network = LengthNetwork(hidden_size)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(PARAMETER_COUNT, rel=0.01)
    assert network(states(3, hidden_size), torch.tensor([0, 5, 900])).shape == (3, BIN_COUNT)


def test_the_direction_of_a_hidden_state_counts_and_no_other_property() -> None:
    network = LengthNetwork(64)
    seen, written = states(5, 64), torch.arange(5)
    scores = network(seen, written)
    for scale in (0.5, 30.0, 1000.0):
        assert torch.allclose(network(scale * seen, written), scores, atol=1e-3)
    assert torch.allclose(network(seen + 7.0, written), scores, atol=1e-3), "nor what all entries share"
    assert not torch.allclose(network(-seen, written), scores, atol=1e-2)
    assert not torch.allclose(network(seen, 1000 * written), scores, atol=1e-3), "so does what is written"


def test_one_wild_number_does_not_drown_the_others_nor_make_nonsense() -> None:
    wild = torch.full((1, 64), 3e38)
    wild[0, ::2] = -3e38
    cut = torch.full((1, 64), MAX_STATE_MAGNITUDE)
    cut[0, ::2] = -MAX_STATE_MAGNITUDE
    network, none = LengthNetwork(64), torch.tensor([0])
    assert torch.equal(network(wild, none), network(cut, none))
    assert bool(torch.isfinite(network(wild, none)).all())
