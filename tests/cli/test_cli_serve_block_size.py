"""``sojourn serve --role`` beside a store of engines with another ``--block-size``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn_server.cli import build_app, console
from sojourn_server.kv_offload.block_file import KvIdentity
from sojourn_server.kv_offload.shared_store import SharedStore
from sojourn_server.launch.weights_fingerprint import known_weights
from sojourn_server.vllm import compat
from typer.testing import CliRunner, Result

pytestmark = pytest.mark.usefixtures("tested_engine")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Path:
    """Left behind by the decode engine of port 8002, with blocks of 64."""
    folder = tmp_path / "kv"
    folder.mkdir()
    identity = KvIdentity(
        model=f"{known_weights(str(model))} [] torch.bfloat16",
        kv_dtype="torch.bfloat16/amx",
        block_tokens=64,
        block_bytes=1000,
        layers=2,
        hash_scheme="sha256/seed=0/64",
        vllm_version=compat.TESTED_VLLM[-1],
    )
    with SharedStore.open(folder, identity, name="n7-decode-8002", budget_bytes=1000)._own:
        pass
    return folder


def serve(model: Path, store: Path, *more: str) -> Result:
    options = [
        "--role",
        "decode",
        "--kv-store",
        str(store),
        "--kv-buffer-gib",
        "0.001",
        "--kv-store-gib",
        "0.001",
    ]
    return CliRunner().invoke(build_app(), ["serve", str(model), *options, *more, "--dry-run"])


@pytest.mark.parametrize("more", [("--block-size", "32"), ("--block-size=32",), ()])
def test_two_lines_say_which_block_size_to_start_with(
    model: Path, store: Path, more: tuple[str, ...]
) -> None:
    error = serve(model, store, *more).exception
    assert isinstance(error, console.CliError)
    assert "KV of n7-decode-8002 in engine blocks of 64 tokens" in error.message
    assert error.next_step.startswith("start with --block-size 64, like the other engines")


def test_with_the_block_size_of_the_others_it_starts(model: Path, store: Path) -> None:
    assert serve(model, store, "--block-size", "64").exit_code == 0
