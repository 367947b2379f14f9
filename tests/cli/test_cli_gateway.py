"""``sojourn gateway``: errors before it starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_process import invoke, refused, run_sojourn
from sojourn_server.cli.gateway import _is_loopback
from sojourn_server.gateway.http import gateway_app
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules

ENGINES = ["--engines", "http://127.0.0.1:1"]
PAIR = ["--prefill", "http://h:1", "--decode", "http://h:2"]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SOJOURN_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "no engines were named"),
        (["--engines", "localhost"], "not an engine's address"),
        (["--engines", "http://h:1,http://h:1"], "given twice"),
        ([*ENGINES, "--policy", "sage"], "did you mean 'saga'"),
        ([*ENGINES, "--policy-file", "nowhere.toml"], "No such file"),
        ([*ENGINES, "--tenants", "nowhere.toml"], "No such file"),
        ([*ENGINES, "--tenants", "x.toml", "--api-key", "k"], "--tenants and --api-key are both given"),
        ([*ENGINES, "--admin-key", ""], "--admin-key is empty"),
        ([*ENGINES, "--admin-key", "k", "--api-key", "k"], "the admin key is also the clients' key"),
        ([*ENGINES, "--policy", "continuum"], "continuum is an engine's policy, not a cluster's"),
        ([*ENGINES, "--own-url", "http://h:2"], "--own-url is given without --peers"),
        ([*ENGINES, "--peers", "h", "--own-url", "http://h:2"], "is not a gateway's address"),
        ([*ENGINES, "--peers", "http://h:3", "--host", "0.0.0.0"], "--port, without --own-url"),
        ([*ENGINES, "--peers", "http://h:3,http://h:4"], "--peers lacks this gateway, which is http://127."),
        ([*ENGINES, "--peers", "http://h:3", "--own-url", "http://h:4"], "is http://h:4 by --own-url"),
        ([*ENGINES, "--peers", "http://h:3", "--port", "0"], "--port 0 are given without --own-url"),
        ([*ENGINES, "--api-key", " "], "--api-key is empty"),
        ([*ENGINES, "--session-header", ""], "--session-header is empty"),
        ([*ENGINES, "--log-level", "loud"], "--log-level is 'loud'"),
        (["--prefill", "http://h:1"], "--prefill is given without --decode"),
        (["--decode", "http://h:1"], "--decode is given without --prefill"),
        (["--prefill", ",", "--decode", "http://h:1"], "no prefill engines were named"),
        (["--prefill", "http://h:1,http://h:2", "--decode", "http://h:2"], "http://h:2 is given twice"),
        ([*PAIR, *ENGINES], "--engines and --prefill are both given"),
        ([*PAIR, "--policy", "saga"], "--policy and --prefill are both given"),
        ([*PAIR, "--policy-file", "x.toml"], "--policy-file and --prefill are both given"),
        ([*PAIR, "--read-side", "left"], "--read-side is 'left'"),
        ([*PAIR, "--ray", "x.yaml"], "--ray and --prefill, --decode are both given"),
        ([*ENGINES, "--read-side", "prefill"], "--read-side is given without --prefill and --decode"),
        ([*ENGINES, "--most-prefill-s", "9"], "--most-prefill-s is given without --prefill and --decode"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags: list[str], told: str) -> None:
    error = refused("gateway", *flags)
    assert (error.exit_code, told in error.message) == (2, True)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = refused("gateway", *ENGINES, "--port", str(taken.getsockname()[1]))
    assert "cannot listen on" in error.message
    assert (error.exit_code, error.next_step) == (2, "choose another --port")


def test_a_tenants_key_is_not_the_admins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[tenants]\na = ["one"]\nb = ["two"]\n')
    monkeypatch.setenv("SOJOURN_ADMIN_KEY", "two")
    error = refused("gateway", *ENGINES, "--tenants", str(tenants))
    assert "the admin key is also b's key" in error.message
    assert error.next_step == "docs/gateway.md says how tenants and the admin get keys"
    assert "two" not in error.message.replace(str(tmp_path), "")


def test_a_file_of_tenants_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants]\na = 3\n")
    monkeypatch.setenv("SOJOURN_API_KEY", "k")
    done = run_sojourn("gateway", *ENGINES, "--tenants", str(tenants))
    assert "note: SOJOURN_API_KEY is ignored" in done.stderr
    assert "expected [tenants] with lines NAME" in done.stderr


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.1.2.3", True), ("::1", True)]
    + [(host, False) for host in ("localhost.example.com", "127.corp", "::1234", "0.0.0.0", "")],
)
def test_only_loopback_hosts_need_no_keys(host: str, expected: bool) -> None:
    assert _is_loopback(host) == expected


def test_the_limits_of_pairs_reach_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(gateway_app, "build_gateway", build)
    given = ("--read-side", "prefill", "--short-queue-s", "1", "--most-prefill-s", "2")
    for flags, rules in (
        ((), PrefillDecodeRules()),
        ((*given, "--high-tokens-ratio", "1.5"), PrefillDecodeRules("prefill", 1.0, 2.0, 1.5)),
    ):
        invoke("gateway", *PAIR, *flags)
        assert build.call_args.args[1] == rules


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import sojourn_server.gateway.http.gateway_app", ("vllm", "ray", "torch", "fastapi")),
        ("import sojourn_server.cli; sojourn_server.cli.build_app()", ("starlette", "uvicorn", "aiohttp")),
    ],
)
def test_what_is_not_needed_is_not_loaded(code: str, names: tuple[str, ...]) -> None:
    code += f"; import sys; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
