"""A network comes back as it was; whatever else lies there is refused by name and left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sojourn_server.predictors.length_network import (  # noqa: E402
    LengthNetwork,
    WeightsError,
    load_weights,
    save_weights,
)

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
