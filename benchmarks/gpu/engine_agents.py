"""The parts ``agents`` and ``simulator`` of ``engine.py``: coding agents on a server, and in virtual time."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

if TYPE_CHECKING:
    from sojourn_server.launch.engine_server import EngineServer

BLOCK_TOKENS = 16
SHAPE = "llama-3.1-8b"
"""The simulator's name of the model's shape."""
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
        # Every other round in the opposite order, so that no policy always comes first.
        policies = arguments.policies.split(",")[:: -1 if number % 2 else 1]
        servers = {
            policy: server_of(
                policy, model, arguments, (arguments.logs or kept) / f"serve-{policy}-{number}.log"
            )
            for policy in policies
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
    from sojourn_server.simulator.latency.latency_profiles import load_model_shape
    from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
    from sojourn_server.simulator.workloads.arrival_processes import FiniteClosedLoop
    from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlanner

    kv_bytes = arguments.pool_tokens * load_model_shape(SHAPE).kv_bytes_per_token()
    spec = RunSpec(
        policy=policy,
        workload="the agents of benchmarks/gpu/engine.py",
        hardware=str(arguments.profile),
        model=SHAPE,
        async_scheduling=True,
        cpu_ratio=arguments.host_gib * 2**30 / kv_bytes,
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


def _llama_8b(folder: Path) -> str:
    import transformers
    from sojourn_server.models.model_cache import resolve_model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("tiny", progress=False))
    tokenizer.save_pretrained(folder)
    return str(folder)
