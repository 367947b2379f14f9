"""Saves and loads a trained length network as a safetensors file, between runs of the engine."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from sojourn.errors import InputError

from ..traces.atomic_files import write_atomically
from .length_network import BIN_COUNT, LengthNetwork

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
