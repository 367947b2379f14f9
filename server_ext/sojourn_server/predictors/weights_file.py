"""Saves and loads a trained length network as a safetensors file, between runs of the engine."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save

from .length_network import BIN_COUNT, LengthNetwork
from .weights_format import FORMAT, VERSION, WeightsError, read_weights_metadata


def save_weights(path: Path, network: LengthNetwork, *, model: str, examples: int) -> None:
    """Write the network's weights and metadata to ``path``, atomically. Raises ``OSError``."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "hidden_size": str(network.hidden_size),
        "bins": str(BIN_COUNT),
        "examples": str(examples),
    }
    content = save({name: value.contiguous() for name, value in network.state_dict().items()}, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def load_weights(path: Path, *, model: str, hidden_size: int) -> LengthNetwork | None:
    """Load the saved network of ``model``; ``None`` if the file does not exist yet. Raises ``WeightsError``
    for a file that cannot be read, or is of another model or format."""
    metadata = read_weights_metadata(path)
    if not metadata:
        return None
    expected = {"model": model, "hidden_size": str(hidden_size), "bins": str(BIN_COUNT)}
    for what, value in expected.items():
        if metadata.get(what) != value:
            raise WeightsError(
                f"{path} has {what.replace('_', ' ')} {metadata.get(what)!r}; expected {value!r}. "
                "Name another file for this model"
            )
    network = LengthNetwork(hidden_size)
    network.load_state_dict(load_file(path))
    return network
