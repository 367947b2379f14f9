"""Which weights a model's name stands for, told without loading it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

LOOKED_AT_BYTES = 1 << 16
"""Of the end of each file of weights; the beginning of two of one shape is the same."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ_FIRST = (".safetensors", ".bin", ".pt")
"""A commit may have the same weights in several forms, and a snapshot one of them. Are they the same? Nobody
says so."""


class UnknownWeights(ValueError):
    """A name may stand for other weights elsewhere, or tomorrow; the text says what to give in its place."""


def fingerprint(
    model: str, revision: str | None, *, cache: Path | None = None, since_s: float | None = None
) -> str:
    """The weights' name and what tells them from any others that this name may stand for.

    Of a directory or file its path, and the files' sizes and dates. Of a hub's id its commit: that of the
    snapshot in ``cache``, the hub's folder on this machine, which has been loaded from there; ``None``: it
    is not known where. Of a snapshot's own path the same, so that all copies of one commit are alike.
    ``since_s`` is the Unix time since when a revision that has moved may have been loaded as it was before;
    ``None``: now is believed. Raises ``UnknownWeights`` and ``OSError``.
    """
    path = Path(model)
    if path.is_file():
        return f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
    if path.is_dir():
        return _commit_of(path) or f"{path.resolve()} {_sizes_and_dates(_weights(path))}"
    if path.is_absolute():  # none of a hub, and not there: the engine says so
        return f"{model}@{revision}"
    commit = revision if revision and _COMMIT.fullmatch(revision) else None
    if commit is None:
        commit = _loaded_commit(model, revision, cache, since_s)
    snapshot = _hub_folder(cache, model) / "snapshots" / commit if cache is not None else None
    if snapshot is None or not snapshot.is_dir():
        return f"{model}@{commit}"
    if _commit_of(snapshot) is None:  # somebody has put files of his own there
        return f"{model}@{commit} {snapshot.resolve()} {_sizes_and_dates(_weights(snapshot))}"
    return f"{model}@{commit}{_kind_of_files(snapshot)}"


def _loaded_commit(model: str, revision: str | None, cache: Path | None, since_s: float | None) -> str:
    """What a branch, or none, stood for when the engine loaded it. Raises ``UnknownWeights``."""
    advice = "give --revision and a full commit, or the path of a copy"
    name = f"{model} at {revision or 'no revision'}"
    if cache is None:
        raise UnknownWeights(f"which weights {name} are is not known; {advice}")
    folder = _hub_folder(cache, model)
    ref = folder / "refs" / (revision or "main")
    try:
        commit, moved_s = ref.read_text(encoding="utf-8").strip(), ref.stat().st_mtime
        loaded = [each.name for each in (folder / "snapshots").iterdir() if each.is_dir() and _weights(each)]
    except (OSError, ValueError) as error:
        raise UnknownWeights(f"no snapshot of {name} is in {cache}: {error}; {advice}") from None
    if not _COMMIT.fullmatch(commit) or commit not in loaded:
        raise UnknownWeights(f"{cache} has no weights of {name}, which is {commit[:40]!r} there; {advice}")
    if len(loaded) > 1 and since_s is not None and moved_s >= since_s:
        raise UnknownWeights(
            f"{name} came to be another commit while this engine started, and it may have loaded either; "
            f"start it again, or {advice}"
        )
    return commit


def _hub_folder(cache: Path, model: str) -> Path:
    """Where a hub's cache has a model. What follows a colon chooses files of it."""
    return cache / f"models--{model.partition(':')[0].replace('/', '--')}"


def _commit_of(folder: Path) -> str | None:
    """Name and commit, where this is a snapshot in a hub's cache as the hub's client leaves one: each file
    of weights a link to one that is named by its contents. ``None``: it is something else."""
    path = Path(os.path.abspath(folder))
    if path.is_symlink():
        path = path.resolve()
    hub = path.parent.parent
    if path.parent.name != "snapshots" or not _COMMIT.fullmatch(path.name):
        return None
    if not hub.name.startswith("models--"):
        return None
    blobs = (hub / "blobs").resolve()
    weights = _weights(path)
    if not weights or not all(file.is_symlink() and file.resolve().parent == blobs for file in weights):
        return None
    return f"{hub.name.removeprefix('models--').replace('--', '/')}@{path.name}{_kind_of_files(path)}"


def _kind_of_files(snapshot: Path) -> str:
    """Which of a commit's files an engine reads where it is let choose; empty: safetensors, as most do."""
    kinds = {file.suffix for file in _weights(snapshot)}
    return next(
        (f" of {kind}" if at else "" for at, kind in enumerate(_READ_FIRST) if kind in kinds), " of others"
    )


def _sizes_and_dates(files: list[Path]) -> list[tuple[str, int, int]]:
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


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
