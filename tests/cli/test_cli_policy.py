"""``sojourn policy`` switches the policy of running engines."""

from __future__ import annotations

from typing import Any

import pytest
from cli_process import invoke, refused
from sojourn_server.cli.cli_error import CliError

OFF = {"policy": "off", "started_with": "sojourn"}
ON = {"policy": "sojourn", "started_with": "sojourn"}


@pytest.mark.parametrize(
    ("switch", "state", "shown"),
    [("off", OFF, "policy off (started with sojourn)"), ("on", ON, "policy sojourn")],
)
def test_an_engine_is_switched(serve: Any, switch: str, state: dict[str, str], shown: str) -> None:
    server = serve({"/sojourn/v1/policy": state})
    result = invoke("policy", switch, "--url", "http://engine:8000/v1", "--api-key", "k")
    assert result.stdout == f"http://engine:8000: {shown}\n"
    (request,) = server.asked
    assert (request.method, request.url.path) == ("POST", "/sojourn/v1/policy")
    assert request.url.query == f"on={str(switch == 'on').lower()}".encode()
    assert request.headers["authorization"] == "Bearer k"


def test_a_gateway_names_its_engines_and_those_that_were_not_switched(serve: Any) -> None:
    engines = {"engines": {"http://a": OFF}, "stock": ["http://b"], "silent": ["http://c"]}
    serve({"/sojourn/v1/policy": engines})
    result = invoke("policy", "off")
    assert result.stdout == "http://a: policy off (started with sojourn)\n"
    assert isinstance(result.exception, CliError)
    assert str(result.exception) == "not switched: http://b, http://c"
    assert "sojourn doctor" in result.exception.next_step


def test_a_gateway_without_engines_switches_nothing(serve: Any) -> None:
    serve({"/sojourn/v1/policy": {"engines": {}, "stock": [], "silent": []}})
    result = invoke("policy", "off")
    assert str(result.exception) == "nothing switched: the gateway has no engine that answers"
    assert result.exit_code == 1


def test_another_state_is_refused_without_a_request(serve: Any) -> None:
    server = serve({})
    error = refused("policy", "mori")
    assert "'mori' is not a state; expected on or off" in error.message
    assert "sojourn doctor --url URL shows the policy" in error.next_step
    assert "--policy NAME" in error.next_step
    assert not server.asked
