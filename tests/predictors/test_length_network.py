"""Lengths in bins, and back: against counting, and against walking along the shares. The network's size,
inputs and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sojourn_server.predictors.length_network import (  # noqa: E402
    BIN_COUNT,
    BIN_EDGES,
    MAX_STATE_MAGNITUDE,
    PARAMETER_COUNT,
    LengthNetwork,
    WeightsError,
    bin_of,
    load_weights,
    quantiles_of_bins,
    save_weights,
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


# -- its file: a network comes back as it was; whatever else lies there is refused by name and left alone


HIDDEN = 48


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths"
    save_weights(path, LengthNetwork(HIDDEN, seed=7), model="org/m", examples=321)
    return path


def says(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return dict(opened.metadata())


def rewritten(path: Path, **changed: str | None) -> None:
    """The same weights with other words."""
    words = {key: value for key, value in {**says(path), **changed}.items() if value is not None}
    save_file(dict(LengthNetwork(HIDDEN).state_dict()), path, words)


def test_a_network_comes_back_as_it_was(file: Path) -> None:
    random_numbers = torch.get_rng_state()
    back = load_weights(file, model="org/m", hidden_size=HIDDEN)
    assert torch.equal(torch.get_rng_state(), random_numbers), "which are the engine's"
    assert back is not None
    for ours, its in zip(back.parameters(), LengthNetwork(HIDDEN, seed=7).parameters(), strict=True):
        assert torch.equal(ours, its)
    assert all(parameter.requires_grad for parameter in back.parameters())
    assert says(file)["examples"] == "321"
    assert load_weights(file.with_name("other"), model="org/m", hidden_size=HIDDEN) is None, "not there yet"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: rewritten(path, model="org/other"), "model 'org/other'; expected 'org/m'"),
        (lambda path: rewritten(path, hidden_size="64"), "hidden size '64'; expected '48'"),
        (lambda path: rewritten(path, version="2"), "version '2'; expected '1'"),
        (lambda path: rewritten(path, bins="64"), "bins '64'; expected '32'"),
        (lambda path: rewritten(path, format=None), "format None; expected 'sojourn-output-lengths'"),
        (lambda path: path.write_bytes(b"\xff" * 4096), "expected weights that sojourn saved, or no file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "expected weights that sojourn saved"),
    ],
)
def test_what_is_not_this_models_is_refused_with_what_was_found_and_expected(
    file: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(file)
    before = file.read_bytes()
    with pytest.raises(WeightsError, match=message) as refused:
        load_weights(file, model="org/m", hidden_size=HIDDEN)
    assert str(file) in str(refused.value)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
