"""Generation and events of other clients while one client floods the engine with events.

    python benchmarks/event_flood.py --out benchmarks/results

One engine serves the model ``tiny``. One client streams completions one after another. Another client posts a
few events five times a second, as an agent's SDK does. In half of the rounds (order A B B A), a process with
eight connections posts batches of 1,000 events as fast as they are answered. Reports time to first token,
time per output token, and lost events. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from pathlib import Path
from statistics import median

import httpx
from result_pages import made_by, marked, show, write_result
from rich.progress import track
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.simulator.report.results_file import made_with

CONNECTIONS = 8
BATCH_EVENTS = 1000
OUTPUT_TOKENS = 32
EVENT_INTERVAL_S = 0.2
ROUND_S = 8.0
LEAD_S = 1.0
"""Seconds from the start of the flood to the start of a round's measurement."""
ARGS = ("--max-model-len", "2048")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The flood and the API server need the second core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
HEAD = ("", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "TPOT p95 ms", "own events lost", "flood events/s")


def flood(
    host: str, port: int, stop: multiprocessing.synchronize.Event, handled: multiprocessing.Queue[int]
) -> None:
    """Post batches over ``CONNECTIONS`` connections until ``stop`` is set. Then put the number of accepted
    events into ``handled``."""
    batches = []
    for number in range(16):
        events = [
            {"type": "tool_start", "program_id": f"f{number}-{n}", "seq": n, "call_id": f"c{n}", "tool": "t"}
            for n in range(BATCH_EVENTS)
        ]
        body = json.dumps({"v": 1, "emitter": f"flood{number}", "events": events}).encode()
        head = f"POST /sojourn/v1/events HTTP/1.1\r\nHost: e\r\nContent-Length: {len(body)}\r\n\r\n"
        batches.append(head.encode() + body)
    accepted = 0

    async def connection(number: int) -> None:
        nonlocal accepted
        while not stop.is_set():
            reader, writer = await asyncio.open_connection(host, port)
            try:
                while not stop.is_set():
                    writer.write(batches[number % len(batches)])
                    number += CONNECTIONS
                    head = await reader.readuntil(b"\r\n\r\n")
                    size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                    await reader.readexactly(size)
                    accepted += BATCH_EVENTS if b" 200 " in head.split(b"\r\n")[0] else 0
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

    async def run() -> None:
        tasks = [asyncio.create_task(connection(number)) for number in range(CONNECTIONS)]
        while not stop.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()

    asyncio.run(run())
    handled.put(accepted)


async def measure(url: str, seed: int) -> tuple[list[float], list[float], int, int]:
    """Measure one round. Returns each request's seconds to first token, its seconds per output token, and two
    numbers of events of the client that posts few events: lost and sent."""
    ttft, tpot = [], []
    lost = sent = 0
    end = time.perf_counter() + ROUND_S
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:

        async def post_events() -> None:
            nonlocal lost, sent
            while time.perf_counter() < end:
                name = f"good-{seed}-{sent}"
                events = [{"type": "program_start", "program_id": name, "seq": 0}]
                events += [{"type": "heartbeat", "program_id": name, "seq": n} for n in range(1, 4)]
                body = {"v": 1, "emitter": "good", "events": events}
                answer = await http.post(f"{url}/sojourn/v1/events", json=body)
                outcomes = answer.json().get("outcomes", []) if answer.status_code == 200 else []
                sent += len(events)
                lost += len(events) - sum(one["outcome"] == "applied" for one in outcomes)
                await asyncio.sleep(EVENT_INTERVAL_S)

        task = asyncio.create_task(post_events())
        number = 0
        while time.perf_counter() < end:
            number += 1
            body = {
                "model": "tiny", "prompt": [100 + seed, 200 + number % 50] * 32, "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True, "temperature": 0, "stream": True,
            }  # fmt: skip
            began, tokens = time.perf_counter(), []
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        tokens.append(time.perf_counter())
            ttft.append(tokens[0] - began)
            tpot.append((tokens[-1] - tokens[0]) / (OUTPUT_TOKENS - 1))
        await task
    return ttft, tpot, lost, sent


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds without and with the flood, each")
    parser.add_argument("--policy", default="continuum")
    parser.add_argument("--out", type=Path, help="folder to write event_flood.json and .md into")
    options = parser.parse_args()
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, list[float]]] = {
        name: {"ttft": [], "tpot": [], "lost": [], "sent": [], "flood": []} for name in ("quiet", "flood")
    }
    with EngineServer("tiny", policy=options.policy, serve_args=ARGS, env=ENVIRONMENT) as server:
        port = int(server.url.rpartition(":")[2])
        asyncio.run(measure(server.url, 0))
        for number in track(range(2 * options.rounds), description="rounds", transient=True):
            name = "flood" if number % 4 in (1, 2) else "quiet"
            stop, handled = context.Event(), context.Queue()
            process = context.Process(target=flood, args=("127.0.0.1", port, stop, handled), daemon=True)
            flooding_since = time.perf_counter()
            if name == "flood":
                process.start()
                time.sleep(LEAD_S)
            ttft, tpot, lost, sent = asyncio.run(measure(server.url, number + 1))
            one = found[name]
            one["ttft"] += ttft
            one["tpot"] += tpot
            one["lost"].append(lost)
            one["sent"].append(sent)
            if name == "flood":
                stop.set()
                one["flood"].append(handled.get(timeout=30) / (time.perf_counter() - flooding_since))
                process.join(30)

    def p95(values: list[float]) -> float:
        return sorted(values)[int(0.95 * (len(values) - 1))]

    result = {
        name: {
            "ttft_p50_ms": round(1000 * median(one["ttft"]), 2),
            "ttft_p95_ms": round(1000 * p95(one["ttft"]), 2),
            "tpot_p50_ms": round(1000 * median(one["tpot"]), 3),
            "tpot_p95_ms": round(1000 * p95(one["tpot"]), 3),
            "requests": len(one["ttft"]),
            "events_lost": int(sum(one["lost"])),
            "events_sent": int(sum(one["sent"])),
            "flood_events_per_s": round(median(one["flood"])) if one["flood"] else 0,
        }
        for name, one in found.items()
    }
    keys = ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms")
    ratios = {key.removesuffix("_ms"): round(result["flood"][key] / result["quiet"][key], 3) for key in keys}
    rows = [
        [
            name,
            *(f"{one[key]:.2f}" for key in keys),
            f"{one['events_lost']} of {one['events_sent']}",
            f"{one['flood_events_per_s']:,}",
        ]
        for name, one in result.items()
    ]
    rows.append(["flood ÷ quiet", *(f"{ratio:.2f}" for ratio in ratios.values()), "", ""])
    show(HEAD, rows, title=f"{CONNECTIONS} connections flood with batches of {BATCH_EVENTS:,} events")
    if options.out is not None:
        made = made_with(sys.argv)
        setting = f"model `tiny`, policy `{options.policy}`, {options.rounds} rounds of {ROUND_S:g} s"
        text = (
            f"# Generation during a flood of events\n\n{made_by(made, time.monotonic() - began)}\n\n"
            f"Setting: {setting} each, without and with the flood, in the order A B B A.\n"
            f"Own events are those of a well-behaved client.\n\n{marked(HEAD, rows)}\n\n{{by hand}}\n"
        )
        write_result(options.out, "event_flood", made, {"result": result, "ratios": ratios}, text)


if __name__ == "__main__":
    main()
