"""``sojourn policy`` switches the policy of running engines."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sojourn_server.cli import build_app
from sojourn_server.cli import policy as command
from sojourn_server.cli.cli_error import CliError
from sojourn_server.cli.live_client import LiveClient
from typer.testing import CliRunner

OFF = {"policy": "off", "started_with": "sojourn"}
ON = {"policy": "sojourn", "started_with": "sojourn"}


def run(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], *words: str, status: int = 200) -> Any:
    """Run ``sojourn policy`` against a server that answers ``answer``. Returns (result, requests)."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, json=answer)

    def client(url: str, api_key: str | None) -> LiveClient:
        return LiveClient(url, api_key, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(command, "LiveClient", client)
    return CliRunner().invoke(build_app(), ["policy", *words]), seen


@pytest.mark.parametrize(
    ("switch", "state", "shown"),
    [("off", OFF, "policy off (started with sojourn)"), ("on", ON, "policy sojourn")],
)
def test_an_engine_is_switched(
    monkeypatch: pytest.MonkeyPatch, switch: str, state: dict[str, str], shown: str
) -> None:
    result, seen = run(monkeypatch, state, switch, "--url", "http://engine:8000/v1", "--api-key", "k")
    assert result.stdout == f"http://engine:8000: {shown}\n"
    (request,) = seen
    assert (request.method, request.url.path) == ("POST", "/sojourn/v1/policy")
    assert request.url.query == f"on={str(switch == 'on').lower()}".encode()
    assert request.headers["authorization"] == "Bearer k"


def test_a_gateway_names_its_engines_and_those_that_were_not_switched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = {"engines": {"http://a": OFF}, "stock": ["http://b"], "silent": ["http://c"]}
    result, _ = run(monkeypatch, answer, "off")
    assert result.stdout == "http://a: policy off (started with sojourn)\n"
    assert isinstance(result.exception, CliError)
    assert str(result.exception) == "not switched: http://b, http://c"
    assert "sojourn doctor" in result.exception.next_step


def test_a_gateway_without_engines_switches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, {"engines": {}, "stock": [], "silent": []}, "off")
    assert str(result.exception) == "nothing switched: the gateway has no engine that answers"
    assert result.exit_code == 1


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    result, seen = run(monkeypatch, {}, "mori")
    assert "'mori' is not a state; expected on or off" in str(result.exception)
    assert "sojourn doctor --url URL shows the policy" in result.exception.next_step
    assert "--policy NAME" in result.exception.next_step
    assert not seen
    error = {"error": {"message": "vLLM's own scheduler", "next": "start it with --policy continuum"}}
    result, _ = run(monkeypatch, error, "off", status=501)
    assert "501 vLLM's own scheduler" in str(result.exception)
    assert result.exception.next_step == "start it with --policy continuum"
    result, _ = run(monkeypatch, {}, "off", status=401)
    assert "--api-key" in result.exception.next_step
    error = {"error": {"message": "no admin key is set", "next": "start the gateway with --admin-key"}}
    result, _ = run(monkeypatch, error, "off", status=403)
    assert result.exception.next_step == "start the gateway with --admin-key"
