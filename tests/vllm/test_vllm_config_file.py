"""The values of a ``--config`` file reach vLLM beside sojourn's defaults, read with vLLM's own parser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.launch.engine_flags import EngineFlags
from sojourn_server.launch.serve_command import (
    SCHEDULER_CLS,
    EngineCommand,
    LaunchEnvironment,
    ServeOptions,
    build_command,
    listen_address,
)

FILE = """
model: of-the-file
port: 8123
block-size: 16
max_num_batched_tokens: 4096
gpu-memory-utilization: 0.5
enforce-eager: false
enable-prefix-caching: true
disable-log-stats: false
served-model-name: [a, b]
middleware: []
additional-config: {other: {a: 1}, sojourn: {queue_patience_s: 5}}
compilation-config:
  pass_config: {fuse_norm_quant: true}
"""


@pytest.fixture(params=["serve", "module"])
def entry(request: pytest.FixtureRequest) -> str:
    """Which of vLLM's two commands runs the server: ``vllm serve``, or the module of the CPU build."""
    return str(request.param)


def built(entry: str, *args: str, **options: Any) -> EngineCommand:
    facts = LaunchEnvironment(python="py", cpu_build=True, has_vllm_cli=entry == "serve", cpus=(0, 1))
    options = {"policy": "continuum", **options}
    return build_command(ServeOptions(model="m", model_path="m", engine_args=args, **options), facts, {})


def parsed(entry: str, argv: tuple[str, ...]) -> argparse.Namespace:
    """What vLLM makes of a command line."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # vLLM 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    if entry == "module":
        return make_arg_parser(parser).parse_args(list(argv[argv.index("--model") :]))
    make_arg_parser(parser.add_subparsers().add_parser("serve"))
    found = parser.parse_args(list(argv[argv.index("serve") :]))
    found.model = found.model_tag or found.model  # as vllm serve does
    return found


def stock(entry: str, *args: str) -> argparse.Namespace:
    model = ("serve", "m") if entry == "serve" else ("--model", "m")
    return parsed(entry, (*model, *args))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "engine.yaml"
    path.write_text(FILE, encoding="utf-8")
    return str(path)


def test_the_values_of_the_file_are_the_engines(entry: str, file: str) -> None:
    command = built(entry, "--config", file)
    ours, theirs = parsed(entry, command.argv), stock(entry, "--config", file)
    changed = {name: value for name, value in vars(ours).items() if value != vars(theirs)[name]}
    assert changed == {
        "scheduler_cls": SCHEDULER_CLS,
        "additional_config": {
            "other": {"a": 1},
            "sojourn": {"queue_patience_s": 5, "policy": "continuum"},
        },
        "enable_prompt_tokens_details": True,
    }
    assert (ours.model, ours.port, ours.block_size, ours.max_num_batched_tokens) == ("m", 8123, 16, 4096)
    assert ours.enforce_eager is False
    assert listen_address(EngineFlags.read(("--config", file))) == ("", 8123)


def test_the_command_line_takes_precedence_over_the_file(entry: str, file: str) -> None:
    args = ("--port", "9000", "--config", file, "--block-size=64", "--additional-config", '{"mine": 1}')
    ours = parsed(entry, built(entry, *args).argv)
    assert (ours.port, ours.block_size, ours.max_num_batched_tokens) == (9000, 64, 4096)
    assert ours.additional_config == {"mine": 1, "sojourn": {"policy": "continuum"}}
    assert listen_address(EngineFlags.read(args)) == ("", 9000)


def test_every_flag_is_read_from_the_file_as_vllm_reads_it(entry: str, file: str) -> None:
    flags, theirs = EngineFlags.read(("--config", file)), stock(entry, "--config", file)
    for flag in ("--port", "--block-size", "--max-num-batched-tokens", "--gpu-memory-utilization"):
        assert flags.value(flag) == str(getattr(theirs, flag[2:].replace("-", "_")))
    for flag in ("--compilation-config", "--additional-config"):
        assert isinstance(json.loads(flags.value(flag) or ""), dict)
    assert flags.has("--enforce-eager")
    assert not flags.is_set("--enforce-eager")
    assert flags.is_set("--enable-prefix-caching")
    assert not flags.has("--middleware")


def test_without_a_policy_of_ours_the_file_is_vllms_too(entry: str, file: str) -> None:
    command = built(entry, f"--config={file}", policy="stock")
    ours, theirs = parsed(entry, command.argv), stock(entry, "--config", file)
    changed = {name for name, value in vars(ours).items() if value != vars(theirs)[name]}
    assert changed == {"enable_prompt_tokens_details"}
