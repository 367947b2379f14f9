"""The length network: predicts the remaining output length from a hidden state, in bins (Tetris §2.2). A
safetensors file keeps it between runs of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from sojourn.errors import InputError
from torch import nn

from ..traces.atomic_files import write_atomically

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

    A row's distribution is divided into ``points`` parts of equal probability. The counts are the medians of
    these parts, ascending. Within a bin, the logarithm of the length is assumed to be uniform.
    """
    rows = probabilities.shape[0]
    reached = probabilities.cumsum(dim=1)
    shares = (torch.arange(points) + 0.5) / points * reached[:, -1:]
    index = torch.searchsorted(reached, shares).clamp(max=BIN_COUNT - 1)
    before = torch.cat([torch.zeros(rows, 1), reached], dim=1).gather(1, index)
    within = (shares - before) / probabilities.gather(1, index).clamp(min=1e-9)
    return torch.exp2((index + within.clamp(0.0, 1.0)) / BINS_PER_DOUBLING)


PARAMETER_COUNT = 302_000
"""Approximate number of parameters, as in the Tetris paper. This number and the model's hidden size determine
the width of the network's hidden layer."""

MAX_STATE_MAGNITUDE = 1e4
"""Maximum magnitude of an entry of a hidden state. Larger entries are clipped, so that outliers do not
dominate."""


class LengthNetwork(nn.Module):
    """Predicts remaining output length from a hidden state with two linear layers.

    Hidden states are normalised, since their scale depends on the model. The number of generated tokens is a
    second input, which the paper's network has to infer. The initial weights depend only on ``seed``, because
    torch's global random state belongs to the engine.
    """

    def __init__(self, hidden_size: int, *, seed: int = 0) -> None:
        super().__init__()
        width = round((PARAMETER_COUNT - BIN_COUNT) / (hidden_size + 2 + BIN_COUNT))
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


FORMAT = "sojourn-output-lengths"
VERSION = "1"


class WeightsError(InputError):
    """A weights file is unusable. The message says what was found and what was expected."""


def save_weights(path: Path, network: LengthNetwork, *, model: str, examples: int) -> None:
    """Write the network's weights and metadata to ``path``, atomically. Raises ``OSError``."""
    metadata = {**_identity(model, network.hidden_size), "examples": str(examples)}
    content = save({name: value.contiguous() for name, value in network.state_dict().items()}, metadata)
    write_atomically({path: content})


def load_weights(path: Path, *, model: str, hidden_size: int) -> LengthNetwork | None:
    """Load the saved network of ``model``; ``None`` if the file does not exist yet. Raises ``WeightsError``
    for a file that cannot be read, or is of another model or format."""
    try:
        with safe_open(path, framework="numpy") as file:
            found = file.metadata() or {}
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: {error}; expected weights that sojourn saved, or no file") from error
    for what, value in _identity(model, hidden_size).items():
        if found.get(what) != value:
            raise WeightsError(
                f"{path} has {what.replace('_', ' ')} {found.get(what)!r}; expected {value!r}. "
                "Name another file for this model"
            )
    network = LengthNetwork(hidden_size)
    network.load_state_dict(load_file(path))
    return network


def _identity(model: str, hidden_size: int) -> dict[str, str]:
    """Return the metadata that a file must have to be loaded."""
    return {
        "format": FORMAT, "version": VERSION, "model": model, "hidden_size": str(hidden_size),
        "bins": str(BIN_COUNT),
    }  # fmt: skip
