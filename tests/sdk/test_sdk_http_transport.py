"""The SDK's own HTTP: connections kept and given up, proxies, certificates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from json_handler import HandlerServer, JsonHandler
from sojourn import http_transport
from sojourn.http_transport import HttpTransport


class Recorder(HandlerServer):
    """Answers every request, and records method, path and headers. Closes the first ``hang_up`` connections
    after one answer, without saying so."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.connections: set[Any] = set()
        self.hang_up = 0
        outer = self

        class Handler(JsonHandler):
            def answer_request(self) -> None:
                outer.connections.add(self.client_address)
                outer.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self.answer(b"ok", 502 if self.command == "CONNECT" else 200)
                self.close_connection = outer.hang_up > 0
                outer.hang_up -= 1

            do_GET = do_POST = do_CONNECT = answer_request

        super().__init__(Handler)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


def to(url: str, **settings: Any) -> HttpTransport:
    return HttpTransport(url, **{"api_key": None, "timeout_s": 2.0, **settings})


def test_a_connection_is_used_again(server: Recorder) -> None:
    http = to(f"{server.url}/below/", api_key="k")
    assert [http.post("/a", b"{}").body, http.get("/b", 1.0).body] == [b"ok", b"ok"]
    assert [seen[:2] for seen in server.seen] == [("POST", "/below/a"), ("GET", "/below/b")]
    assert all(seen[2]["authorization"] == "Bearer k" for seen in server.seen)
    assert len(server.connections) == 1
    http.close()


@pytest.mark.parametrize("by_server", [False, True])
def test_an_idle_connection_is_given_up_and_one_that_the_server_closed_costs_no_batch(
    server: Recorder, monkeypatch: pytest.MonkeyPatch, by_server: bool
) -> None:
    http = to(server.url)
    server.hang_up = int(by_server)
    http.post("/a", b"")
    monkeypatch.setattr(http_transport, "KEEP_ALIVE_S", 60.0 if by_server else -1.0)
    assert http.post("/b", b"").body == b"ok"
    assert [seen[1] for seen in server.seen] == ["/a", "/b"]
    assert len(server.connections) == 2
    http.close()


def test_a_proxy_of_the_environment_is_asked(server: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//user:p%40ss@"))
    http = to("http://gpu.example:8000/llm")
    http.post("/a", b"")
    ((_, path, headers),) = server.seen
    assert path == "http://gpu.example:8000/llm/a"
    assert headers["host"] == "gpu.example:8000"
    assert headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"
    http.close()


def test_tls_goes_through_a_tunnel(server: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", server.url)
    with pytest.raises(OSError, match="502"):
        to("https://gpu.example").post("/a", b"secret")
    ((method, target, _),) = server.seen
    assert (method, target) == ("CONNECT", "gpu.example:443")


def test_no_proxy_is_respected(server: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    http = to(server.url)
    assert http.post("/a", b"").status == 200
    http.close()


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"socks5://127\.0\.0\.1; expected http://"):
        to("http://gpu.example")


def test_missing_certificates_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/at/all.pem")
    with pytest.raises(FileNotFoundError):
        to("https://gpu.example")
