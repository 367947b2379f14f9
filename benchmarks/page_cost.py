"""CPU that viewers of the web page cost a server: the engine's snapshot, the frames and the connections.

    python benchmarks/page_cost.py --json benchmarks/results/page_cost.json

A separate process holds the scheduler's state of ``--programs`` programs, and the routes of the API server.
It runs no model. In each frame, a tenth of the programs has changes. Viewers read ``/sojourn/v1/stream`` as
the page does. Periods without viewers, with one and with five alternate, ``--rounds`` times. A period begins
after the first, full frame. A share is the process's CPU time over the period, less that of the period
without viewers before it; the report has medians over the rounds. In vLLM the snapshot runs in the engine
core's process, and its bytes cross to the API server's, which this leaves out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
VIEWERS = (0, 1, 5)
TARGET_SHARE = 0.01
ACTIVE = 10
"""One in this many programs has changes in each frame."""


def serve(programs: int) -> None:
    """Serve ``programs`` made-up programs on a free port, which is printed."""
    sys.path.insert(0, str(SUPPORT))
    import socket

    import uvicorn
    from fastapi import FastAPI
    from sojourn.wire_events import ProgramStart, ToolStart
    from sojourn_server.api.api_keys import ApiKeys
    from sojourn_server.api.routes import build_router
    from virtual_engine import VirtualEngine

    engine = VirtualEngine("sojourn", blocks=16 * programs)
    names = [f"program-{number:05}" for number in range(programs)]
    for name in names:
        engine.send(
            ProgramStart(program_id=name, seq=0, name="agent"),
            ToolStart(program_id=name, seq=1, call_id="c", tool="bash"),
        )
    known = [engine.program(name) for name in names]

    class Rpc:
        def engine_ids(self) -> list[str]:
            return ["0"]

        async def call(self, op: str, payload: str) -> list[str]:
            engine.now += 0.5
            for program in known[::ACTIVE]:
                program.last_contact_s = engine.now
            return [engine.service.call(op, payload, engine.now)]

    keys = ApiKeys()
    keys.configure([])
    app = FastAPI()
    app.include_router(build_router(Rpc(), keys))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        print(bound.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none")).run(sockets=[bound])


def cpu_s(process_id: int) -> float:
    """CPU seconds of a process's main thread so far."""
    return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[0]) / 1e9


async def period(url: str, process_id: int, viewers: int, seconds: float) -> tuple[float, float, float]:
    """Return the server's CPU share while ``viewers`` viewers read, and the bytes and frames per second of a
    viewer."""
    sizes: list[int] = []
    ready = asyncio.Semaphore(0)

    async def view(client: httpx.AsyncClient) -> None:
        first = True
        async with client.stream("GET", f"{url}/sojourn/v1/stream") as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line and not first:
                    sizes.append(len(line))
                if line and first:
                    first = False
                    ready.release()

    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        tasks = [asyncio.create_task(view(client)) for _ in range(viewers)]
        for _ in tasks:
            await ready.acquire()
        sizes.clear()
        before, started = cpu_s(process_id), time.monotonic()
        await asyncio.sleep(seconds)
        share = (cpu_s(process_id) - before) / (time.monotonic() - started)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    each = max(1, viewers) * seconds
    return share, sum(sizes) / each, len(sizes) / each


async def measure(url: str, process_id: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The report's figures by number of viewers."""
    found: dict[int, list[tuple[float, float, float]]] = {viewers: [] for viewers in VIEWERS}
    for _ in range(rounds):
        idle, _, _ = await period(url, process_id, 0, seconds)
        found[0].append((idle, 0.0, 0.0))
        for viewers in VIEWERS[1:]:
            share, byte_rate, frame_rate = await period(url, process_id, viewers, seconds)
            found[viewers].append((share - idle, byte_rate, frame_rate))
    return {
        str(viewers): {
            "share": round(statistics.median(share for share, _, _ in rows), 5),
            "shares": [round(share, 5) for share, _, _ in rows],
            "bytes_per_s_each": round(statistics.median(size for _, size, _ in rows)),
            "frames_per_s": round(statistics.median(frames for _, _, frames in rows), 2),
        }
        for viewers, rows in found.items()
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="length of a period; above 15: full frames too"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.programs)
        return
    command = [sys.executable, __file__, "--serve", "--programs", str(chosen.programs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            rows = asyncio.run(measure(url, server.pid, chosen.rounds, chosen.seconds))
        finally:
            server.terminate()
    report = {
        "programs": chosen.programs,
        "seconds": chosen.seconds,
        "rounds": chosen.rounds,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load_1min": round(os.getloadavg()[0], 1),
        "viewers": rows,
        "passed": rows[str(VIEWERS[-1])]["share"] <= TARGET_SHARE,
    }
    table = Table(title=f"{chosen.programs} programs, {chosen.rounds} x {chosen.seconds:g} s")
    for column in ("viewers", "share of a core", "kB/s each", "frames/s"):
        table.add_column(column, justify="right")
    for viewers, row in rows.items():
        table.add_row(
            viewers, f"{row['share']:.2%}", f"{row['bytes_per_s_each'] / 1000:.1f}", str(row["frames_per_s"])
        )
    console = Console()
    console.print(table)
    verdict = "met" if report["passed"] else "missed"
    console.print(f"target: five viewers at most {TARGET_SHARE:.0%} of a core: {verdict}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
