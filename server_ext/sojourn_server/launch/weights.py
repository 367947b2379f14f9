"""Which weights a model's name stands for, told without loading it."""

from __future__ import annotations

import json
from pathlib import Path


def fingerprint(model: str, revision: str | None) -> str:
    """The weights' name and revision; of a directory or file also the files' sizes and dates.

    Raises ``OSError``.
    """
    path = Path(model)
    if path.is_file():
        return f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
    if not path.is_dir():
        return f"{model}@{revision}"
    files = sorted(file for file in path.iterdir() if file.suffix not in (".json", ".txt", ".md"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{path.resolve()} {stats}"


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
