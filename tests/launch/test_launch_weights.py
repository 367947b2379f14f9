"""What weights a name stands for, and when that is certain before vLLM has looked."""

from __future__ import annotations

import json

import pytest
from sojourn_server.launch.weights import fingerprint, known_weights


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_directory_is_known_by_its_files(model, monkeypatch):
    known = known_weights(str(model))
    assert known == fingerprint(str(model), "any revision")
    assert known.startswith(f"{model} ")
    monkeypatch.chdir(model.parent)
    (model.parent / "link").symlink_to(model)
    assert known_weights("./model") == known_weights("link") == known
    (model / "config.json").write_text('{"model_type": "other"}')
    assert known_weights(str(model)) == known, "a configuration is no weights"
    (model / "model.safetensors").write_bytes(b"other weights")
    assert known_weights(str(model)) != known


def test_what_only_vllm_can_tell(model):
    assert fingerprint("org/name", "v1") == "org/name@v1"
    assert known_weights("org/name") is None
    for config in ("", "[]", '{"speculators_config": {}}'):
        (model / "config.json").write_text(config)
        assert known_weights(str(model)) is None, config
    (model / "config.json").unlink()
    assert known_weights(str(model)) is None


def test_a_single_file(model):
    file = model / "model.safetensors"
    assert fingerprint(str(file), None).startswith(f"{file} 7 ")
    assert known_weights(str(file)) is None
