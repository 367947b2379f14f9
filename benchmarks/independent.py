"""Loads that a client of others sends, AIPerf, to stock vLLM and to sojourn on a real engine.

    python benchmarks/independent.py --traces traces --rounds 2 --out benchmarks/results

AIPerf (PyPI) knows nothing of sojourn: it sends ``X-Session-ID``, or not even that. No tools, no ends, no
hints. Each cell has its own model, memory and sessions, eight of them at once, to their ends:

- *sessions*: chats that AIPerf makes, of eight turns with pauses of 2 s.
- *no ids*: the same without the header. Here sojourn must not be slower than stock.
- *forks*: agents with a common system prompt, which start three sub-agents and wait for them.
- *work left*: agents of one type with 2 to 12 turns, by ids alone, and *stated*: with
  ``expected_steps_left`` in the body, as sojourn's SDK states it. Every fourth is short and urgent in
  *urgent*, and says so by ``priority`` in *urgent, stated*; the figures are of the urgent ones.
- *recorded*: sessions of coding agents (``kvct`` traces) whose contexts begin with 10,000 to 25,000 tokens,
  with their pauses, at most 10 s. On ``tiny`` computing is cheap, on ``smol`` it is dear; there all lengths
  are divided by five. ``sojourn trace import`` reads other traces.

An arm is a policy; ``+host`` gives it 1 GiB of host memory: stock has vLLM's own offloading. AIPerf is
installed into an environment of its own. Every second round reverses the arms. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from result_pages import Result, marked
from rich.console import Console
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.models.model_cache import model_directory
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

AIPERF = "aiperf==0.13.0"
USERS = 8
MAX_PAUSE_S = 10.0
FIRST_PROMPT_TOKENS = range(10_000, 25_001)
MAX_CONTEXT_TOKENS = 24_000
TURNS = range(4, 9)
"""Least and most turns of a recorded session; those after it are left out."""
HEADER = ("--session-header", "X-Session-ID")
CHATS = (
    "--num-sessions", "24", "--session-turns-mean", "8", "--session-turns-stddev", "0",
    "--session-turn-delay-mean", "2000", "--session-turn-delay-stddev", "0",
    "--isl", "600", "--isl-stddev", "0", "--osl", "60", "--osl-stddev", "0",
    "--extra-inputs", "ignore_eos:true",
)  # fmt: skip
URGENT = "urgent"
WORDS = (
    "time", "year", "people", "way", "day", "thing", "life", "world", "school", "state", "family", "group",
)  # fmt: skip
"""One token each, with the space before it."""
HEAD = (
    "cell", "arm", "requests/s", "session, mean s", "P95", "turn, mean s", "TTFT, mean s", "TTFT, P95 s",
    "prompt tokens found", "stock ÷ it: session", "turn", "TTFT, mean", "TTFT, P95",
)  # fmt: skip
FIGURES = ("session_mean_s", "turn_mean_s", "ttft_mean_s", "ttft_p95_s")
"""Figures that are compared with the first arm's."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A load, and the engine that serves it."""

    model: str
    blocks: int
    """KV blocks of the device, of 32 tokens."""
    max_model_len: int
    flags: Sequence[str] = HEADER
    """AIPerf's."""
    token_scale: float = 1.0


CELLS = {
    "sessions tiny": Cell(model="tiny", blocks=430, max_model_len=8192, flags=(*CHATS, *HEADER)),
    "no ids tiny": Cell(model="tiny", blocks=430, max_model_len=8192, flags=CHATS),
    "forks tiny": Cell(model="tiny", blocks=430, max_model_len=8192),
    "work left smol": Cell(model="smol", blocks=300, max_model_len=8192, flags=()),
    "work left smol stated": Cell(model="smol", blocks=300, max_model_len=8192, flags=()),
    "urgent smol": Cell(model="smol", blocks=300, max_model_len=8192, flags=()),
    "urgent smol stated": Cell(model="smol", blocks=300, max_model_len=8192, flags=()),
    "recorded tiny": Cell(model="tiny", blocks=1500, max_model_len=32_768),
    "recorded smol": Cell(model="smol", blocks=300, max_model_len=8192, token_scale=0.2),
}


def words(draw: random.Random, tokens: int) -> str:
    return " ".join(draw.choices(WORDS, k=max(1, tokens)))


