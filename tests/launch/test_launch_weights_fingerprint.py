"""What weights a name stands for, and when that is certain before vLLM has looked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from sojourn_server.launch import weights_fingerprint as module
from sojourn_server.launch.weights_fingerprint import UnknownWeights, known_weights, weights_fingerprint

COMMIT, NEWER = "1" * 40, "2" * 40


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def hub(tmp_path):
    """A hub's cache, in which ``main`` of org/name stands for ``COMMIT``."""
    cache = tmp_path / "hub"
    download(cache, COMMIT)
    return cache


def download(cache: Path, commit: str) -> Path:
    """As the hub's client leaves it."""
    folder = cache / "models--org--name"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / "blobs" / f"{commit[:8]}{name[:1]}").write_text("{}")
        (folder / "snapshots" / commit / name).symlink_to(f"../../blobs/{commit[:8]}{name[:1]}")
    (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


def test_a_directory_is_known_by_its_files(model, monkeypatch):
    known = known_weights(str(model))
    assert known == weights_fingerprint(str(model), "any revision")
    assert known.startswith(f"{model} ")
    monkeypatch.chdir(model.parent)
    (model.parent / "link").symlink_to(model)
    assert known_weights("./model") == known_weights("link") == known
    (model / "config.json").write_text('{"model_type": "other"}')
    assert known_weights(str(model)) == known, "a configuration is no weights"
    (model / "model.safetensors").write_bytes(b"other weights")
    assert known_weights(str(model)) != known


def write_weights(path: Path, fills: list[int]) -> None:
    """Tensors of 100,000 bytes each, with one value each, in a file of always the same date."""
    path.write_bytes(b"".join(bytes([fill]) * 100_000 for fill in fills))
    os.utime(path, (1, 1))


def test_weights_of_equal_size_and_date_are_distinguished_by_few_samples(model, monkeypatch):
    """Reproducible images give all files one date. Training may change one tensor."""
    monkeypatch.setattr(module, "MAX_SAMPLES", 100)
    read, file, fills = Mock(wraps=os.pread), model / "model.gguf", [1] * 40
    monkeypatch.setattr(module.os, "pread", read)
    write_weights(file, fills)
    known, alone = known_weights(str(model)), weights_fingerprint(str(file), None)
    assert read.call_count <= 2 * module.MAX_SAMPLES
    assert known_weights(str(file)) is None, "its configuration is in the file"
    for changed in (0, 17, 39):
        write_weights(file, [*fills[:changed], 2, *fills[changed + 1 :]])
        assert known_weights(str(model)) != known
        assert weights_fingerprint(str(file), None) != alone
    write_weights(file, fills)
    assert (known_weights(str(model)), weights_fingerprint(str(file), None)) == (known, alone)


def test_a_hubs_id_is_known_by_the_commit_that_was_loaded(hub):
    was = weights_fingerprint("org/name", None, cache=hub)
    assert was == f"org/name@{COMMIT}"
    assert weights_fingerprint("org/name", "main", cache=hub) == was
    assert weights_fingerprint("org/name", COMMIT, cache=hub) == was
    assert weights_fingerprint("org/name", COMMIT) == was, "a commit is the same everywhere"
    download(hub, NEWER)
    assert weights_fingerprint("org/name", None, cache=hub) == f"org/name@{NEWER}", "the hub's main has moved"
    assert weights_fingerprint("org/name", COMMIT, cache=hub) == was


def test_a_name_that_may_stand_for_any_weights_is_refused(hub, tmp_path):
    with pytest.raises(UnknownWeights, match=r"org/name at no revision.*--revision and a full commit"):
        weights_fingerprint("org/name", None)
    with pytest.raises(UnknownWeights, match="no snapshot of org/name at v1"):
        weights_fingerprint("org/name", "v1", cache=hub)
    with pytest.raises(UnknownWeights, match="no snapshot of org/other"):
        weights_fingerprint("org/other", None, cache=hub)
    (hub / "models--org--name/snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(UnknownWeights, match="has no weights of org/name"):
        weights_fingerprint("org/name", None, cache=hub)


def test_a_snapshots_path_is_its_commit_wherever_it_lies(hub, tmp_path):
    there = hub / "models--org--name/snapshots" / COMMIT
    other = download(tmp_path / "elsewhere", COMMIT)
    assert (
        weights_fingerprint(str(there), None) == weights_fingerprint(str(other), None) == f"org/name@{COMMIT}"
    )
    (tmp_path / "link").symlink_to(there)
    assert known_weights(str(tmp_path / "link")) == f"org/name@{COMMIT}"


def test_added_files_in_a_snapshot_are_distinguished(hub, tmp_path):
    there = hub / "models--org--name/snapshots" / COMMIT
    (there / "model.safetensors").unlink()
    (there / "model.safetensors").write_bytes(b"trained on")
    assert weights_fingerprint(str(there), None).startswith(f"{there} [('model.safetensors', 10, ")
    assert weights_fingerprint("org/name", None, cache=hub).startswith(f"org/name@{COMMIT} {there} [(")
