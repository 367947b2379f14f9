"""Eight sessions of a coding agent that people run (Pi) at once, on a real engine that holds three contexts.

    python benchmarks/coding_agents.py --rounds 2 --out benchmarks/results

The client is not changed and knows nothing of sojourn. Its answers are scripted (``tests/clients``): shell
commands of two to five seconds, which stand for builds and tests, and a sentence. Prompts, KV and scheduling
are real. Every second round reverses the order of the arms. Needs npm, which installs the client.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from result_pages import Result, marked, show
from sojourn_server.demo.demo_run import read_counts
from sojourn_server.launch.engine_server import EngineServer

CLIENTS_FOLDER = Path(__file__).parents[1] / "tests" / "clients"
sys.path.insert(0, str(CLIENTS_FOLDER))
from coding_clients import CLIENTS, FINISHED  # noqa: E402

CLIENT = next(each for each in CLIENTS if each.name == "Pi")
MODEL, SESSIONS, ARMS = "smol", 8, ("stock", "sojourn")
POOL_TOKENS = 11_008
"""Three final contexts of a session. The page reports how long they were."""
MEMORY_RULES = 100
"""Rules in each project's AGENTS.md, which the client sends in its system prompt."""
PREFIX_CACHE = [f"vllm:prefix_cache_{what}_total" for what in ("queries", "hits")]
"""vLLM's counters of prompt tokens: looked up in the prefix cache, and found there."""
HEAD = ("arm", "completion, mean, s", "each round", "stock ÷ it", "P95, s", "P95, stock ÷ it", "tokens found")


def run_arm(arm: str, seed: int) -> dict[str, Any]:
    """Run all sessions once, on an engine of their own. Raises ``RuntimeError`` if a session fails."""
    flags = ["--logits-processors", "scripted_answers:ScriptedAnswers", "--max-model-len", "8192"]
    flags += ["--block-size", "32", "--num-gpu-blocks-override", str(POOL_TOKENS // 32)]
    env = {"PYTHONPATH": str(CLIENTS_FOLDER)}
    with (
        EngineServer(MODEL, policy=arm, serve_args=flags, env=env) as server,
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(SESSIONS) as pool,
    ):

        def session(number: int, script: str = "build") -> float:
            rules = random.Random(f"{seed} {number}").choices(range(10_000), k=MEMORY_RULES)
            memory = " ".join(f"rule {rule}" for rule in rules)
            client = replace(CLIENT, files={**CLIENT.files, "work/AGENTS.md": memory})
            home, prompt = Path(folder) / f"{script}-{number}", f"Do it. SCRIPT-{script}-{number}"
            started = time.monotonic()
            running = client.start(server.url, home, prompt, model=MODEL)
            output, _ = running.communicate(timeout=900)
            taken_s = round(time.monotonic() - started, 2)
            if FINISHED not in output:
                raise RuntimeError(f"{arm}, session {number}: {output[-2000:]}\n{server.log_tail()}")
            print(f"round {seed}, {arm}: session {number} took {taken_s:.0f} s", file=sys.stderr)
            return taken_s

        session(99, "helper")  # the first request loads kernels
        before = read_counts(server.url)
        completions_s = list(pool.map(session, range(10, 10 + SESSIONS)))
        after = read_counts(server.url)
        asked, found = (after[name] - before[name] for name in PREFIX_CACHE)
        told = {} if arm == "stock" else ledger(server.url)
        return {"completions_s": completions_s, "found_share": found / asked, **told}


def ledger(url: str) -> dict[str, float]:
    """Return the sessions' mean final context, and the share of their prompts that was found."""
    address = f"{url}/sojourn/v1/programs"
    with httpx.Client(trust_env=False, timeout=30) as http:
        sessions = [each for each in http.get(address).json()["programs"] if each["turns"] > 2]
        ledgers = [http.get(f"{address}/{each['program_id']}").json()["ledger"] for each in sessions]
    turns = [row["tokens"] for rows in ledgers for row in rows]
    return {
        "context_tokens": statistics.fmean(each["context_tokens"] for each in sessions),
        "ledger": sum(each["device"] for each in turns) / sum(each["prompt"] for each in turns),
    }


def lines(rounds: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, as text. Mean and P95 are over the sessions of all rounds."""
    rows, stock = [], (0.0, 0.0)
    for arm in ARMS:
        runs = [each[arm] for each in rounds if arm in each]
        all_s = sorted(value for run in runs for value in run["completions_s"]) or [math.inf]
        mean_s, p95_s = statistics.fmean(all_s), all_s[int(0.95 * len(all_s))]
        stock = (mean_s, p95_s) if arm == "stock" else stock
        each_s = ", ".join(f"{statistics.fmean(run['completions_s']):.1f}" for run in runs)
        found = ", ".join(f"{run['found_share']:.0%}" for run in runs)
        ratios = (f"{stock[0] / mean_s:.2f}", f"{stock[1] / p95_s:.2f}")
        rows.append([arm, f"{mean_s:.1f}", each_s, ratios[0], f"{p95_s:.1f}", ratios[1], found])
    return rows


def about(rounds: list[dict[str, Any]], version: str) -> str:
    """Return what the page says of its table."""
    told = [each["sojourn"] for each in rounds if "sojourn" in each] or [{"context_tokens": 0, "ledger": 0}]
    context, found = (statistics.fmean(run[name] for run in told) for name in ("context_tokens", "ledger"))
    return (
        f"{SESSIONS} sessions of {CLIENT.name} {version} at once on `{MODEL}` (CPU), KV for {POOL_TOKENS:,} "
        f"tokens, final contexts of {context:,.0f} tokens, no host memory. Answers are scripted; prompts, KV "
        "and scheduling are real. A completion is the time from the start of the client's process to its "
        f"end. With `sojourn` the engine's ledger finds {found:.0%} of the prompts' tokens."
    )


def main() -> None:
    """Run and print; write the results after each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder for coding_agents.json and .md")
    options = parser.parse_args()
    version, rounds = CLIENT.install(), []
    result = Result("coding_agents", "Sessions of an unchanged coding agent")
    for seed in range(options.rounds):
        rounds.append({})
        for arm in ARMS[::-1] if seed % 2 else ARMS:
            rounds[-1][arm] = run_arm(arm, seed)
            document = {"version": version, "rounds": rounds, "wall_s": round(result.wall_s)}
            words, table = about(rounds, version), marked(HEAD, lines(rounds))
            result.write(options.out, document, words, table, "{by hand}")
    show(HEAD, lines(rounds))


if __name__ == "__main__":
    main()
