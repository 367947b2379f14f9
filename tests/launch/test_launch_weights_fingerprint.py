"""What weights a name stands for, and when that is certain before vLLM has looked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sojourn_server.launch import weights_fingerprint as module
from sojourn_server.launch.weights_fingerprint import UnknownWeights, known_weights, weights_fingerprint

os_pread = os.pread
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


def test_a_single_file(model):
    file = model / "model.safetensors"
    assert weights_fingerprint(str(file), None).startswith(f"{file} 7 ")
    assert known_weights(str(file)) is None


def write_weights(path: Path, fills: list[int], *, size: int = 50_000) -> None:
    """Tensors of ``size`` bytes each, with one value each, in a file of always the same date."""
    entries = {f"t{n}": {"data_offsets": [n * size, (n + 1) * size]} for n in range(len(fills))}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    start = len(header).to_bytes(8, "little") + header if path.suffix == ".safetensors" else b""
    path.write_bytes(start + b"".join(bytes([fill]) * size for fill in fills))
    os.utime(path, (1, 1))


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.gguf"])
def test_weights_of_equal_size_and_date_are_distinguished(model, name):
    """Reproducible images give all files one date. Training may change one tensor, here not the last."""
    file = model / name
    fills = [1] * 40
    write_weights(file, fills)
    known, alone = known_weights(str(model)), weights_fingerprint(str(file), None)
    for changed in (0, 17, 39):
        write_weights(file, [*fills[:changed], 2, *fills[changed + 1 :]])
        assert known_weights(str(model)) != known
        assert weights_fingerprint(str(file), None) != alone
    write_weights(file, fills)
    assert (known_weights(str(model)), weights_fingerprint(str(file), None)) == (known, alone)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, (9).to_bytes(8, "little") + b'{"t": {}}'])
def test_a_damaged_safetensors_file_is_read_as_any_other(model, content):
    (model / "model.safetensors").write_bytes(content)
    assert known_weights(str(model)) == known_weights(str(model)) is not None


def test_little_of_large_files_is_read(model, monkeypatch):
    write_weights(model / "model.safetensors", [1] * 3000, size=2000)
    monkeypatch.setattr(module, "MAX_SAMPLES", 100)
    read = []
    monkeypatch.setattr(module.os, "pread", lambda *call: read.append(call[1]) or os_pread(*call))
    assert known_weights(str(model)) is not None
    assert 100 <= len(read) <= 250


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


def test_a_commits_weights_in_an_older_format_are_others(hub):
    """A conversion may have changed them. vLLM reads them where there are no safetensors."""
    there = hub / "models--org--name/snapshots" / COMMIT
    (there / "pytorch_model.bin").symlink_to((there / "model.safetensors").readlink())
    assert weights_fingerprint("org/name", None, cache=hub) == f"org/name@{COMMIT}"
    (there / "model.safetensors").unlink()
    for name in ("org/name", str(there)):
        assert weights_fingerprint(name, None, cache=hub) == f"org/name@{COMMIT}.bin"


def test_added_files_in_a_snapshot_are_distinguished(hub, tmp_path):
    there = hub / "models--org--name/snapshots" / COMMIT
    (there / "model.safetensors").unlink()
    (there / "model.safetensors").write_bytes(b"trained on")
    assert weights_fingerprint(str(there), None).startswith(f"{there} [('model.safetensors', 10, ")
    assert weights_fingerprint("org/name", None, cache=hub).startswith(f"org/name@{COMMIT} {there} [(")
