"""Checks of an engine of a pair before it starts, on real folders and sockets."""

from __future__ import annotations

import dataclasses
import os
import socket

import pytest
from sojourn_server.kv_offload.block_file import KvIdentity
from sojourn_server.kv_offload.shared_store import SharedStore
from sojourn_server.launch import prefill_decode_checks
from sojourn_server.launch.launch_errors import InvalidOption
from sojourn_server.launch.prefill_decode_options import PrefillDecodeOptions

IDENTITY = KvIdentity(
    model="/m [] torch.float32 abc None auto",
    kv_dtype="float32",
    block_tokens=64,
    block_bytes=1000,
    layers=2,
    hash_scheme="sha256/seed=0/32",
    vllm_version="0.32.0",
)


def check(store, probe_system=True, block_tokens=32, plain=True, workers=1, **options):
    asked = PrefillDecodeOptions(
        role="decode", store=str(store), **{"store_gib": 1e-6, "buffer_gib": 1e-3, **options}
    )
    return prefill_decode_checks.check_prefill_decode(
        asked,
        "d",
        vllm_version="0.32.0",
        weights="/m []",
        block_tokens=block_tokens,
        block_tokens_certain=plain,
        workers=workers,
        probe_system=probe_system,
    )


def refused(store, **options):
    with pytest.raises(InvalidOption) as caught:
        check(store, **options)
    assert caught.value.next_step
    return caught.value


def test_a_folder_that_all_may_write_is_fine(tmp_path):
    assert check(tmp_path) == []
    with SharedStore.open(tmp_path, IDENTITY, name="p", budget_bytes=1000)._own:
        assert check(tmp_path) == [], "another engine of the pair runs there"
    assert os.listdir(tmp_path) == [folder.name for folder in tmp_path.glob("*-p")], "nothing is left"


def test_a_folder_that_is_not_there_may_be_a_disk_to_mount(tmp_path):
    error = refused(tmp_path / "nowhere")
    assert f"--kv-store {tmp_path}/nowhere does not exist; expected the directory" in str(error)
    assert "mount" in error.next_step
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_what_cannot_be_written_are_no_stores(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "file is not a directory" in str(refused(tmp_path / "file"))

    def denied(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", denied)
    error = refused(tmp_path)
    assert f"--kv-store {tmp_path} cannot be written: Permission denied" in str(error)
    assert "--kv-store" in error.next_step


def test_a_dry_run_makes_nothing_and_opens_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda **options: pytest.fail("made something"))
    monkeypatch.setattr(socket, "socket", lambda *arguments: pytest.fail("opened something"))
    assert check(tmp_path, probe_system=False, listen="tcp:192.0.2.1:1") == []


def test_a_name_that_is_taken_and_a_store_of_something_else(tmp_path):
    with SharedStore.open(tmp_path, IDENTITY, name="d", budget_bytes=1000)._own:
        error = refused(tmp_path)
        assert "is in use by this process itself" in str(error)
        assert "--kv-store-name" in error.next_step
        assert "--kv-disk" not in error.next_step
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InvalidOption, match="is for another model or configuration"):
        prefill_decode_checks.check_prefill_decode(
            PrefillDecodeOptions(role="decode", store=str(tmp_path), buffer_gib=1e-3),
            "d",
            vllm_version="9",
            weights=None,
            block_tokens=None,
            block_tokens_certain=False,
        )


def made(root, name, scheme="sha256/seed=0/32", **other):
    """A store in ``root`` that an engine has left behind."""
    identity = dataclasses.replace(IDENTITY, hash_scheme=scheme, **other)
    with SharedStore.open(root, identity, name=name, budget_bytes=1000)._own:
        pass


def test_another_block_size_than_the_stores_is_refused_with_the_right_one(tmp_path):
    made(tmp_path, "n7-decode-8002")
    made(tmp_path, "n7-prefill-8001")
    error = refused(tmp_path, block_tokens=64)
    assert "engine blocks of 32 tokens" in str(error)
    assert "--block-size 64" in str(error)
    assert "n7-decode-8002, n7-prefill-8001" in str(error)
    assert error.next_step.startswith("start with --block-size 32, like the other engines")
    assert "-n7-decode-8002" in error.next_step, "what to delete where nobody uses it any more"
    assert check(tmp_path, block_tokens=32) == []
    assert check(tmp_path, block_tokens=None) == []


def test_a_block_size_that_vllm_may_change_is_a_note(tmp_path):
    made(tmp_path, "p", scheme="sha256/seed=0/16")
    (note,) = check(tmp_path, block_tokens=32, plain=False)
    assert "--block-size 16" in note


def test_one_store_of_the_same_block_size_is_enough_and_another_scheme_is_the_engines_business(tmp_path):
    both, other = tmp_path / "both", tmp_path / "other"
    for folder in (both, other):
        folder.mkdir()
    made(other, "q", scheme="sha256/seed=0/64")
    for store in other.iterdir():  # two engines that started at once
        store.rename(both / store.name)
    made(other, "p", scheme="sha256/seed=0/32")
    for store in other.iterdir():
        store.rename(both / store.name)
    assert check(both, block_tokens=64) == []
    made(other, "p", scheme="sha256")
    assert check(other, block_tokens=64) == []


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ('{"model_type": "llama"}', True),
        ('{"model_type": "x", "kv_lora_rank": 512}', False),
        ('{"text_config": {"kv_lora_rank": 512}}', False),
        ('{"model_type": "deepseek_v4"}', False),
        ("no JSON", False),
        ("[]", False),
        (None, False),
    ],
)
def test_vllm_gives_only_models_of_latent_attention_a_block_size_of_its_own(tmp_path, config, plain):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert prefill_decode_checks.keeps_block_size(str(tmp_path)) is plain


def test_memory_and_disk_space_are_those_of_this_machine(tmp_path):
    assert "--kv-buffer-gib is 1e+07; expected at most" in str(refused(tmp_path, buffer_gib=1e7))
    (note,) = check(tmp_path, store_gib=1e9)
    assert note.startswith("--kv-store-gib is 1e+09, but ")


@pytest.mark.parametrize("listen", ["tcp:127.0.0.1:0", "tcp:0.0.0.0:0", "tcp:localhost:0"])
def test_an_address_of_this_machine_is_fine(tmp_path, listen):
    assert check(tmp_path, listen=listen) == []


def test_each_of_several_workers_has_an_address_and_a_folder(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused(tmp_path, listen=f"tcp:127.0.0.1:{port - 1}", workers=2)
        assert f"tcp:127.0.0.1:{port}: cannot listen there" in str(error)
    with pytest.raises(InvalidOption, match="expected at most 65534"):
        check(tmp_path, listen="tcp:127.0.0.1:65535", workers=2)
    made(tmp_path, "n7-prefill-8001", scheme="sha256/seed=0/16")  # of an engine with one worker
    assert check(tmp_path, workers=2) == []
    made(tmp_path / "rank0of2", "n7-prefill-8001", scheme="sha256/seed=0/16", tp_size=2)
    assert "start with --block-size 16" in refused(tmp_path, workers=2).next_step


def test_an_address_that_cannot_be_bound(tmp_path):
    assert "tcp:192.0.2.1:0: cannot listen there" in str(refused(tmp_path, listen="tcp:192.0.2.1:0"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "port 0" in refused(tmp_path, listen=f"tcp:127.0.0.1:{port}").next_step
    assert check(tmp_path, listen=f"unix:{tmp_path}/s") == []
    error = refused(tmp_path, listen=f"unix:{tmp_path}/nowhere/s")
    assert f"no socket can be made in {tmp_path}/nowhere" in str(error)