def asked(
    text: str,
    output_tokens: int,
    *,
    delay_s: float = 0.0,
    system: str = "",
    hint: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A turn in AIPerf's ``dag_jsonl`` format, whose answer has exactly ``output_tokens``. ``hint``: an
    ``agentic_context`` (docs/wire.md)."""
    stated = {"vllm_xargs": {"agentic_context": json.dumps(hint)}} if hint else {}
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "messages": [*messages, {"role": "user", "content": text}], "max_tokens": max(1, output_tokens),
        "delay": 1000.0 * delay_s, "extra": {"ignore_eos": True, **stated},
    }  # fmt: skip


def forks(seed: int) -> Iterator[dict[str, Any]]:
    """Yield 16 agents of five turns, each with three sub-agents of three turns after the second."""
    draw = random.Random(seed)
    system = words(draw, 600)
    for number in range(16):
        subs = [f"agent-{number}-sub-{sub}" for sub in range(3)]
        turns = [asked(words(draw, 300), 60, delay_s=1.0 if turn else 0.0) for turn in range(5)]
        turns[0] = asked(words(draw, 600), 60, system=system)
        turns[1]["spawns"] = subs
        yield {"session_id": f"agent-{number}", "turns": turns}
        for sub in subs:
            first = asked(words(draw, 400), 60, system=system)
            later = [asked(words(draw, 200), 60, delay_s=0.5) for _ in range(2)]
            yield {"session_id": sub, "turns": [first, *later]}


def hinted(name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield 32 agents. What they state beside their id depends on the cell's name."""
    draw, stated = random.Random(seed), name.endswith("stated")
    for number in range(32):
        urgent = name.startswith(URGENT) and number % 4 == 3
        count = 3 if urgent else draw.randint(2, 12)
        session_id = f"{URGENT if urgent else 'agent'}-{seed}-{number}"
        turns = []
        for turn in range(count):
            hint: dict[str, Any] = {"program_id": session_id, "sojourn": {"agent_type": "worker"}}
            if stated and name.startswith(URGENT):
                hint["priority"] = 10 if urgent else 0
            elif stated:
                hint["sojourn"]["expected_steps_left"] = count - turn - 1
            turns.append(asked(words(draw, 300), 40, delay_s=0.5 if turn else 0.0, hint=hint))
        yield {"session_id": session_id, "turns": turns}


def recorded(folder: Path, seed: int, scale: float) -> Iterator[dict[str, Any]]:
    """Yield 16 sessions that fit, in random order. A pause of a person or of a tool is idle time alike."""
    fitting: list[tuple[TraceProgram, list[TraceTurn]]] = []
    for path in sorted(folder.glob("kvct*.jsonl*")):
        for program in read_trace(path):
            turns = list(takewhile(_goes_on, program.turns))[: TURNS[-1]]
            first = program.turns[0].prompt_tokens
            if program.parent is None and first in FIRST_PROMPT_TOKENS and len(turns) >= TURNS[0]:
                fitting.append((program, turns))
    random.Random(seed).shuffle(fitting)
    for program, turns in fitting[:16]:
        draw, before = random.Random(program.program_id), 0
        found: list[dict[str, Any]] = []
        shared = program.shared_prefix_tokens or 0
        for turn in turns:
            new_tokens = int(scale * max(8, turn.prompt_tokens - before - (0 if found else shared)))
            # What a recording shares is a system prompt here: the beginning of one endless text.
            system = words(random.Random(0), int(scale * shared)) if shared and not found else ""
            pause_s = min(MAX_PAUSE_S, turns[len(found) - 1].idle_s) if found else 0.0
            text = words(draw, new_tokens)
            found.append(asked(text, int(scale * turn.output_tokens), delay_s=pause_s, system=system))
            before = turn.prompt_tokens + turn.output_tokens
        yield {"session_id": program.program_id, "turns": found}


def _goes_on(turn: TraceTurn) -> bool:
    """Whether the turn fits, and continues the one before."""
    return not turn.reset and turn.prompt_tokens + turn.output_tokens <= MAX_CONTEXT_TOKENS


def installed(folder: Path) -> Path:
    """Return the program ``aiperf`` of an environment in ``folder``, which is made if it does not exist."""
    program = folder / "bin" / "aiperf"
    if not program.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", AIPERF], check=True)
    return program


def run(name: str, arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a cell once, on a server of its own. Returns its figures."""
    cell = CELLS[name]
    policy, _, host = arm.partition("+")
    serve_args = ["--num-gpu-blocks-override", str(cell.blocks), "--max-model-len", str(cell.max_model_len)]
    if host:
        serve_args += ["--kv-host-gib", "1", *(["--tier-backend", "vllm"] if policy == "stock" else [])]
    server = EngineServer(
        cell.model, policy=None if policy == "sojourn" else policy, serve_args=serve_args,
        # vLLM closes an idle connection after 5 s; a request that AIPerf sends at that moment fails.
        env={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"},
    )  # fmt: skip
    with server, tempfile.TemporaryDirectory() as scratch:
        lines: Sequence[dict[str, Any]] = ()
        if name.startswith("forks"):
            lines = list(forks(seed))
        elif name.startswith("recorded"):
            lines = list(recorded(options.traces, seed, cell.token_scale))
        elif name.startswith(("work left", URGENT)):
            lines = list(hinted(name, seed))
        load = Path(scratch) / "load.jsonl"
        load.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        of_file = ["--input-file", str(load), "--custom-dataset-type", "dag-jsonl"] if lines else []
        log = Path(scratch) / "aiperf.log"
        with log.open("wb") as output:
            done = subprocess.run(
                [
                    installed(options.env), "profile", "--model", cell.model, "--url", server.url,
                    "--endpoint-type", "chat", "--streaming", "--tokenizer", str(model_directory(cell.model)),
                    "--concurrency", str(USERS), "--random-seed", str(seed), "--use-server-token-count",
                    "--warmup-request-count", "1",  # the first request loads kernels
                    "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
                    "--output-artifact-dir", scratch, *cell.flags, *of_file,
                ],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(
                f"{name}, {arm}: aiperf ended with {done.returncode}:\n{log.read_text()[-2000:]}"
            )
        text = (Path(scratch) / "profile_export.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    counted = URGENT if name.startswith(URGENT) else ""
    return figures(
        [
            record
            for record in records
            if record["metadata"]["benchmark_phase"] == "profiling"
            and record["metadata"]["conversation_id"].startswith(counted)
        ]
    )


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of AIPerf's records, a request each. A session ends with its last sub-agent."""
    failed = [record["error"] for record in records if record.get("error")]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(records)} requests failed; the first: {failed[0]}")
    sessions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        told = record["metadata"]
        root = told.get("root_correlation_id") or told["x_correlation_id"]
        sessions[root].append((told["request_start_ns"], told["request_end_ns"]))
        for figure, metric in record["metrics"].items():
            values[figure].append(metric["value"])
    spans_s = sorted(
        (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9 for spans in sessions.values()
    )
    ttfts_s = sorted(value / 1000.0 for value in values["time_to_first_token"])
    ends = [span for spans in sessions.values() for span in spans]
    wall_s = (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e9
    return {
        "requests": len(records),
        "sessions": len(sessions),
        "requests_per_s": len(records) / wall_s,
        "session_mean_s": statistics.fmean(spans_s),
        "session_p95_s": spans_s[int(0.95 * len(spans_s))],
        "turn_mean_s": statistics.fmean(values["request_latency"]) / 1000.0,
        "ttft_mean_s": statistics.fmean(ttfts_s),
        "ttft_p95_s": ttfts_s[int(0.95 * len(ttfts_s))],
        "prompt_tokens": sum(values["usage_prompt_tokens"]),
        "found_share": sum(values["usage_prompt_cache_read_tokens"]) / sum(values["usage_prompt_tokens"]),
    }


def rows(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, as text: medians over the rounds, ratios of medians."""
    found = []
    for cell in cells:
        arms: dict[str, list[dict[str, Any]]] = cell["arms"]

        def median(arm: str, figure: str, arms: Any = arms) -> float:
            return float(statistics.median(each[figure] for each in arms[arm]))

        first = next(iter(arms))
        for arm, runs in arms.items():
            found.append(
                [
                    cell["cell"], f"`{arm}`", f"{median(arm, 'requests_per_s'):.2f}",
                    f"{median(arm, 'session_mean_s'):.1f}", f"{median(arm, 'session_p95_s'):.1f}",
                    f"{median(arm, 'turn_mean_s'):.2f}", f"{median(arm, 'ttft_mean_s'):.2f}",
                    ", ".join(f"{each['ttft_p95_s']:.2f}" for each in runs),
                    f"{median(arm, 'found_share'):.0%}",
                    *(f"{median(first, figure) / median(arm, figure):.2f}" for figure in FIGURES),
                ]
            )  # fmt: skip
    return found


def main() -> None:
    """Run all cells; write the results after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of kvct*.jsonl.gz traces, for recorded sessions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default="stock,sojourn,stock+host,sojourn+host")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--env", type=Path, default=Path.home() / ".cache" / "sojourn" / AIPERF)
    parser.add_argument("--out", type=Path, required=True, help="folder for independent.json and .md")
    options = parser.parse_args()
    arms, wanted = options.arms.split(","), options.cells.split(",")
    unknown = [name for name in wanted if name not in CELLS]
    if unknown:
        parser.error(f"--cells {unknown[0]}: expected names of {', '.join(CELLS)}")
    if options.traces is None and any(name.startswith("recorded") for name in wanted):
        parser.error("recorded sessions need --traces")
    result = Result("independent", "Loads of an independent client")
    about = (
        f"{AIPERF} with {USERS} sessions at once, to their ends, on the CPU engine. `+host`: 1 GiB of host "
        f"memory. Rounds have seeds 0 to {options.rounds - 1} and alternate the order of the arms. Columns "
        "are medians over rounds; P95 of TTFT has each round. The last four columns: the first arm's "
        "median over this one's."
    )
    cells: list[dict[str, Any]] = [{"cell": name, "arms": {arm: [] for arm in arms}} for name in wanted]
    for seed in range(options.rounds):
        for cell in cells:
            for arm in reversed(arms) if seed % 2 else arms:
                found = run(cell["cell"], arm, seed, options)
                cell["arms"][arm].append(found)
                Console(stderr=True).print(f"{cell['cell']}, round {seed}, {arm}: {found}", highlight=False)
            done = [each for each in cells if all(each["arms"].values())]
            result.write(options.out, {"cells": done}, about, marked(HEAD, rows(done)), "{by hand}")


if __name__ == "__main__":
    main()
