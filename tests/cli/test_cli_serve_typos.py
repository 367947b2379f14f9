"""Misspelt flags and models of ``sojourn serve``: they fail in two lines, before vLLM reads the command."""

from __future__ import annotations

import pytest
from sojourn_server.cli import build_app, console
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("tested_engine")

VLLM_FLAGS = """
--all2all-backend --api-server-count --attention-backend --block-size --chat-template
--collect-detailed-traces --compilation-config --cpu-offload-gb --data-parallel-backend --data-parallel-size
--disable-log-stats --dtype --enable-auto-tool-choice --enable-prefix-caching --enforce-eager --eplb-config
--gpu-memory-utilization --host --kda-decode-backend --kda-prefill-backend --kv-cache-dtype
--kv-cache-memory-bytes --kv-events-config --kv-offloading-backend --kv-offloading-size --kv-transfer-config
--kv-transfer-config.kv_role --kv-sharing-fast-prefill --linear-backend --load-format --lora-modules
--mamba-backend --max-log-len --max-logprobs --max-lora-rank --max-model-len --max-num-batched-tokens
--max-num-seqs --middleware --model-impl --moe-backend --nnodes --no-enable-prefix-caching --node-rank
--offload-backend --pipeline-parallel-size --port --profiler-config --quantization --reasoning-parser
--response-role --revision --root-path --runner --safetensors-load-strategy --scheduler-cls
--scheduling-policy --seed --served-model-name --shutdown-timeout --speculative-config
--structured-outputs-config --swap-space --tensor-parallel-size --tokenizer --tokenizer-mode
--tool-call-parser --tool-parser-plugin --trust-remote-code --uds --url --uvicorn-log-level --worker-cls
"""
"""Flags of vLLM 0.32: the usual ones, and those most like ours."""


def dry_run(*args):
    return CliRunner().invoke(build_app(), ["serve", *args, "--dry-run"])


def failure(*args) -> str:
    result = dry_run(*args)
    assert isinstance(result.exception, console.CliError), result.output
    assert result.exception.next_step
    return str(result.exception)


@pytest.mark.parametrize(
    ("args", "typed", "meant"),
    [
        (("tiny", "--polcy", "stock"), "--polcy", "--policy"),
        (("--polcy", "stock", "tiny"), "--polcy", "--policy"),
        (("tiny", "--polciy=stock"), "--polciy", "--policy"),
        (("tiny", "--kv-host-gb", "8"), "--kv-host-gb", "--kv-host-gib"),
        (("tiny", "--kv_host_gib", "8"), "--kv_host_gib", "--kv-host-gib"),
        (("tiny", "--port", "1", "--sojourn-profil", "p"), "--sojourn-profil", "--sojourn-profile"),
        (("tiny", "--rol", "prefill"), "--rol", "--role"),
    ],
)  # fmt: skip
def test_a_misspelt_flag_of_ours_is_named(args, typed, meant):
    assert failure(*args) == f"unknown flag {typed}; did you mean {meant}?"


def test_flags_of_vllm_pass_unchanged():
    flags = VLLM_FLAGS.split()
    result = dry_run("tiny", "--policy", "stock", *(f"{flag}=0" for flag in flags))
    assert result.exit_code == 0, result.exception
    assert all(f"{flag}=0" in result.stdout for flag in flags)


def test_abbreviated_flags_of_vllm_pass_unchanged():
    for flag in (
        "--kv-tr",
        "--kv-transfer",
        "--kv-off",
        "--max-model",
        "--tensor",
        "--linear-backen",
        "--pro",
    ):
        result = dry_run("tiny", "--policy", "stock", flag, "0")
        assert result.exit_code == 0, result.exception


def test_a_misspelt_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for typed, meant in (("tinny", "tiny"), ("Tiny", "tiny"), ("smoll", "smol")):
        assert failure(typed) == f"there is no model {typed!r}; did you mean {meant}?"


def test_other_models_pass_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinny").mkdir()
    for model in ("tinny", "org/tinny", "gpt2", "small", "time", "opt-125m"):
        result = dry_run(model, "--policy", "stock")
        assert result.exit_code == 0, result.exception
        assert model in result.stdout
