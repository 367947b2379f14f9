"""One arm of the demo: runs all programs at once against one server and measures them.

Arms differ only in the server's policy and in whether the SDK is attached. Tasks, arrival times and flags are
the same. Each arm has a fresh server, which one unmeasured request warms up.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from ..launch.redaction import without_userinfo
from ..launch.serve_command import FORCED_TOKENS
from .demo_agent import DemoProgramRecord, connection, run_program, silence_litellm
from .demo_tasks import DemoTask
from .scripted_tokens import Tokenizer

ARRIVAL_WINDOW_S = 2.0
BATCHED_TOKENS = 512
BLOCK_TOKENS = 32
KV_BYTES = 1 << 30
"""KV memory of the server in bytes. It is more than the demo's default pool needs, so the number of blocks
alone limits the pool."""
TTFT_SUM, TTFT_COUNT = (f"vllm:time_to_first_token_seconds_{what}" for what in ("sum", "count"))
PREEMPTIONS = "vllm:num_preemptions_total"
STOCK = "stock"
"""Name of the arm with plain vLLM; the other arm is ``sojourn``."""

ProgressCallback = Callable[[int, str, int, str], None]
"""``demo_agent.TurnCallback`` of one program, with the program's index as first argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """All measurements of one arm."""

    name: str
    programs: tuple[DemoProgramRecord, ...]
    """Programs that ended, failed ones included."""
    ttft_mean_s: float | None
    """Mean time to first token, in seconds, as the engine measures it; ``None`` without a request."""
    preemptions: int
    wall_s: float
    """Seconds from the first arrival to the last agent's end."""
    decisions: Mapping[str, int]
    """Number of decisions by kind and reason, e.g. ``keep: cold_start``; empty for stock."""
    tiers: Mapping[str, Any] = field(default_factory=dict)
    """The server's statistics of the tiers below the device; empty without tiers."""


def serve_args(blocks: int, max_model_len: int, max_seqs: int) -> tuple[str, ...]:
    """Return the engine's flags, which are the same in every arm. ``blocks``: size of the KV pool."""
    from ..launch.launch_environment import emulates_bfloat16
    from ..vllm.compat import is_cpu_build

    dtype = ("--dtype", "float32") if is_cpu_build() and emulates_bfloat16() else ()
    return (
        "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(blocks),
        # Without this flag the CPU engine reserves most of the machine's memory.
        "--kv-cache-memory-bytes", str(KV_BYTES),
        "--max-model-len", str(max_model_len),
        "--max-num-seqs", str(max_seqs),
        "--max-num-batched-tokens", str(BATCHED_TOKENS),
        "--logits-processors", FORCED_TOKENS,
        *dtype,
    )  # fmt: skip


