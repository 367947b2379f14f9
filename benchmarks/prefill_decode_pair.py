"""Gain of a second path to storage for pairs of real engines with slow storage links.

    python benchmarks/prefill_decode_pair.py --out benchmarks/results
    python benchmarks/prefill_decode_pair.py --pairs 2 --out benchmarks/results

Prefill and decode engines of vLLM run on this machine's CPU, behind one gateway for each ``--read-side``.
``slow_link_connector.py`` slows their links to storage down, so that reading dominates. The model has the
shape of ``tiny`` and weights that make each token depend on all previous ones. First each gateway gets every
request once. The first computes them, which is the reference: a later answer with other tokens fails the run.
Then all requests are sent at once, and one longer request alone. Devices are cleared between runs, so all
do the same work. Gateways alternate, ``--rounds`` times; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import httpx
from gateway_processes import gateway
from result_pages import Result, marked, show
from rich.console import Console
from slow_link_connector import MEGABYTES_S
from sojourn_server.launch.engine_server import EngineServer, free_port
from sojourn_server.models import resolve_model
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import FULL_BLOCK_TOKENS

ARMS = {"prefill": "prefill side", "shorter": "shorter queue"}
"""``--read-side`` of a gateway → who reads."""
STORED_TOKENS = {"burst": 6_016, "alone": 8_000}
"""Stored tokens of a request by case: whole Full Blocks."""
APPEND_TOKENS, OUTPUT_TOKENS = 50, 8
"""New tokens of a request. Together they stay below a Full Block: else it would be stored, and the next run
had less to do. An engine stores 32 Full Blocks a step, so fewer outputs would not store all."""
RUNS = {"burst": 1, "alone": 5}
"""Number of runs of each case per round. A single request takes only a second, so it is repeated."""
SEED = 0
BLOCK_TOKENS, TOKEN_BYTES = 32, 512
"""Tokens of a KV block, and bytes of a token's KV in 32-bit floats."""
PATIENCE_S = 300.0
HEARD_S = 3.0
"""Seconds until gateways have heard that the engines' caches are empty; they poll about once a second."""


class Question(NamedTuple):
    """A request, always of the same program."""

    program: str
    prompt: list[int]


class Response(NamedTuple):
    """An answer's tokens, and the seconds until the first of them."""

    tokens: tuple[int, ...]
    first_s: float


# -- engines ------------------------------------------------------------------------------


