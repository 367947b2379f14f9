"""The next step for a server that does not answer follows from the fault of its address."""

from __future__ import annotations

import socket

import httpx
import pytest
from sojourn.testing import FakeServer
from sojourn.testing.fake_server import refusing_url
from sojourn_server.cli import doctor
from sojourn_server.cli.cli_error import CliError
from sojourn_server.cli.live_client import LiveClient, connection_advice

START = 'start one: sojourn serve tiny; if it is starting, wait for its line "sojourn: ready at"'


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
    assert next_step == START
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
