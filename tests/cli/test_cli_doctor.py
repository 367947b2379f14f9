from __future__ import annotations

import io
import json
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cli_process import invoke
from command_server import CommandServer
from live_frames import frame, row
from sojourn.testing import FakeServer
from sojourn.testing.fake_server import refusing_url
from sojourn.wire_codec import WIRE_VERSION
from sojourn_server.cli import COMMANDS, doctor, main
from sojourn_server.cli.cli_error import CliError
from sojourn_server.cli.live_client import LiveClient, connection_advice
from sojourn_server.metrics.live_frame import PROBE_ID
from sojourn_server.vllm import compat

CAPABILITIES = {"version": "0.1.0", "policy": "continuum", "wire": [WIRE_VERSION]}


MODELS, PROGRAMS, COMPLETIONS = "/v1/models", "/sojourn/v1/stream", "/v1/completions"
PLUGIN, EVENTS = "/sojourn/v1/capabilities", "/sojourn/v1/events"
HEALTHY: dict[str, Any] = {
    "/health": {},
    MODELS: {"data": [{"id": "tiny"}]},
    PLUGIN: CAPABILITIES,
    EVENTS: {"v": WIRE_VERSION, "outcomes": []},
    COMPLETIONS: {"usage": {"prompt_tokens_details": {"cached_tokens": 0}}},
}


def examine(server: CommandServer, **headers: str) -> dict[str, doctor.Check]:
    transport = httpx.MockTransport(server)
    with httpx.Client(base_url="http://server", transport=transport, headers=headers) as client:
        return {check.name: check for check in doctor.server_checks(client)}


def checks_of(changes: dict[str, Any]) -> dict[str, doctor.Check]:
    """The checks of a healthy server with other answers at some paths."""
    return examine(CommandServer({**HEALTHY, **changes}))


def test_a_healthy_server_has_nothing_to_fix():
    server = CommandServer(HEALTHY)
    checks = examine(server)
    assert {name: check.ok for name, check in checks.items()} == dict.fromkeys(
        ["server", "API key", "models", "plugin", "events", "cached tokens"], True
    )
    assert "continuum" in checks["plugin"].detail
    sent = {request.url.path: request for request in server.asked}
    assert json.loads(sent[EVENTS].content)["events"] == []
    assert PROBE_ID in sent[COMPLETIONS].headers["X-Request-Id"], "marked, so that it is not counted"


