"""The SDK's own HTTP: connections kept and given up, proxies, certificates."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn import http_transport
from sojourn.http_transport import HttpTransport
from waiting import wait_until


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


def test_a_fresh_connection_that_breaks_raises(server: Recorder) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        http = to(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(TimeoutError):
            http.post("/a", b"")


def test_an_answer_beyond_all_measure_is_not_read_to_its_end(
    server: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_transport, "MAX_ANSWER_BYTES", 1000)
    server.answer = b"x" * 100_000
    http = to(server.url)
    assert len(http.post("/a", b"").body) == 1000
    server.answer = b"ok"
    assert http.post("/b", b"").body == b"ok"  # on a connection without the rest of the first answer
    http.close()


@pytest.mark.parametrize(
    "at_once", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n"], ids=["head", "body"]
)
@pytest.mark.parametrize("method", ["get", "post"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(at_once: bytes, method: str) -> None:
    """Each byte comes within the timeout, the whole answer does not."""
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    given_up = threading.Event()

    def drip(listening: socket.socket) -> None:
        client, _ = listening.accept()
        with client, suppress(OSError):
            client.recv(65536)
            client.sendall(at_once)
            for byte in b" " * 40 if at_once else head:
                given_up.wait(0.02)
                client.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        http = to(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(TimeoutError):
            http.get("/a", 0.2) if method == "get" else http.post("/a", b"{}")
        given_up.set()
        thread.join(60)


def test_a_second_try_gets_the_time_that_is_left(server: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    http = to(server.url)
    ends = []
    once = HttpTransport._once

    def note(self: HttpTransport, method: str, path: str, body: bytes | None, end_s: float) -> Any:
        ends.append(end_s)
        return once(self, method, path, body, end_s)

    server.hang_up = 1
    http.post("/a", b"{}")
    monkeypatch.setattr(HttpTransport, "_once", note)
    wait_until(lambda: http._connection and http._connection.sock.recv(1, socket.MSG_PEEK) == b"")
    assert http.post("/b", b"{}").status == 200
    assert len(ends) == 2
    assert ends[0] == ends[1]
    http.close()


@pytest.mark.parametrize("slow_step", ["look-up", "connect"])
def test_a_connection_that_takes_long_leaves_the_request_its_time(
    server: Recorder, monkeypatch: pytest.MonkeyPatch, slow_step: str
) -> None:
    """As with an IPv6 address that does not answer before an IPv4 address that does."""
    passed_s = [0.0]
    monkeypatch.setattr(http_transport, "time", SimpleNamespace(monotonic=lambda: passed_s[0]))
    name = "getaddrinfo" if slow_step == "look-up" else "create_connection"
    real = getattr(socket, name)

    def slow(*args: Any, **named: Any) -> Any:
        passed_s[0] += 1000.0
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(socket, name, slow)
        http = to(server.url)
        assert http.post("/a", b"{}").body == b"ok"
        assert http.post("/b", b"{}").body == b"ok"
        assert server.connections == 1
        http.close()
        patch.setenv("https_proxy", server.url)
        with pytest.raises(OSError, match="502"):  # the proxy was asked, and answered
            to("https://gpu.example").post("/c", b"{}")


def test_a_large_body_arrives_whole(server: Recorder) -> None:
    http = to(server.url, timeout_s=60)
    assert http.post("/a", b" " * 2**23).body == b"ok"
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


def test_the_error_of_a_proxy_does_not_quote_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "http://bob:s3/cret@127.0.0.1:9")
    with pytest.raises(ValueError, match=r"the proxy for gpu\.example has no number as its port") as caught:
        to("http://gpu.example")
    assert "s3" not in "".join(traceback.format_exception(caught.value))


def test_missing_certificates_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/at/all.pem")
    with pytest.raises(FileNotFoundError):
        to("https://gpu.example")