def pair_engine(role: str, number: int, model: str, pool_tokens: int, folder: Path) -> EngineServer:
    """Return an engine that is not started. Its KV pool is also the longest context, up to 16,384 tokens."""
    name, blocks = f"{role[0]}{number}", pool_tokens // BLOCK_TOKENS
    transfer = {
        "kv_connector": "SlowPaths",
        "kv_connector_module_path": "slow_link_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "role": role, "node": name, "listen": f"unix:{folder / name}.sock", "store_name": name,
            "store": str(folder / "store"), "store_bytes": 1 << 36,
            "buffer_bytes": 2 * pool_tokens * TOKEN_BYTES,
            "keep_on_reset": True,  # between two runs, only the KV on the device is cleared
            "patience_s": 10.0,  # on a busy machine threads may be delayed for a while
        },
    }  # fmt: skip
    return EngineServer(
        model,
        policy="observe",
        serve_args=(
            "--kv-transfer-config", json.dumps(transfer), "--no-async-scheduling", "--dtype", "float32",
            "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(blocks + 1),  # one is vLLM's null block
            "--kv-cache-memory-bytes", str(1 << 30),  # else most of the machine's memory
            "--max-model-len", str(min(blocks * BLOCK_TOKENS, 16_384)), "--max-num-seqs", "64",
            "--max-num-batched-tokens", "1024", "--served-model-name", "model",
        ),
        env={
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(Path(__file__).parent),
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            # An engine that spins while it waits takes cores from working engines. So the worker has no
            # process of its own, which would spin for a second after each step, and threads sleep.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        },
        log_path=folder / f"{name}.log",
        ready_timeout_s=600.0,
    )  # fmt: skip


def loud_model(folder: Path) -> str:
    """Make a model with the shape of ``tiny``, and return its folder. Each of its tokens depends on all
    previous ones. ``tiny`` itself repeats one word, even if its KV is wrong."""
    import torch
    import transformers

    tiny = resolve_model("tiny")
    config = transformers.AutoConfig.from_pretrained(tiny)
    config.tie_word_embeddings = False  # tied embeddings make it repeat the last token
    config.initializer_range = 0.15
    config.vocab_size = 4096
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


def settle(engines: Sequence[EngineServer]) -> dict[str, int]:
    """Wait until no transfer is under way, and clear the engines' prefix caches. Return the bytes that each
    has read from storage."""
    read: dict[str, int] = {}
    end_s = time.monotonic() + PATIENCE_S
    for engine in engines:
        while True:
            paths = httpx.get(f"{engine.url}/sojourn/v1/stats", timeout=60, trust_env=False).json()["paths"]
            queued = sum(link["queued_bytes"] for link in paths["links"].values())
            if not (paths["slots_used"] or paths["leases_waiting"] or queued):
                break
            if time.monotonic() > end_s:
                raise SystemExit(f"{engine.url} does not come to rest: {paths}")
            time.sleep(0.1)
        read[engine.url] = paths["links"]["storage read"]["moved_bytes"]
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
    time.sleep(HEARD_S)
    return read


# -- requests -----------------------------------------------------------------------------


async def ask(http: httpx.AsyncClient, url: str, question: Question) -> Response:
    """Send a request to a gateway, and return the answer. Raises ``httpx.HTTPError`` or ``SystemExit``."""
    body = {
        "model": "model", "prompt": question.prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    began_s, first_s = time.monotonic(), 0.0
    tokens: list[int] = []
    headers = {"X-Session-ID": question.program}
    async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        if answer.is_error:
            raise SystemExit(f"{url} answers {answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"{url}: {event['error']}")
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                first_s = first_s or (time.monotonic() - began_s if tokens else 0.0)
    return Response(tuple(tokens), first_s)


async def measure(
    engines: Sequence[EngineServer], gateways: dict[str, str], options: argparse.Namespace, console: Console
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Measure all cases and arms. Return the runs by case and arm."""
    draw = random.Random(SEED)
    cases = {
        case: [
            Question(f"{case} {number}", draw.choices(range(10, 4000), k=stored + APPEND_TOKENS))
            for number in range(options.requests if case == "burst" else 1)
        ]
        for case, stored in STORED_TOKENS.items()
    }
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
        for arm, url in gateways.items():
            for question in (question for asked in cases.values() for question in asked):
                answer = await ask(http, url, question)
                same = expected.setdefault(question.program, answer.tokens) == answer.tokens
                if not same:
                    raise SystemExit(f"{question.program}, {arm}: other tokens than computed")
            before = settle(engines)
            console.print(f"{arm}: {len(expected)} requests are known")
        for turn in range(options.rounds):
            for case, questions in cases.items():
                for arm in [*gateways] * RUNS[case]:
                    began_s = time.monotonic()
                    answers = await asyncio.gather(*(ask(http, gateways[arm], each) for each in questions))
                    wall_s = time.monotonic() - began_s
                    if [answer.tokens for answer in answers] != [
                        expected[each.program] for each in questions
                    ]:
                        raise SystemExit(f"{case}, {arm}: other tokens than computed")
                    after = settle(engines)
                    read = [after[url] - before[url] for url in after]
                    before = after
                    wanted = len(questions) * STORED_TOKENS[case] * TOKEN_BYTES
                    if sum(read) != wanted:
                        raise SystemExit(f"{case}, {arm}: {read} bytes were read, and {wanted} are stored")
                    run = {
                        "wall_s": wall_s,
                        "first_token_s": median(answer.first_s for answer in answers),
                        "max_over_mean": max(read) / mean(read),
                    }
                    found.setdefault((case, arm), []).append(run)
                    console.print(f"round {turn + 1}: {case}, {arm}: {wall_s:.2f} s")
    return found


# -- the page -----------------------------------------------------------------------------

HEAD = (
    "requests", "read by", "all answered s", "times as fast", "first token s", "times as soon",
    "max / mean",
)  # fmt: skip


def rows_of(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row of medians for each case and arm."""
    rows: list[dict[str, Any]] = []
    for (case, arm), runs in found.items():
        row: dict[str, Any] = {name: median(run[name] for run in runs) for name in runs[0]}
        basis = row if arm == "prefill" else next(each for each in rows if each["case"] == case)
        row["times_as_fast"] = basis["wall_s"] / row["wall_s"]
        row["times_as_soon"] = basis["first_token_s"] / row["first_token_s"]
        rows.append({"case": case, "read by": ARMS[arm], **row, "runs": runs})
    return rows


def cells(row: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return the cells of a table row."""
    names = ("wall_s", "times_as_fast", "first_token_s", "times_as_soon", "max_over_mean")
    what = f"{options.requests} at once" if row["case"] == "burst" else "one alone"
    return [what, row["read by"], *(f"{row[name]:.2f}" for name in names)]


def about(options: argparse.Namespace) -> str:
    """Return what the page says of its table."""
    engines = "a prefill and a decode engine" if options.pairs == 1 else f"{options.pairs} of each"
    return (
        f"Of vLLM's CPU engines {engines}, a model of the shape of `tiny` in 32-bit floats, each engine with "
        f"a storage link of {MEGABYTES_S:g} MB/s of its own, behind a gateway. {options.requests} requests "
        f"at once, of {STORED_TOKENS['burst']:,} stored tokens each and {APPEND_TOKENS} new ones, and one "
        f"alone of {STORED_TOKENS['alone']:,}; {OUTPUT_TOKENS} tokens of output. Medians of {options.rounds} "
        f"rounds, each with {RUNS['alone']} of the one alone, seed {SEED}. All arms say the tokens that were "
        "said before anything was stored."
    )


COLUMNS_ABOUT = (
    "*First token* is the median of the requests, at the client; *max / mean* is what the busiest storage "
    "link has read over the mean of all."
)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1, help="engines that prefill, and as many that decode")
    parser.add_argument("--requests", type=int, default=20, help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder to write prefill_decode_pair.json and .md into")
    options = parser.parse_args()
    file_name = "prefill_decode_pair" + (f"_{options.pairs}" if options.pairs > 1 else "")
    result, console = Result(file_name, "Pairs of real engines on slow links"), Console(stderr=True)
    # All requests together fit one engine, since reading is measured.
    stored = max(options.requests * STORED_TOKENS["burst"], STORED_TOKENS["alone"])
    pool_tokens = stored + 2 * FULL_BLOCK_TOKENS * options.requests
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "store").mkdir()
        model = loud_model(folder / "model")
        by_role = {
            role: [pair_engine(role, number, model, pool_tokens, folder) for number in range(options.pairs)]
            for role in ("prefill", "decode")
        }
        engines = [engine for of_role in by_role.values() for engine in of_role]
        for engine in engines:
            stack.callback(engine.stop)
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(EngineServer.start, engines))
        gateways = {}
        for arm in ARMS:
            port = free_port("127.0.0.1")
            gateways[arm] = f"http://127.0.0.1:{port}"
            flags = ["--read-side", arm]
            for role, of_role in by_role.items():
                flags += [f"--{role}", ",".join(engine.url for engine in of_role)]
            stack.enter_context(gateway(flags, port, len(engines)))
        rows = rows_of(asyncio.run(measure(engines, gateways, options, console)))
    table = [cells(row, options) for row in rows]
    show(HEAD, table, title=f"{options.pairs} and {options.pairs} engines")
    if options.out is not None:
        made_of = {"pairs": options.pairs, "requests": options.requests, "rounds": options.rounds}
        document = {"options": made_of, "rows": rows}
        result.write(options.out, document, about(options), marked(HEAD, table), COLUMNS_ABOUT, "{by hand}")


if __name__ == "__main__":
    main()
