"""The network's size and inputs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sojourn_server.predictors.length_network import (  # noqa: E402
    BIN_COUNT,
    MAX_STATE_MAGNITUDE,
    PARAMETER_COUNT,
    LengthNetwork,
)


def states(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hidden_size", [576, 4096, 8192])
def test_it_is_as_large_as_the_papers_whatever_the_model(hidden_size: int) -> None:
    network = LengthNetwork(hidden_size)
    assert PARAMETER_COUNT == 302_000
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(PARAMETER_COUNT, rel=0.01)
    assert network(states(3, hidden_size), torch.tensor([0, 5, 900])).shape == (3, BIN_COUNT)


def test_only_the_direction_of_a_hidden_state_counts() -> None:
    network = LengthNetwork(64)
    seen, written = states(5, 64), torch.arange(5)
    scores = network(seen, written)
    for scale in (0.5, 30.0, 1000.0):
        assert torch.allclose(network(scale * seen, written), scores, atol=1e-3)
    assert torch.allclose(network(seen + 7.0, written), scores, atol=1e-3), "nor what all entries share"
    assert not torch.allclose(network(-seen, written), scores, atol=1e-2)


def test_one_wild_number_does_not_drown_the_others_nor_make_nonsense() -> None:
    wild = torch.full((1, 64), 3e38)
    wild[0, ::2] = -3e38
    cut = torch.full((1, 64), MAX_STATE_MAGNITUDE)
    cut[0, ::2] = -MAX_STATE_MAGNITUDE
    network, none = LengthNetwork(64), torch.tensor([0])
    assert torch.equal(network(wild, none), network(cut, none))
    assert bool(torch.isfinite(network(wild, none)).all())


def test_the_number_of_written_tokens_is_an_input() -> None:
    network, seen = LengthNetwork(64), states(1, 64)
    assert not torch.allclose(
        network(seen, torch.tensor([0])), network(seen, torch.tensor([5000])), atol=1e-3
    )
