"""``python fake_pair_engine_process.py HOST PORT ROLE``: a fake engine of a pair as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine_process import SlowEngine
from fake_pair_engine import PairEngine
from sojourn_server.routing.routing_events import PairRole


class SlowPairEngine(SlowEngine, PairEngine):
    """Answers as slowly as ``SlowEngine``, to prefill and to decode requests."""


async def main(port: int, role: str) -> None:
    """Run the engine until SIGTERM."""
    engine = SlowPairEngine(PairRole(role))
    engine.port = port
    engine.epoch = f"e{os.getpid()}"
    engine.queued_s = 0.25
    await engine.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await engine.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[2]), sys.argv[3]))
