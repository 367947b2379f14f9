"""Processes of the gateway benchmarks: a gateway, a plain relay, an engine with fixed answers.

python gateway_processes.py --engine PORT               # an engine that answers at once with fixed bytes
python gateway_processes.py --floor PORT                # uvicorn, which gives the same answer by itself
python gateway_processes.py --floor PORT ENGINE         # uvicorn and aiohttp, which relay to port ENGINE
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sojourn_server.launch.engine_server import ServerProcess, ServerStartError

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
def running(command: list[str], port: int, replicas: int = 0) -> Iterator[int]:
    """Run a server on ``port``, and end it after the ``with`` block. Yield its process id once it answers; a
    gateway, once it knows ``replicas`` replicas. Raises ``ServerStartError``."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(port=port, log_path=Path(folder) / "log")
        try:
            server.launch(command, os.environ)
            server.wait_until_ready(READY_S)
            end_s = time.monotonic() + READY_S
            while replicas and server.get("/health").json()["replicas"] < replicas:
                if time.monotonic() > end_s:
                    raise ServerStartError(f"the gateway knows too few engines:\n{server.log_tail()}")
                time.sleep(0.1)
            assert server.process is not None
            yield server.process.pid
        finally:
            server.end(60.0)


def gateway(flags: list[str], port: int, replicas: int) -> AbstractContextManager[int]:
    """Run ``sojourn gateway``, which is ready once it knows ``replicas`` replicas."""
    command = [sys.executable, "-m", "sojourn_server.cli", "gateway", "--port", str(port), *flags]
    return running(command, port, replicas)


def child(*words: str, port: int) -> AbstractContextManager[int]:
    """Run this file as another process."""
    return running([sys.executable, __file__, *words], port)


class Answers(asyncio.Protocol):
    """A connection to an engine that answers every request at once with the bytes of ``PAGES``."""

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


def serve_engine(port: int) -> None:
    """Run an engine of ``Answers`` until killed."""
    import uvloop

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
