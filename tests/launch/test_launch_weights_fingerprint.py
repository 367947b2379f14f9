"""What weights a name stands for, and when that is certain before vLLM has looked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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


def download(cache: Path, commit: str, *, file: str = "model.safetensors", ref: str = "main") -> Path:
    """As the hub's client leaves it."""
    folder = cache / "models--org--name"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name in ("config.json", file):
        (folder / "blobs" / f"{commit[:8]}{name[:1]}").write_text("{}")
        (folder / "snapshots" / commit / name).symlink_to(f"../../blobs/{commit[:8]}{name[:1]}")
    (folder / "refs" / ref).write_text(commit)
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


def test_questions_that_only_vllm_can_answer(model):
    assert known_weights("org/name") is None
    for config in ("", "[]", '{"speculators_config": {}}'):
        (model / "config.json").write_text(config)
        assert known_weights(str(model)) is None, config
    (model / "config.json").unlink()
    assert known_weights(str(model)) is None


def test_a_single_file(model):
    file = model / "model.safetensors"
    assert weights_fingerprint(str(file), None).startswith(f"{file} 7 ")
    assert known_weights(str(file)) is None


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


def test_another_form_of_a_commits_weights_is_distinguished(tmp_path):
    binary = download(tmp_path / "b", COMMIT, file="pytorch_model.bin")
    assert weights_fingerprint(str(binary), None) == f"org/name@{COMMIT} of .bin"
    both = binary / "model.safetensors"
    both.symlink_to("../../blobs/11111111p")
    assert weights_fingerprint("org/name", None, cache=tmp_path / "b") == f"org/name@{COMMIT}", (
        "as it is loaded then"
    )
