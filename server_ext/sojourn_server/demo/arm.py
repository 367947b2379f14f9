"""One arm of the demo: all programs at once against one server, and what that cost.

Nothing differs between arms but the server's policy and whether the SDK is attached: same tasks, same
arrival times, same flags, a fresh server and one uncounted request to warm it up.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from ..launch.command import FORCED_TOKENS
from .agent import ProgramRecord, connection, run_program
from .exposition import EngineCounts, read_counts
from .script import Tokenizer
from .tasks import Task

ARRIVAL_WINDOW_S = 2.0
MAX_SEQS = 8
BATCHED_TOKENS = 512
BLOCK_TOKENS = 32
KV_BYTES = 1 << 30
"""More than the pool takes; the number of blocks is what limits it."""
STOCK = "stock"
"""The arm that is plain vLLM; the other's name is ``sojourn``."""

Watch = Callable[[int, str, int, str], None]
"""The program's index, then as for ``agent.Watch``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """Everything measured in one arm."""

    name: str
    programs: tuple[ProgramRecord, ...]
    engine: EngineCounts
    """What the engine counted during the arm alone."""
    wall_s: float
    """Seconds from the first arrival to the last agent's end."""
    decisions: Mapping[str, int]
    """How often each decision was taken for each reason, e.g. ``keep: cold_start``; empty for stock."""
    tiers: Mapping[str, Any] = field(default_factory=dict)
    """What the server says of the tiers below the device; empty where it has none."""


def serve_args(blocks: int, max_model_len: int, max_seqs: int = MAX_SEQS) -> tuple[str, ...]:
    """The engine's flags, the same in every arm."""
    return (
        "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(blocks),
        # Without it the CPU engine insists on most of the machine's memory, whatever the line above says.
        "--kv-cache-memory-bytes", str(KV_BYTES),
        "--max-model-len", str(max_model_len),
        "--max-num-seqs", str(max_seqs),
        "--max-num-batched-tokens", str(BATCHED_TOKENS),
        "--logits-processors", FORCED_TOKENS,
    )  # fmt: skip


def arrivals(count: int, seed: int) -> list[float]:
    """When each program starts, in seconds, ascending within ``ARRIVAL_WINDOW_S``; a function of the seed."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0.0, ARRIVAL_WINDOW_S) for _ in range(count))


def run_arm(
    name: str,
    tasks: Sequence[Task],
    url: str,
    model: str,
    tokenizer: Tokenizer,
    *,
    seed: int,
    directory: Path,
    headers: dict[str, str] | None = None,
    watch: Watch,
) -> ArmRecord:
    """Run all ``tasks`` against the server at ``url``; repositories are made below ``directory``.

    The SDK is attached unless the arm is ``stock``. Raises ``RuntimeError`` for a repository that is not
    broken to begin with, ``httpx.HTTPError`` for a server that does not answer the first request; failures
    of single programs are in their records.
    """
    places = [Path(tempfile.mkdtemp(prefix="p", dir=directory)) for _ in tasks]
    repositories = [task.copy_to(place) for task, place in zip(tasks, places, strict=True)]
    if any(_judge(tasks, repositories)):
        raise RuntimeError("the tests of a repository pass before any agent has worked on it")
    warm_up(url, model, headers)
    before = read_counts(url, headers)
    records: list[ProgramRecord | None] = [None] * len(tasks)
    with _sdk(name, url) as prepare:
        origin_s = time.monotonic()

        def one(index: int, task: Task, arrival_s: float) -> None:
            time.sleep(max(0.0, origin_s + arrival_s - time.monotonic()))
            records[index] = run_program(
                task,
                repositories[index],
                f"{url}/v1",
                model,
                tokenizer,
                origin_s=origin_s,
                prepare=prepare,
                watch=lambda state, turn, text: watch(index, state, turn, text),
            )

        # Daemons: after Ctrl-C nobody waits for a request that its server will not answer any more.
        threads = [
            threading.Thread(target=one, args=(index, task, arrival_s), name=task.name, daemon=True)
            for index, (task, arrival_s) in enumerate(zip(tasks, arrivals(len(tasks), seed), strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = read_counts(url, headers).since(before)
    ended = [record for record in records if record is not None]
    if len(ended) < len(tasks):
        raise RuntimeError(f"{len(tasks) - len(ended)} programs broke off without a record")
    fixed = _judge(tasks, repositories)
    return ArmRecord(
        name=name,
        programs=tuple(replace(record, fixed=good) for record, good in zip(ended, fixed, strict=True)),
        engine=counts,
        wall_s=max(record.ended_s for record in ended) - min(record.arrived_s for record in ended),
        decisions={} if name == STOCK else _decisions(url, headers),
        tiers={} if name == STOCK else _asked(url, "stats", headers).get("tiers", {}),
    )


def warm_up(url: str, model: str, headers: dict[str, str] | None = None) -> None:
    """One short request by the agents' own way, so that no arm pays for first uses, the client's included.

    It shares no prefix with the programs. Raises ``httpx.HTTPError`` where nobody answers.
    """
    httpx.get(f"{url}/health", headers=headers, timeout=30.0, trust_env=False).raise_for_status()
    from minisweagent.models.litellm_model import LitellmModel

    settings = {**connection(f"{url}/v1"), "max_tokens": 8}
    # The model says what it likes here, which is no call of the tool; only the request is of interest.
    LitellmModel(model_name=f"openai/{model}", model_kwargs=settings)._query(
        [{"role": "user", "content": "0 1 2 3 4 5 6 7 8 9 " * 8}]
    )


def _decisions(url: str, headers: dict[str, str] | None) -> dict[str, int]:
    taken = _asked(url, "decisions", headers, limit=5000)["decisions"]
    counts = Counter(f"{decision['kind']}: {decision['reason']}" for decision in taken)
    return dict(sorted(counts.items()))


def _asked(url: str, what: str, headers: dict[str, str] | None, **params: int) -> dict[str, Any]:
    answer = httpx.get(
        f"{url}/sojourn/v1/{what}", params=params, headers=headers, timeout=30.0, trust_env=False
    )
    document: dict[str, Any] = answer.raise_for_status().json()
    return document


def _judge(tasks: Sequence[Task], repositories: Sequence[Path]) -> list[bool]:
    """Whether each repository's tests pass. They mostly wait, so they are run side by side."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda pair: pair[0].is_fixed(pair[1]), zip(tasks, repositories, strict=True)))


@contextmanager
def _sdk(name: str, url: str) -> Iterator[Callable[[Any], Any]]:
    """What is done to each agent before it runs: nothing in the stock arm."""
    if name == STOCK:
        yield lambda agent: agent
        return
    import sojourn
    from sojourn_integrations import mini_swe_agent

    # Without what other runs have taught: no arm may know more than the others.
    sojourn.init(url, api_key=os.environ.get("VLLM_API_KEY"), probe_timeout_s=10.0, history=False)
    try:
        if sojourn.stats().dialect != "sojourn":
            raise RuntimeError(
                f"the server at {url} does not run the sojourn plugin; this arm would measure nothing"
            )
        yield mini_swe_agent.attach
        sojourn.flush(2.0)
    finally:
        sojourn.shutdown()
