"""Reads the metadata of a weights file without torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from sojourn.errors import InputError

FORMAT = "sojourn-output-lengths"
VERSION = "1"


class WeightsError(InputError):
    """A weights file is unusable. The message says what was found and what was expected."""


def read_weights_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a weights file; empty if the file does not exist yet. Raises ``WeightsError``
    for a file that cannot be read or is of another format."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except FileNotFoundError:
        return {}
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: {error}; expected weights that sojourn saved, or no file") from error
    for what, value in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(what) != value:
            raise WeightsError(
                f"{path} has {what} {metadata.get(what)!r}; expected {value!r}. Name another file"
            )
    return metadata