def arrivals(count: int, seed: int) -> list[float]:
    """Return the start times of the programs, ascending, in seconds from 0 to ``ARRIVAL_WINDOW_S``. Equal
    seeds give equal times."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0.0, ARRIVAL_WINDOW_S) for _ in range(count))


def run_arm(
    name: str,
    tasks: Sequence[DemoTask],
    url: str,
    model: str,
    tokenizer: Tokenizer,
    *,
    seed: int,
    directory: Path,
    headers: dict[str, str] | None = None,
    watch: ProgressCallback,
    announce: Callable[[str], None] = lambda text: None,
) -> ArmRecord:
    """Run all ``tasks`` against the server at ``url`` and return the arm's record.

    The repositories are copied below ``directory``. ``announce`` gets each phase as it begins. The SDK is
    attached unless the arm is ``stock``.

    If a single program fails, its own record says so. Raises ``RuntimeError`` if a repository's tests pass at
    the start or the agents' client fails. Raises ``httpx.HTTPError`` if the server does not answer.
    """
    places = [Path(tempfile.mkdtemp(prefix="p", dir=directory)) for _ in tasks]
    repositories = [task.copy_to(place) for task, place in zip(tasks, places, strict=True)]
    announce("testing the agents' repositories, which must fail")
    if any(_run_tests(tasks, repositories)):
        raise RuntimeError("the tests of a repository pass before any agent has worked on it")
    announce("sending a first request")
    warm_up(url, model, headers)
    before = read_counts(url, headers)
    records: list[DemoProgramRecord | None] = [None] * len(tasks)
    with _sdk(name, url) as prepare:
        origin_s = time.monotonic()

        def one(index: int, task: DemoTask, arrival_s: float) -> None:
            time.sleep(max(0.0, origin_s + arrival_s - time.monotonic()))
            records[index] = run_program(
                task, repositories[index], f"{url}/v1", model, tokenizer,
                origin_s=origin_s, prepare=prepare, watch=partial(watch, index),
            )  # fmt: skip

        # Daemons: after an interruption the server stops, and their requests get no answer.
        threads = [
            threading.Thread(target=one, args=(index, task, arrival_s), name=task.name, daemon=True)
            for index, (task, arrival_s) in enumerate(zip(tasks, arrivals(len(tasks), seed), strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ended = [record for record in records if record is not None]
    if len(ended) < len(tasks):
        raise RuntimeError(f"{len(tasks) - len(ended)} programs ended without a record")
    after = read_counts(url, headers)
    requests = after[TTFT_COUNT] - before[TTFT_COUNT]
    tiers = _get(f"{url}/sojourn/v1/stats", headers).json().get("tiers", {}) if name != STOCK else {}
    decisions = _decisions(url, headers) if name != STOCK else {}
    announce("testing the agents' work")
    fixed = _run_tests(tasks, repositories)
    return ArmRecord(
        name=name,
        programs=tuple(replace(record, fixed=good) for record, good in zip(ended, fixed, strict=True)),
        ttft_mean_s=(after[TTFT_SUM] - before[TTFT_SUM]) / requests if requests else None,
        preemptions=round(after[PREEMPTIONS] - before[PREEMPTIONS]),
        wall_s=max(record.ended_s for record in ended) - min(record.arrived_s for record in ended),
        decisions=decisions,
        tiers=tiers,
    )


def warm_up(url: str, model: str, headers: dict[str, str] | None = None) -> None:
    """Send one short request with the agents' own client, so that one-time costs stay out of the figures. The
    request shares no prefix with the programs. Raises ``httpx.HTTPError`` if the server does not answer, and
    ``RuntimeError`` if the agents' client fails."""
    _get(f"{url}/health", headers)
    import openai
    from minisweagent.models.litellm_model import LitellmModel

    silence_litellm()
    settings = {**connection(f"{url}/v1"), "max_tokens": 8}
    # The output is neither forced nor a tool call; only the request matters.
    client = LitellmModel(model_name=f"openai/{model}", model_kwargs=settings)
    try:
        client._query([{"role": "user", "content": "0 1 2 3 4 5 6 7 8 9 " * 8}])
    except openai.OpenAIError as error:  # litellm's errors derive from it
        raise RuntimeError(
            f"the agents' first request to {without_userinfo(url)} failed: {type(error).__name__}: {error}"
        ) from error


def _decisions(url: str, headers: dict[str, str] | None) -> dict[str, int]:
    taken = _get(f"{url}/sojourn/v1/decisions", headers, limit=5000).json()["decisions"]
    counts = Counter(f"{decision['kind']}: {decision['reason']}" for decision in taken)
    return dict(sorted(counts.items()))


def _get(url: str, headers: dict[str, str] | None, **params: int) -> httpx.Response:
    answer = httpx.get(url, params=params, headers=headers, timeout=30.0, trust_env=False)
    return answer.raise_for_status()


def _run_tests(tasks: Sequence[DemoTask], repositories: Sequence[Path]) -> list[bool]:
    """Return for each repository whether its tests pass. The tests run in parallel, because they mostly
    sleep."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda pair: pair[0].is_fixed(pair[1]), zip(tasks, repositories, strict=True)))


@contextmanager
def _sdk(name: str, url: str) -> Iterator[Callable[[Any], Any]]:
    """Yield a function that prepares an agent before its run. The function attaches the SDK, or does nothing
    in the stock arm."""
    if name == STOCK:
        yield lambda agent: agent
        return
    import sojourn
    from sojourn_integrations import mini_swe_agent

    # No history of other runs is loaded, because no arm may know more than another.
    sojourn.init(url, api_key=os.environ.get("VLLM_API_KEY"), probe_timeout_s=10.0)
    try:
        if sojourn.stats().dialect != "sojourn":
            raise RuntimeError(
                f"the server at {url} does not run the sojourn plugin, so this arm would measure stock vLLM"
            )
        yield mini_swe_agent.attach
        sojourn.flush(2.0)
    finally:
        sojourn.shutdown()


def read_counts(url: str, headers: dict[str, str] | None = None) -> Mapping[str, float]:
    """Return the values of the metrics of the server at ``url`` by name, summed over labels; 0 for a missing
    one. Raises ``httpx.HTTPError``."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in _get(f"{url}/metrics", headers).text.splitlines():
        if line and not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            sums[name] += float(line.rpartition(" ")[2])
    return sums
