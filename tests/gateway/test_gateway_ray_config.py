"""The file of ``sojourn gateway --ray``: what is taken, what is refused and how that is said."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sojourn_server.cli import build_app
from sojourn_server.cli.cli_error import CliError
from sojourn_server.gateway.ray.ray_config import (
    LOOPBACK_VARIABLE,
    RayConfigError,
    known_keys,
    parse_config,
    read_config,
    read_key,
    set_ray_environment,
)
from typer.testing import CliRunner

PAIRS: dict[str, Any] = {"model": "m", "prefill": {}, "decode": {"min": 2}, "pairs": {"store": "/kv"}}


def parse(**more: Any) -> Any:
    return parse_config({"model": "tiny", **more}, source="f.yaml")


def test_prefill_and_decode_engines_are_groups_of_their_own() -> None:
    given = {**PAIRS, "prefill": None, "pairs": {"store": "/kv", "read_side": "prefill"}}
    config = parse_config(given, source="f.yaml")
    assert config.in_pairs
    assert [(group.name, group.role, group.engines.min) for group in config.groups] == [
        ("Prefill", "prefill", 1),
        ("Decode", "decode", 2),
    ]
    assert config.pairs.read_side == "prefill"
    assert config.number_of_gateways == 1, "one decides about all pairs"
    assert parse_config({**PAIRS, "gateways": 2}, source="f.yaml").number_of_gateways == 2
    assert parse_config(msgspec.to_builtins(config), source="again") == config
    assert not parse().in_pairs
    own = {"min": 1, "command": ["x", "{port}"]}
    assert parse_config({"model": "m", "prefill": own, "decode": own}, source="f.yaml").pairs.store is None


def test_what_an_engine_of_a_pair_is_started_with() -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray.deployments import engine_command

    config = parse_config({**PAIRS, "prefill": {"args": ["--max-model-len", "64"]}}, source="f.yaml")
    prefill, decode = (engine_command(config, group, "10.0.0.7") for group in config.groups)
    assert prefill[3:] == [
        *["serve", "m", "--host", "{host}", "--port", "{port}", "--role", "prefill", "--kv-store", "/kv"],
        *["--kv-store-name", "sojourn-prefill-{rank}"],
        *["--kv-listen", "tcp:10.0.0.7:0", "--max-model-len", "64", "--disable-uvicorn-access-log"],
    ]
    assert decode[decode.index("--role") + 1] == "decode"
    other = parse_config({**PAIRS, "decode": {"args": ["--kv-listen=tcp:[::]:0"]}}, source="f.yaml")
    prefill, decode = (engine_command(other, group, "fd00::7") for group in other.groups)
    assert prefill[prefill.index("--kv-listen") + 1] == "tcp:[fd00::7]:0"
    assert "--kv-listen" not in decode


@pytest.mark.parametrize(
    ("args", "policy"),
    [([], ["--policy", "sojourn"]), (["--policy=mori"], []), (["--policy-file", "f.toml"], [])],
)
def test_what_an_engine_is_started_with(args: list[str], policy: list[str]) -> None:
    """The file's flags, and without one of its own the policy that goes with the gateway's."""
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray.deployments import engine_command

    engines = {"min": 2, "args": [*args, "--max-model-len", 2048]}
    config = parse_config({"model": "tiny", "engines": engines}, source="f.yaml")
    command = engine_command(config, config.groups[0], "127.0.0.1")
    assert command[:5] == [sys.executable, "-m", "sojourn_server.cli", "serve", "tiny"]
    assert command[5:9] == ["--host", "{host}", "--port", "{port}"]
    assert command[9:] == [*policy, *args, "--max-model-len", "2048", "--disable-uvicorn-access-log"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "the file: expected `object`, got `array`"),
        ({}, "missing required field `model`"),
        ({"model": 7}, "model: expected `str`, got `int`"),
        ({"model": "m", "engins": {}}, "there is no key engins; did you mean engines?"),
        ({"model": "m", "prefill": {"min": 1}}, "prefill is there without decode; expected both"),
        ({"model": "m", "decode": None}, "decode is there without prefill; expected both"),
        ({"model": "m", "pairs": {"store": "/kv"}}, "pairs is there without prefill and decode"),
        ({**PAIRS, "engines": {}}, "engines and prefill are both set; expected only one: prefill and"),
        ({**PAIRS, "policy": "sojourn"}, "policy and prefill are both set; expected only one: pairs have"),
        ({**PAIRS, "pairs": {}}, "pairs.store is None; expected the directory that engines of all pairs"),
        ({**PAIRS, "pairs": {"store": "kv"}}, "pairs.store is 'kv'; expected an absolute path"),
        ({**PAIRS, "pairs": {"stor": "/kv"}}, "there is no key pairs.stor; did you mean pairs.store?"),
        ({**PAIRS, "pairs": {"store": "/", "read_side": "x"}}, "pairs.read_side: invalid enum value 'x'"),
        ({**PAIRS, "decode": {"min": 0}}, "decode.min: expected `int` >= 1"),
        ({**PAIRS, "decode": {"min": 1, "max": 2}}, "decode.max is 2; expected decode.min"),
        ({**PAIRS, "prefill": {"command": ["x"]}}, "prefill.command is ['x']; expected {port}"),
        ({**PAIRS, "prefill": {"args": ["--role=decode"]}}, "prefill.args has --role; expected none"),
        ({"model": "m", "engines": {"mim": 1}}, "there is no key engines.mim; did you mean engines.min?"),
        ({"model": "m", "engines": {"min": 3, "max": 2}}, "engines.max is 2; expected at least engines.min"),
        ({"model": "m", "engines": {"args": ["--port=1"]}}, "engines.args has --port; expected none"),
        ({"model": "m", "port": 70000}, "port: expected `int` <= 65535"),
        ({"model": "m", "direct_port": 8100}, "port, direct_port and metrics_port are [8100, 8100]"),
        ({"model": "m", "host": "0.0.0.0"}, "host is '0.0.0.0'; expected 127.0.0.1, or loopback_only: false"),
        ({"model": "m", "address": "auto", "loopback_only": True}, "expected address: local"),
        ({"model": "m", "keys": {"api": "K"}, "tenants": "t.toml"}, "keys.api is 'K'; expected none"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(document: Any, said: str) -> None:
    with pytest.raises(RayConfigError) as raised:
        parse_config(document, source="f.yaml")
    assert said in str(raised.value)
    assert str(raised.value).startswith("f.yaml: ")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(RayConfigError, match="No such file"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("model: [\n")
    with pytest.raises(RayConfigError, match="not YAML"):
        read_config(tmp_path / "bad.yaml")
    (tmp_path / "good.yaml").write_text("model: tiny\nengines: {min: 2, max: 3}\n")
    assert read_config(tmp_path / "good.yaml").engines.scales


def test_keys_are_named_and_never_repeated() -> None:
    assert read_key(None, "keys.admin", {}) is None
    assert read_key("NAME", "keys.admin", {"NAME": "secret"}) == "secret"
    for value in ("", " secret", "secret\n"):
        with pytest.raises(RayConfigError) as raised:
            read_key("NAME", "keys.admin", {"NAME": value})
        assert "secret" not in str(raised.value)
        assert "keys.admin is 'NAME'" in str(raised.value)
        assert ("the environment has no NAME" in str(raised.value)) is (not value)


def test_what_ray_reads_of_the_environment() -> None:
    seen = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    set_ray_environment(parse(), seen)
    assert seen == {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_USAGE_STATS_ENABLED": "0", LOOPBACK_VARIABLE: "0"}
    seen = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    set_ray_environment(parse(loopback_only=False, usage_statistics=True), seen)
    assert seen == {"RAY_SERVE_ENABLE_HA_PROXY": "1"}


def test_neither_the_sdk_nor_a_gateway_on_one_machine_loads_ray() -> None:
    code = (
        "import sys, sojourn, sojourn_server.gateway.http.gateway_app, sojourn_server.cli.gateway\n"
        "import sojourn_server.gateway.ray.engine_process, sojourn_server.gateway.ray.ray_config\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('ray', 'yaml')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_page_lists_the_keys_that_there_are() -> None:
    page, listed = Path(__file__).parents[2] / "docs" / "ray.md", set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            listed |= set(re.findall(r"`([\w.]+)`", line.split("|")[1]))
    assert listed == set(known_keys())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("keys: {admin: NO_SUCH_KEY}", "keys.admin is 'NO_SUCH_KEY': the environment has no NO_SUCH_KEY"),
        ("keys: {api: ONE, admin: SAME}", "the admin key is also the clients' key"),
        ("port: TAKEN", "choose another port in "),
        ("direct_port: TAKEN", "choose another direct_port in "),
        ("policy: continuum", "continuum is an engine's policy, not a cluster's"),
    ],
)
def test_what_can_be_seen_here_is_refused_before_ray_starts(tmp_path: Path, lines: str, said: str) -> None:
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        lines = lines.replace("TAKEN", str(taken.getsockname()[1]))
        file = tmp_path / "c.yaml"
        file.write_text(f"model: tiny\n{lines}\n")
        keys = {"ONE": "k", "SAME": "k"}
        done = CliRunner().invoke(build_app(), ["gateway", "--ray", str(file)], env=keys)
    assert "on Ray, engines run" not in done.output
    assert isinstance(done.exception, CliError), done
    assert done.exception.exit_code == 2
    assert said in f"{done.exception.message}; {done.exception.next_step}"
