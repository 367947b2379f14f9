"""Identifies a model's weights, and its processor of images, video and sound, without loading them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from .model_config import read_model_config

MAX_SAMPLES = 8192
SAMPLE_BYTES = 256
HEAD_BYTES = 1 << 20
"""Of the weight files ``MAX_SAMPLES`` samples at equal distances are hashed, and ``HEAD_BYTES`` at the
beginning of each file. The distance in 16 GB is 2 MB: each matrix has a sample. Reading them takes a second
on a local disk."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


class UnknownWeights(ValueError):
    """The model name does not identify fixed weights. The error's text says what to give instead."""


def weights_fingerprint(
    model: str, revision: str | None, *, cache: Path | None = None, since_s: float | None = None
) -> str:
    """Return a text that identifies the weights. Raises ``UnknownWeights`` or ``OSError``.

    For a directory or file, the text has its path, the sizes and dates of its files, and a hash of samples of
    their content. For a hub id or the path of a snapshot, the text has the name and the commit. So all copies
    of a commit have the same text.

    ``revision``: branch or commit of a hub id; ``None`` for main. ``cache``: the hub's cache on this machine,
    which knows the commit of each branch; ``None`` if unknown.
    ``since_s``: the engine's start in Unix time; ``None`` for no check. If ``cache`` has several commits of
    the model, and the branch got a new commit after ``since_s``, raises ``UnknownWeights``: the engine may
    have loaded either.
    """
    path = Path(model)
    if path.exists():
        return _commit_of(path) or _dated(path)
    if path.is_absolute():  # a missing path; the engine reports it
        return f"{model}@{revision}"
    commit = revision if revision and _COMMIT.fullmatch(revision) else None
    if commit is None:
        commit = _loaded_commit(model, revision, cache, since_s)
    snapshot = _hub_folder(cache, model) / "snapshots" / commit if cache is not None else None
    if snapshot is None or not snapshot.is_dir() or _commit_of(snapshot) is not None:
        return f"{model}@{commit}"
    return f"{model}@{commit} {_dated(snapshot)}"  # the snapshot has files of another origin


def _loaded_commit(model: str, revision: str | None, cache: Path | None, since_s: float | None) -> str:
    """Return the commit that the engine has loaded of the branch ``revision`` (``None`` for main). ``cache``:
    the hub's cache. ``since_s``: the engine's start in Unix time. Raises ``UnknownWeights``."""
    advice = "give --revision and a full commit, or the path of a copy"
    name = f"{model} at {revision or 'no revision'}"
    if cache is None:
        raise UnknownWeights(f"the weights of {name} are unknown; {advice}")
    folder = _hub_folder(cache, model)
    ref = folder / "refs" / (revision or "main")
    try:
        commit, moved_s = ref.read_text(encoding="utf-8").strip(), ref.stat().st_mtime
        loaded = [
            each.name for each in (folder / "snapshots").iterdir() if each.is_dir() and _weight_files(each)
        ]
    except (OSError, ValueError) as error:
        raise UnknownWeights(f"no snapshot of {name} is in {cache}: {error}; {advice}") from None
    if not _COMMIT.fullmatch(commit) or commit not in loaded:
        raise UnknownWeights(f"{cache} has no weights of {name}, commit {commit[:40]!r}; {advice}")
    if len(loaded) > 1 and since_s is not None and moved_s >= since_s:
        raise UnknownWeights(
            f"{name} changed its commit while this engine started, and the engine may have loaded either; "
            f"start it again, or {advice}"
        )
    return commit


def _hub_folder(cache: Path, model: str) -> Path:
    """Return the model's folder in the hub's cache. The part of ``model`` after a colon is ignored."""
    return cache / f"models--{model.partition(':')[0].replace('/', '--')}"


def _commit_of(folder: Path) -> str | None:
    """Return a text with name and commit for an unchanged snapshot in a hub's cache; ``None`` for any other
    folder. In an unchanged snapshot, each weight file is a link to a blob."""
    path = Path(os.path.abspath(folder))
    path = path.resolve() if path.is_symlink() else path
    named = re.fullmatch(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})", path.as_posix())
    if named is None:
        return None
    blobs, weights = (path.parent.parent / "blobs").resolve(), _weight_files(path)
    if not weights or not all(file.is_symlink() and file.resolve().parent == blobs for file in weights):
        return None
    return f"{named[1].replace('--', '/')}@{named[2]}"


def weights_digest(folder: Path) -> str:
    """Return a hash of a folder's weight files: of their names, sizes and samples of their content.

    The hash does not depend on the folder's path. It tells models of the same shape apart. Raises
    ``OSError``.
    """
    found, files = hashlib.sha256(), _weight_files(folder)
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode() + file.read(HEAD_BYTES))
            for at in range(0, size, size * len(files) // MAX_SAMPLES + 1):
                found.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    return found.hexdigest()[:16]


def processor_digest(model: str) -> str:
    """Return a hash of the files that say how images, video and sound become a model's input, for example
    ``preprocessor_config.json``; empty if there are no such files. Raises ``OSError``.

    The result is also empty for a hub id or a snapshot, because its commit identifies these files.
    """
    folder = Path(model)
    if not folder.is_dir() or _commit_of(folder) is not None:
        return ""
    files = sorted({*folder.glob("*processor_config.json"), *folder.glob("tekken.json")})
    found = [(path.name, path.read_bytes()) for path in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else ""


def _dated(folder: Path) -> str:
    """Return a text with the path, the sizes and dates of the weight files, and a hash of samples of them."""
    stats = [(file.name, file.stat()) for file in _weight_files(folder)]
    dates = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return f"{folder.resolve()} {dates} {weights_digest(folder)}"


def _weight_files(model: Path) -> list[Path]:
    """Return the sorted weight files in a model's folder, without configuration and text files. A model may
    also be a single file."""
    files, texts = [model] if model.is_file() else model.iterdir(), (".json", ".txt", ".md")
    return sorted(file for file in files if file.is_file() and file.suffix not in texts)


def known_weights(model: str) -> str | None:
    """Return the ``weights_fingerprint`` that an engine with this ``model`` will have; ``None`` if unknown.

    It is known only for directories, because vLLM may replace a hub id by the path of its own copy. It is
    unknown for a directory with speculator weights, because vLLM then loads the target model that they name.
    """
    try:
        config = read_model_config(model) if Path(model).is_dir() else None
        if config is None or "speculators_config" in config:
            return None
        return weights_fingerprint(model, None)
    except (OSError, ValueError):  # the engine reports the error
        return None
