"""Runs of ``engine.py``: agents on an arm's server, and in the simulator."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_and_simulator import replay, simulate
from engine_loads import Arm, Load, Setup
from sojourn_server.metrics.summary_statistics import summarise
from sojourn_server.replay.completions_client import CompletionsClient
from sojourn_server.replay.replay_driver import ReplayOptions
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_schema import TraceProgram

if TYPE_CHECKING:
    from sojourn_server.launch.engine_server import EngineServer

GIB = 2**30
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
CUDA_FLAGS = (
    # Several servers share the device, so vLLM cannot measure what is free for itself.
    "--gpu-memory-utilization", "0.05",
    "--compilation-config", '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}',
    "--load-format", "dummy",
)  # fmt: skip
START_LIMIT_S = 200.0
VOCABULARY = 8_000
CACHED, COMPUTED = "vllm:prompt_tokens_cached_by_source_total", "vllm:prompt_tokens_by_source_total"
PREEMPTIONS = "vllm:num_preemptions_total"
FROM_DISK = 'what="staged"'
"""Label of sojourn's moves from disk to host memory, in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneSpeed:
    """Speed of the engine for one request at a time. It gives the completion time of a program alone."""

    request_s: float
    prompt_token_s: float
    output_token_s: float

    def completion_s(self, program: TraceProgram) -> float:
        """Return the time of the program on an idle engine that keeps all its KV."""
        turns = plan_turns(program)
        prompts_s = sum(self.request_s + turn.new_tokens * self.prompt_token_s for turn in turns)
        outputs_s = sum(turn.output_tokens - 1 for turn in turns) * self.output_token_s
        return prompts_s + outputs_s + sum(turn.idle_s for turn in program.turns[:-1])


