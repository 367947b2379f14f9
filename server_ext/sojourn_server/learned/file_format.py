"""What a file of weights says of itself, read without torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

FORMAT = "sojourn-output-lengths"
VERSION = "1"


class WeightsError(ValueError):
    """A file that cannot be used; the text names it, what it holds, and what was expected."""


def told(path: Path) -> dict[str, str]:
    """What a file says of its network; empty where there is no file yet. Raises ``WeightsError`` for one that
    is none of ours."""
    try:
        with safe_open(path, framework="numpy") as file:
            says: dict[str, str] = file.metadata() or {}
    except FileNotFoundError:
        return {}
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: {error}; expected weights that sojourn saved, or no file") from error
    for what, value in (("format", FORMAT), ("version", VERSION)):
        if says.get(what) != value:
            raise WeightsError(f"{path} has {what} {says.get(what)!r}; expected {value!r}. Name another file")
    return says
