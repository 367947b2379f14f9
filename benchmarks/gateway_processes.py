"""Processes of the gateway benchmarks: a gateway, a plain relay, an engine with fixed answers.

python gateway_processes.py --engine PORT               # an engine that answers at once with fixed bytes
python gateway_processes.py --floor PORT                # uvicorn, which gives the same answer by itself
python gateway_processes.py --floor PORT ENGINE         # uvicorn and aiohttp, which relay to port ENGINE
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx

ANSWER = json.dumps(
    {
        "id": "cmpl-1", "object": "text_completion", "model": "tiny",
        "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65},
    }
).encode()  # fmt: skip
PAGES = {
    b"/health": b"",
    b"/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n',
    b"/v1/completions": ANSWER,
    b"/v1/models": b'{"object": "list", "data": [{"id": "tiny", "max_model_len": 2048}]}',
}
"""Path → response body, for every path that a gateway requests from an engine."""
READY_S = 180.0


@contextmanager
def running(command: list[str], is_ready: Callable[[], bool]) -> Iterator[int]:
    """Run a process. Yield its id once it is ready, and end it after the ``with`` block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + READY_S
            while not is_ready():
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{command} is not ready:\n{log.read().decode()[-3000:]}")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()
            process.wait(60)


def gateway(flags: list[str], url: str, replicas: int) -> AbstractContextManager[int]:
    """Run ``sojourn gateway``, which is ready once it knows ``replicas`` replicas."""

    def knows_them() -> bool:
        try:
            told = httpx.get(f"{url}/health", timeout=5, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return False
        return bool(told.get("replicas", 0) >= replicas)

    return running([sys.executable, "-m", "sojourn_server.cli", "gateway", *flags], knows_them)


def child(*words: str, port: int) -> AbstractContextManager[int]:
    """Run this file as another process, which is ready once it listens on ``port``."""

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    return running([sys.executable, __file__, *words], listens)


def serve_engine(port: int) -> None:
    """Answer every request with the same bytes, until killed."""
    import uvloop

    class Answers(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.buffer = transport, b""

        def data_received(self, data: bytes) -> None:
            self.buffer += data
            while True:
                head, found, rest = self.buffer.partition(b"\r\n\r\n")
                size = content_length(head)
                if not found or len(rest) < size:
                    return
                self.buffer = rest[size:]
                path = head.split(b" ", 2)[1].partition(b"?")[0]
                body = PAGES.get(path)
                status = b"200 OK" if body is not None else b"404 Not Found"
                self.transport.write(
                    b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                    % (status, len(body or b""), body or b"")
                )

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.install()
    asyncio.run(run())


def serve_floor(port: int, engine: int | None) -> None:
    """Run uvicorn, which relays to the port ``engine`` through aiohttp; ``None``: it answers by itself."""
    import aiohttp
    import uvicorn

    sessions: list[aiohttp.ClientSession] = []

    async def answer(send: Any, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["path"] == "/health":
            await answer(send, b'{"replicas": 1}')
        elif engine is None:
            await answer(send, ANSWER)
        else:
            if not sessions:
                sessions.append(aiohttp.ClientSession(auto_decompress=False))
            url = f"http://127.0.0.1:{engine}/v1/completions"
            named = dict(scope["headers"])
            passed = {"Content-Type": "application/json", "X-Session-ID": named[b"x-session-id"].decode()}
            async with sessions[0].post(url, data=message["body"], headers=passed) as back:
                await answer(send, await back.read())

    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="error", access_log=False, proxy_headers=False,
        server_header=False, ws="none", timeout_keep_alive=75,
    )  # fmt: skip


def content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def main() -> None:
    """Run the process that the command line names."""
    kind, port, *rest = sys.argv[1:]
    if kind == "--engine":
        serve_engine(int(port))
    else:
        serve_floor(int(port), int(rest[0]) if rest else None)


if __name__ == "__main__":
    main()
