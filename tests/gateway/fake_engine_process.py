"""``python fake_engine_process.py HOST PORT``: a fake engine as a process of its own, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine
from starlette.requests import Request
from starlette.responses import Response


class SlowEngine(FakeEngine):
    """Answers after the request's ``delay_s``. A stream has ``events`` events, ``gap_s`` apart."""

    async def _generate(self, request: Request) -> Response:
        await asyncio.sleep((await request.json()).get("delay_s", 0))
        return await super()._generate(request)

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        body = await request.json()
        for number in range(body.get("events", 5)):
            yield f'data: {{"number": {number}, "at": "{self.name}"}}\n\n'.encode()
            await asyncio.sleep(body.get("gap_s", 0))
        yield b"data: [DONE]\n\n"


async def main(port: int) -> None:
    """Run the engine until SIGTERM."""
    engine = SlowEngine()
    engine.port = port
    await engine.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await engine.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[2])))
