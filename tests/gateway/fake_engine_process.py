"""``python fake_engine_process.py HOST PORT [ROLE]``: a fake engine as a process of its own, with a role one
of a pair, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response


class SlowEngine(FakeEngine):
    """Answers after the request's ``delay_s``. A stream has ``events`` events, ``gap_s`` apart. ``kv_use`` of
    a request is the use of KV memory that its metrics tell from then on."""

    kv_use = 0.0
    running = 0

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.kv_use = body.get("kv_use", self.kv_use)
        self.running += 1
        try:
            await asyncio.sleep(body.get("delay_s", 0))
            return await super()._generate(request)
        finally:
            self.running -= 1

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        body = await request.json()
        self.running += 1
        try:
            for number in range(body.get("events", 5)):
                yield f'data: {{"number": {number}, "at": "{self.name}"}}\n\n'.encode()
                await asyncio.sleep(body.get("gap_s", 0))
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1

    async def _metrics(self, request: Request) -> Response:
        usual = await super()._metrics(request)
        own = (
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {self.kv_use}\n'
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {self.running}.0\n'
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0\n'
        )
        return PlainTextResponse(bytes(usual.body).decode() + own)


def engine_of_a_pair(role: str) -> FakeEngine:
    """An engine of a pair, as slow as ``SlowEngine`` with requests to prefill and to decode."""
    from fake_pair_engine import PairEngine
    from sojourn_server.routing.routing_events import PairRole

    class SlowPairEngine(SlowEngine, PairEngine):
        pass

    engine = SlowPairEngine(PairRole(role))
    engine.epoch = f"e{os.getpid()}"
    engine.queued_s = 0.25
    return engine


async def main(port: int, *roles: str) -> None:
    """Run the engine until SIGTERM."""
    engine = engine_of_a_pair(*roles) if roles else SlowEngine()
    engine.port = port
    await engine.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await engine.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[2]), *sys.argv[3:]))