@pytest.mark.parametrize(
    ("path", "answer", "name", "said", "advice"),
    [
        ("/health", (503, {}), "server", "503", "wait"),
        (MODELS, (404, {}), "models", "404", "OpenAI"),
        (PLUGIN, (404, {}), "plugin", "404", "VLLM_PLUGINS=sojourn"),
        (PLUGIN, {"wire": [99]}, "plugin", "99", "the same release"),
        (PLUGIN, (501, {"error": {"message": "stock", "next": "serve it"}}), "plugin", "stock", "serve it"),
        (EVENTS, (500, {"error": {"message": "boom"}}), "events", "boom", "log"),
        (EVENTS, {"odd": 1, "outcomes": 3}, "events", "", "log"),
        (
            COMPLETIONS, {"usage": {"prompt_tokens_details": None}},
            "cached tokens", "not reported", "--enable-prompt-tokens-details",
        ),
        (COMPLETIONS, (500, {"error": {"message": "no engine"}}), "cached tokens", "no engine", "log"),
        (COMPLETIONS, (503, {"error": {"message": "no engine"}}), "cached tokens", "no engine", "log"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_what_to_do(path, answer, name, said, advice):
    check = checks_of({path: answer})[name]
    assert check.ok is False
    assert said in check.detail
    assert advice in check.next_step


PAIR = {"peer": "tcp:10.0.0.7:8500", "node": "n7"}
TIERS = {
    "connector": "SojournConnector",
    "on": True,
    "off_because": None,
    "host": {"blocks": 2048, "bytes": 8 << 30},
    "disk": {"blocks": 25600, "bytes": 100 << 30},
}


@pytest.mark.parametrize(
    ("told", "name", "ok", "said", "advice"),
    [
        (
            {"policy": "off"}, "plugin", None, "sojourn 0.1.0, policy off, wire [1]",
            "to switch it on: sojourn policy on --url http://server",
        ),
        *(
            (
                {"paths": {"role": role, **PAIR}, "tiers": None}, "role", None,
                f"a {role} engine, which serves behind a gateway",
                f"to use it: sojourn gateway --prefill URL --decode URL, with this one as {role}",
            )
            for role in ("prefill", "decode")
        ),
        (
            {"paths": {"role": "decode", **PAIR}, "tiers": None}, "tiers", True,
            "a decode engine of a pair at node n7 stores and reads KV; its address is tcp:10.0.0.7:8500", "",
        ),
        (
            {"missing": {"mechanisms": ["placement", "prefetch"], "because": "LMCacheConnectorV1 keeps KV"}},
            "mechanisms", None, "off: placement, prefetch, because LMCacheConnectorV1 keeps KV", "",
        ),
        (
            {"tiers": TIERS}, "tiers", True,
            "SojournConnector, host memory for 8 GiB or 2,048 blocks, disk for 100 GiB or 25,600 blocks", "",
        ),
        (
            {"tiers": {**TIERS, "host": {"bytes": 1 << 29}, "disk": {"blocks": 1, "bytes": 1 << 41}}},
            "tiers", True, "SojournConnector, host memory for 0.5 GiB, disk for 2,048 GiB or 1 blocks", "",
        ),
        (
            {"tiers": {**TIERS, "disk": None, "on": False, "off_because": "an error"}}, "tiers", False,
            "SojournConnector, host memory for 8 GiB or 2,048 blocks; turned off: an error",
            "see the server's log; until a restart, evicted KV is computed again",
        ),
        ({"tiers": None}, "tiers", None, "none below the device: evicted KV is computed again", ""),
    ],
)  # fmt: skip
def test_what_an_engine_tells_of_itself_is_shown(
    told: dict[str, Any], name: str, ok: bool | None, said: str, advice: str
) -> None:
    check = checks_of({PLUGIN: {**CAPABILITIES, **told}})[name]
    assert (check.ok, check.detail, check.next_step) == (ok, said, advice)
    assert name == "plugin" or name not in checks_of({})


def test_a_model_without_completions_is_not_broken():
    assert checks_of({COMPLETIONS: (400, {})})["cached tokens"].ok is None


@pytest.mark.parametrize(
    ("live", "ok", "said", "advice"),
    [
        (frame(), None, "none yet", "sojourn run --url http://server -- python agent.py"),
        (
            frame(untracked_requests=3), None,
            "none yet; 3 requests came without a program", "sojourn run --url http://server -- python",
        ),
        (
            frame(row("a", name="agent.py", since_s=92.0), row("b", since_s=1.0)), True,
            "2 seen, newest agent.py 8.0s ago", "",
        ),
        (frame(row("a", requests=1)), True, "1 seen, newest a now", ""),
        ((503, {"error": {"message": "busy"}}), None, "not known: 503 busy", ""),
        ({"v": 1}, None, "not a live frame: Object missing required field `seq`", ""),
    ],
)  # fmt: skip
def test_a_server_tells_whether_agents_arrive(live, ok, said, advice):
    check = checks_of({PROGRAMS: live})["programs"]
    assert (check.ok, check.detail) == (ok, said)
    assert advice in check.next_step
    assert bool(advice) == bool(check.next_step)
    assert "programs" not in checks_of({})


def environment(monkeypatch, version, import_error=None, devices=0) -> dict[str, doctor.Check]:
    def run(*_: Any, **__: Any) -> SimpleNamespace:
        said = f"a traceback\n{import_error}"
        return SimpleNamespace(returncode=bool(import_error), stderr=said, stdout=f"{devices}\n")

    monkeypatch.setattr(compat, "installed_vllm", lambda: version)
    monkeypatch.setattr(doctor.subprocess, "run", run)
    return {check.name: check for check in doctor.environment_checks()}


def test_the_environment(monkeypatch):
    checks = environment(monkeypatch, compat.TESTED_VLLM[-1])
    assert checks["vllm"].ok is True
    assert checks["entry point vllm.general_plugins"].ok is True
    assert checks["sojourn"].ok is True
    assert re.match(r"\d+\.\d\d GiB available of \d+\.\d\d GiB of ", checks["memory"].detail)
    without_engine = environment(monkeypatch, None)
    assert without_engine["vllm"].ok is None, "no engine is no fault"
    assert "engine imports" not in without_engine


@pytest.mark.parametrize(
    ("is_cpu_build", "rocm", "devices", "ok", "said"),
    [
        (False, "/no/kfd", 2, True, "2 for CUDA"),
        (False, "/no/kfd", 0, None, "torch finds none"),
        (True, "/no/kfd", 0, None, None),
        (False, "/", 0, None, None),
    ],
)
def test_a_build_for_cuda_needs_a_gpu(monkeypatch, is_cpu_build, rocm, devices, ok, said):
    monkeypatch.setattr(compat, "is_cpu_build", lambda: is_cpu_build)
    monkeypatch.setattr(doctor, "_ROCM_DEVICE", Path(rocm))
    check = environment(monkeypatch, compat.TESTED_VLLM[-1], devices=devices).get("gpu")
    assert (check is None) is (said is None)
    if check is not None:
        assert check.ok is ok
        assert said in check.detail
        assert bool(check.next_step) is not bool(ok)


def test_an_untested_engine_and_a_broken_one(monkeypatch):
    checks = environment(monkeypatch, "9.9.9", "RuntimeError: operator torchvision::nms does not exist")
    assert checks["vllm"].ok is False
    assert compat.TESTED_VLLM[-1] in checks["vllm"].detail
    assert checks["engine imports"].ok is False
    assert "torchvision" in checks["engine imports"].next_step


def report(monkeypatch, checks, *args):
    """Run ``sojourn doctor`` in an environment with these checks."""
    monkeypatch.setattr(doctor, "environment_checks", lambda *_, **__: iter(checks))
    return invoke("doctor", *args)


def test_the_report_is_on_stdout_and_makes_way_for_its_json(monkeypatch, tmp_path):
    fine, bad = doctor.Check("a", True, "ok"), doctor.Check("b", False, "broken [x]", "mend it")
    out = tmp_path / "out.json"
    result = report(monkeypatch, [fine, bad], "--json", str(out))
    assert (result.exit_code, result.stderr) == (1, "")
    assert "broken [x]" in result.stdout
    assert [line for line in result.stdout.splitlines() if "mend it" in line]
    assert "1 to fix" in result.stdout
    assert json.loads(out.read_text())["checks"][1]["next_step"] == "mend it"
    result = report(monkeypatch, [fine, bad], "--json", "-")
    assert "1 to fix" in result.stderr
    assert json.loads(result.stdout)["ok"] is False
    result = report(monkeypatch, [fine, doctor.Check("c", None, "absent")], "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (0, True)


def test_the_key_does_not_go_to_a_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        result = report(monkeypatch, [], "--url", "http://127.0.0.1:9", "--api-key", "key")
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):  # no connection was made
            proxy.accept()
    assert "✗ server" in result.stdout


@pytest.mark.parametrize(
    ("flags", "environment", "shown", "source"),
    [
        ([], {"SOJOURN_API_KEY": "s"}, "s", "SOJOURN_API_KEY"),
        ([], {"SOJOURN_API_KEY": "s", "VLLM_API_KEY": "v"}, "v", "VLLM_API_KEY"),
        ([], {"SOJOURN_API_KEY": "s", "VLLM_API_KEY": ""}, "s", "SOJOURN_API_KEY"),
        (["--api-key", "a"], {"SOJOURN_API_KEY": "s"}, "a", "--api-key"),
    ],
)
def test_the_key_is_the_engines_else_the_sdks(monkeypatch, serve, flags, environment, shown, source):
    server = serve(HEALTHY)
    server.key = shown
    for name in ("VLLM_API_KEY", "SOJOURN_API_KEY"):
        monkeypatch.setenv(name, environment.get(name, ""))
    result = report(monkeypatch, [], "--url", "http://server", *flags)
    assert f"API key: accepted, or none needed ({source})" in result.stdout
    server.key = "another"
    result = report(monkeypatch, [], "--url", "http://server", *flags)
    assert f"API key: the key of {source} is not the server's key" in result.stdout


def test_a_missing_key_is_asked_for():
    check = examine(CommandServer(HEALTHY, key="right"))["API key"]
    assert (check.ok, check.detail) == (False, "the server needs one")
    assert "pass --api-key" in check.next_step


def test_the_url_is_checked_first_and_needs_neither_a_scheme_nor_the_engine(monkeypatch, serve):
    serve(HEALTHY)
    monkeypatch.setattr(doctor, "_import_checks", lambda **_: pytest.fail("the engine is imported"))
    result = invoke("doctor", "--url", "127.0.0.1:9/v1", "--json", "-")
    names = [check["name"] for check in json.loads(result.stdout)["checks"]]
    assert names[0] == "server"
    assert names.index("cached tokens") < names.index("python")


def run_in_latin(monkeypatch, *arguments) -> str:
    """Run ``sojourn`` as in a locale without UTF-8; returns stdout."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), "latin-1") for name in ("stdout", "stderr")}
    monkeypatch.setattr(sys, "argv", ["sojourn", *arguments])
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    streams["stdout"].seek(0)
    return streams["stdout"].read()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_printed_in_a_locale_without_utf_8(monkeypatch, command):
    assert "--help" in run_in_latin(monkeypatch, *command.split(), "--help")


def test_the_report_is_printed_in_a_locale_without_utf_8(monkeypatch):
    checks = [doctor.Check("a", True, "≥ 3"), doctor.Check("b", None, "–")]
    monkeypatch.setattr(doctor, "environment_checks", lambda *_, **__: iter(checks))
    assert "ok a: ? 3\n- b: ?\n" in run_in_latin(monkeypatch, "doctor")


# -- a server that does not answer ----------------------------------------------------------


def asked(url: str) -> tuple[str, str]:
    """What the doctor says of a server that does not answer, and the next step."""
    [check] = doctor._url_checks(url, None, "--api-key")
    assert check.ok is False
    return check.detail, check.next_step


def test_an_address_at_which_no_server_can_answer_is_named_by_its_fault(monkeypatch):
    def unknown(*args, **more):
        raise socket.gaierror(-2, "Name or service not known")

    said, next_step = asked(refusing_url())
    assert "no server listens there" in said
    assert next_step == (
        'start one: sojourn serve tiny; if it is starting, wait for its line "sojourn: ready at"'
    )
    no_url = ("8000 is no URL of a server", "give http://HOST:PORT, e.g. http://127.0.0.1:8000")
    assert asked("8000") == no_url
    with FakeServer() as plain:
        secure = plain.url.replace("http:", "https:")
        said, next_step = asked(secure)
        with pytest.raises(CliError, match="does not answer in TLS") as found:
            LiveClient(secure).frame()
    assert "it does not answer in TLS" in said
    assert next_step == f"use {plain.url}"
    assert found.value.next_step == f"use {plain.url}; or name another server with --url"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said, next_step = asked("http://nosuchhost:8000")
    assert "the name nosuchhost is unknown" in said
    assert next_step == "check the name of the host in the URL"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (httpx.RemoteProtocolError("illegal status line"), "https://server"),
        (httpx.ReadTimeout("timed out"), "see its log"),
        (httpx.ConnectTimeout("timed out"), "check the host and the port"),
    ],
)
def test_a_server_that_speaks_another_protocol_or_is_slow_is_not_started_again(error, advice):
    _, next_step = connection_advice(error, "http://server")
    assert advice in next_step
    assert "start one" not in next_step
