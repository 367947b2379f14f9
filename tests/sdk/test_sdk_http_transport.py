"""The SDK's own HTTP: connections kept and given up, proxies, certificates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sojourn import http_transport
from sojourn.http_transport import HttpTransport


class Recorder(ThreadingHTTPServer):
    """Answers every request with the path it was asked for, and counts connections."""

    daemon_threads = True

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.connections = 0
        self.answer = b"ok"
        self.hang_up = 0
        """Close that many connections after one answer, without saying so."""
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def log_message(self, *_: object) -> None: ...

    def do_CONNECT(self) -> None:
        self.server.seen.append(("CONNECT", self.path, {k.lower(): v for k, v in self.headers.items()}))
        self.send_error(502)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)
        if self.server.hang_up:
            self.server.hang_up -= 1
            self.close_connection = True

    do_GET = do_POST


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.shutdown()
    recorder.server_close()


def to(url: str, **settings: Any) -> HttpTransport:
    return HttpTransport(url, **{"api_key": None, "timeout_s": 2.0, **settings})


def test_a_connection_is_used_again(server: Recorder) -> None:
    http = to(f"{server.url}/below/", api_key="k")
    assert [http.post("/a", b"{}").body, http.get("/b", 1.0).body] == [b"ok", b"ok"]
    assert [seen[:2] for seen in server.seen] == [("POST", "/below/a"), ("GET", "/below/b")]
    assert all(seen[2]["authorization"] == "Bearer k" for seen in server.seen)
    assert server.connections == 1
    http.close()


def test_an_idle_connection_is_given_up(server: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    http = to(server.url)
    http.post("/a", b"")
    monkeypatch.setattr(http_transport, "KEEP_ALIVE_S", -1.0)
    http.post("/b", b"")
    assert server.connections == 2
    http.close()


def test_a_connection_the_server_closed_meanwhile_costs_no_batch(server: Recorder) -> None:
    http = to(server.url)
    server.hang_up = 1
    http.post("/a", b"")
    assert http.post("/b", b"").body == b"ok"
    assert [seen[1] for seen in server.seen] == ["/a", "/b"]
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
