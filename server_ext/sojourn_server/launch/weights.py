"""Which weights a model's name stands for, told without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

LOOKED_AT_BYTES = 1 << 16
"""Of the end of each file of weights; the beginning of two of one shape is the same."""


def fingerprint(model: str, revision: str | None) -> str:
    """The weights' name and revision; of a directory or file also the files' sizes and dates.

    Raises ``OSError``.
    """
    path = Path(model)
    if path.is_file():
        return f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
    if not path.is_dir():
        return f"{model}@{revision}"
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _weights(path)]
    return f"{path.resolve()} {stats}"


def contents(folder: Path) -> str:
    """What tells the weights in a folder from others of the same shapes, wherever they lie: a hash of their
    files' names, sizes and last ``LOOKED_AT_BYTES``. Raises ``OSError``."""
    found = hashlib.sha256()
    for file in _weights(folder):
        size = file.stat().st_size
        found.update(f"{file.name} {size} ".encode())
        with file.open("rb") as weights:
            weights.seek(max(0, size - LOOKED_AT_BYTES))
            found.update(weights.read(LOOKED_AT_BYTES))
    return found.hexdigest()[:16]


def _weights(folder: Path) -> list[Path]:
    """A model's files but for those that describe it."""
    texts = (".json", ".txt", ".md")
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix not in texts)


def known_weights(model: str) -> str | None:
    """The ``fingerprint`` that an engine started on ``model`` will have, or ``None`` where that is open.

    Only a directory's is certain: vLLM may put the path of its own copy in the place of a hub id, and for
    a directory that holds a draft model it loads the model which that drafts for.
    """
    path = Path(model)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "speculators_config" in config:
            return None
        return fingerprint(model, None)
    except (OSError, ValueError):  # the engine will say what is wrong with it
        return None
