"""The next step for a server that does not answer follows from the fault of its address."""

from __future__ import annotations

import socket

import httpx
import pytest
from sojourn.testing import FakeServer
from sojourn_server.cli import doctor
from sojourn_server.cli.cli_error import CliError
from sojourn_server.cli.live_client import LiveClient


def asked(url: str) -> doctor.Check:
    checks = list(doctor._url_checks(url, None, "--api-key"))
    assert len(checks) == 1
    assert checks[0].ok is False
    return checks[0]


def test_an_address_at_which_no_server_can_answer_is_named_by_its_fault(monkeypatch):
    def unknown(*args, **more):
        raise socket.gaierror(-2, "Name or service not known")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = asked(f"http://127.0.0.1:{port}")
    assert "no server listens there" in refused.detail
    assert refused.next_step == (
        'start one: sojourn serve tiny; if it is starting, wait for its line "sojourn: ready at"'
    )
    no_url = asked("8000")
    assert no_url.detail == "8000 is no URL of a server"
    assert no_url.next_step == "give http://HOST:PORT, e.g. http://127.0.0.1:8000"
    with FakeServer() as plain:
        place = plain.url.partition("://")[2]
        tls = asked(f"https://{place}")
    assert "it does not answer in TLS" in tls.detail
    assert tls.next_step == f"use http://{place}"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    name = asked("http://nosuchhost:8000")
    assert "the name nosuchhost is unknown" in name.detail
    assert name.next_step == "check the name of the host in the URL"


def test_a_server_that_speaks_another_protocol_or_is_slow_is_not_started_again():
    for error, advice in (
        (httpx.RemoteProtocolError("illegal status line"), "https://server"),
        (httpx.ReadTimeout("timed out"), "see its log"),
        (httpx.ConnectTimeout("timed out"), "check the host and the port"),
    ):

        def fail(request, error=error):
            raise error

        with httpx.Client(base_url="http://server", transport=httpx.MockTransport(fail)) as client:
            (check,) = doctor.server_checks(client)
        assert advice in check.next_step
        assert "start one" not in check.next_step


def test_top_and_explain_name_the_fault_too():
    with FakeServer() as plain, pytest.raises(CliError, match="does not answer in TLS") as found:
        LiveClient(plain.url.replace("http:", "https:")).frame()
    assert found.value.next_step == f"use {plain.url}; or name another server with --url"