def make_model(folder: Path, cuda: bool) -> str:
    """Return the directory of the model: the shape of Llama 3.1 8B, or the tiny model on a CPU."""
    from sojourn_server.models.model_cache import resolve_model

    tiny = Path(resolve_model("tiny", progress=False))
    if not cuda:
        return str(tiny)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    for file in tiny.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def server_of(arm: Arm, model: str, setup: Setup, cuda: bool, log: Path) -> EngineServer:
    """Return the server of an arm, not yet started."""
    from sojourn_server.launch.engine_server import EngineServer
    from sojourn_server.launch.serve_command import FORCED_TOKENS

    pool_bytes = setup.pool_tokens * setup.kv_bytes_per_token
    flags = [
        "--max-model-len", str(setup.max_model_len),
        "--max-num-seqs", "64",
        "--num-gpu-blocks-override", str(setup.pool_tokens // setup.block_tokens + 1),
        "--block-size", str(setup.block_tokens),
        "--logits-processors", FORCED_TOKENS,
    ]  # fmt: skip
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if not cuda:
        flags.append("--enforce-eager")
    else:
        flags += [*CUDA_FLAGS, "--kv-cache-memory-bytes", str(pool_bytes + 64 * 2**20)]
        # Forced tokens need model runner V1.
        env = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    flags += ["--kv-host-gib", str(arm.host * pool_bytes / GIB)]
    if arm.host:
        flags += ["--tier-backend", "vllm"] if arm.policy == "stock" else []
    if arm.disk:
        flags += [
            "--kv-disk",
            str(log.with_suffix(".disk")),
            "--kv-disk-gib",
            str(arm.disk * pool_bytes / GIB),
        ]
    return EngineServer(
        model, policy=arm.policy, serve_args=flags, env=env, log_path=log, ready_timeout_s=START_LIMIT_S
    )


@contextmanager
def started(
    arms: Sequence[Arm], model: str, setup: Setup, cuda: bool, logs: Path
) -> Iterator[dict[tuple[str, float, float], EngineServer | Exception | str]]:
    """Start the servers of these arms at the same time. Yield each server, the error of its start, or why it
    was not started."""
    kinds = {arm.server: arm for arm in arms}
    servers: dict[tuple[str, float, float], EngineServer | Exception | str] = {}
    made = []
    for number, (kind, arm) in enumerate(kinds.items()):
        if arm.policy == "stock" and arm.host and not cuda:
            servers[kind] = "vLLM's own connector to host memory needs CUDA"
            continue
        log = logs / f"serve-{arm.group}-{number}-{arm.policy}.log"
        made.append((kind, server_of(arm, model, setup, cuda, log)))
    # Twice as many threads: SIGTERM stops servers whose starts are still running.
    with ThreadPoolExecutor(2 * len(made) + 1) as pool:
        try:
            starting = {kind: pool.submit(server.start) for kind, server in made}
            for kind, server in made:
                error = starting[kind].exception()
                servers[kind] = error if isinstance(error, Exception) else server
            yield servers
        finally:
            for _, server in made:
                pool.submit(server.stop)


async def warm_up(url: str, setup: Setup) -> AloneSpeed:
    """Send requests that share nothing with the agents. Kernels are compiled on first use. Return the speed
    of single requests after that."""
    draw = random.Random(1)
    short, long = setup.max_model_len // 64, setup.max_model_len // 2
    output = min(32, setup.max_output_tokens)

    async with CompletionsClient(url) as client:
        served = await client.discover(None)

        async def one(tokens: int) -> tuple[float, float]:
            prompt = [draw.randrange(100, VOCABULARY) for _ in range(tokens)]
            answer = await client.complete(served.name, prompt, output)
            return answer.ttft_s, answer.tpot_s or 0.0

        await asyncio.gather(*(one(tokens) for tokens in (64, short, long, long // 2, short, short)))
        await one(long)
        shorts, longs = [await one(short) for _ in range(3)], [await one(long) for _ in range(3)]
    short_s, long_s = min(ttft for ttft, _ in shorts), min(ttft for ttft, _ in longs)
    slope_s = max(0.0, (long_s - short_s) / (long - short))
    return AloneSpeed(
        request_s=max(0.0, short_s - short * slope_s),
        prompt_token_s=slope_s,
        output_token_s=min(tpot for _, tpot in longs),
    )


def replay_options(programs: Sequence[TraceProgram], load: Load, setup: Setup) -> ReplayOptions:
    return ReplayOptions(
        concurrency=len(programs),
        stagger_s=setup.stagger_s,
        force_tokens=load.forced,
        block_size=setup.block_tokens,
    )


def run_agents(
    server: EngineServer,
    arm: Arm,
    load: Load,
    programs: Sequence[TraceProgram],
    speed: AloneSpeed,
    setup: Setup,
) -> dict[str, Any]:
    """Let the agents of a load run on an arm. Return the figures; ``failed`` if requests failed."""
    before = _counters(server)
    options = replay_options(programs, load, setup)
    tally = asyncio.run(replay(server.url, programs, options, setup.limit_s))
    after = _counters(server)
    for _ in range(3):  # sojourn publishes its counters at intervals
        earlier, after = after, _counters(server, wait_s=1.0)
        if earlier == after:
            break
    moved = Counter({key: after[key] - before.get(key, 0.0) for key in after})
    alone_s = {program.program_id: speed.completion_s(program) for program in programs}
    document = tally.document()
    ended = {p.program_id: p.completion_s for p in tally.finished if p.completion_s is not None}
    document |= {
        "programs": len(programs),
        "slowdown": summarise(s / alone_s[name] for name, s in ended.items()),
        "completions_s": {name: [round(s, 3), round(alone_s[name], 3)] for name, s in ended.items()},
        "tokens_by_source": {
            key.split('"')[1]: round(value)
            for key, value in moved.items()
            if key.startswith(CACHED) and value
        },
        "computed_by_engine": round(moved[f'{COMPUTED}"local_compute"']),
        "preemptions": round(moved[PREEMPTIONS]),
        "disk_blocks": round(sum(value for key, value in moved.items() if FROM_DISK in key)),
        "sojourn_metrics": {
            key: value for key, value in moved.items() if key.startswith("sojourn_") and value
        },
    }
    if document["errors"] or not document["turns"]:
        document["failed"] = f"{document['first_error'] or 'no turn ended'}"[:300]
    return document


def _counters(server: EngineServer, wait_s: float = 0.0) -> Counter[str]:
    """Return the server's counters after ``wait_s``. Those of vLLM by source have names like
    ``NAME"host"``."""
    import httpx

    time.sleep(wait_s)
    page = httpx.get(f"{server.url}/metrics", timeout=20).text
    found: Counter[str] = Counter()
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare in (CACHED, COMPUTED):
            source = re.search(r'source="[^"]*"', name)
            found[bare + (source.group().removeprefix("source=") if source else "")] += float(value)
        elif bare == PREEMPTIONS:
            found[bare] += float(value)
        elif bare.startswith("sojourn_") and bare.endswith("_total"):
            found[re.sub(r'(,?)model_name="[^"]*"', "", name)] += float(value)
    return found


def simulate_agents(
    arm: Arm, load: Load, programs: Sequence[TraceProgram], profile: str, setup: Setup, seed: int
) -> dict[str, Any]:
    """Run the agents in virtual time. Return figures like those of ``run_agents``."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from sojourn_server.simulator.simulation_run import RunSpec

    spec = RunSpec(
        policy=str(arm.simulated),
        workload=load.name,
        hardware=profile,
        model=SHAPE,
        async_scheduling=True,
        cpu_ratio=arm.host,
        disk_ratio=arm.disk,
        pool_tokens=setup.pool_tokens,
        max_model_len=setup.max_model_len,
        programs=len(programs),
        until_s=None,
        seed=seed,
    )
    log, tally = simulate(spec, programs, replay_options(programs, load, setup))
    figures = ("programs_finished", "turns", "completion_s", "ttft_s", "tpot_s", "prompt_tokens")
    told = tally.document()
    turns = [turn for program in log.programs if program.finished_s is not None for turn in program.turns]
    return {
        "programs": len(programs),
        **{name: told[name] for name in figures},
        "tokens_by_source": {
            "device": sum(turn.device_tokens for turn in turns),
            "host": sum(turn.host_tokens for turn in turns),
        },
    }
