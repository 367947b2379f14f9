"""Twenty programs on two real engines on Ray. One engine is killed; no program fails.

Every run tests the parts: kills on Ray with fake engines in ``tests/gateway/ray``, of a real engine in
``test_engine_gateway.py``, and the command of an engine in ``test_gateway_ray_config.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from engine_tools import ON_RAY
from gateway_programs import (
    PROGRAMS,
    TURNS,
    Run,
    answered,
    play,
    share_that_found,
    share_that_stayed,
    streams_from,
)
from ray_gateway import RayGateway, started
from waiting import wait_until

pytestmark = [
    pytest.mark.nightly, pytest.mark.engine, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900),
]  # fmt: skip

ENGINE_AFTER = 40
"""Answers after which an engine is killed."""
START_S = 400.0
"""What engines may take to be there, on a machine that has much else to do; else a minute or less."""
ENGINES: dict[str, Any] = {
    "min": 2,
    "num_cpus": 0.1,
    "drain_s": 5,
    "args": [
        "--max-model-len", 2048, "--max-num-seqs", 16, "--num-gpu-blocks-override", 1024,
        "--enable-prompt-tokens-details",
    ],
    "environment": ON_RAY,
}  # fmt: skip


@pytest.fixture(scope="module")
def gateway() -> Iterator[RayGateway]:
    pytest.importorskip("vllm")
    pytest.importorskip("ray.serve")
    with started(lambda home: RayGateway(home, ENGINES, start_s=START_S)) as made:
        yield made


def alive(gateway: RayGateway) -> dict[str, str]:
    """Instances of engines that are up, by replica."""
    try:
        answer = httpx.get(
            f"{gateway.url}/sojourn/v1/replicas",
            headers={"Authorization": "Bearer root"}, timeout=30, trust_env=False,
        )  # fmt: skip
        states = answer.json()["replicas"]
    except httpx.HTTPError:
        states = []
    return {state["replica"]: state["instance"] for state in states if state["health"] == "up"}


def when(gateway: RayGateway, holds: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Looks until it holds."""
    return wait_until(
        lambda: now if holds(now := alive(gateway)) else None,
        lambda: gateway.log.read_text()[-3000:],
        START_S,
    )


def test_a_killed_engine_fails_nobody(gateway: RayGateway) -> None:
    run = Run(prefix=f"{time.monotonic_ns()}-")  # tried again, these are programs without a home
    before = when(gateway, lambda now: len(now) == 2)
    dead, other = sorted(before)
    group = os.getpgid(gateway.listens_at(int(dead.rpartition(":")[2])))
    assert group != os.getpgid(0)

    async def harm() -> None:
        await answered(run, ENGINE_AFTER)
        await streams_from(run, dead)
        os.killpg(group, signal.SIGKILL)

    asyncio.run(play(gateway.url, run, harm))
    log = gateway.log.read_text()[-3000:]
    assert run.failed == [], log
    assert run.silent == []
    assert run.finished == PROGRAMS, log
    assert set(run.broken.values()) == {dead}, "only its streams ended early, with an error inside them"
    at_first = run.at_home()
    assert min(at_first[dead], at_first[other]) >= PROGRAMS // 4, "both had programs"
    assert share_that_stayed(run, other) >= 0.95
    assert share_that_found(run, other) >= 0.9, "their KV was there"

    # A new engine takes the place of the dead one. Who stayed has no reason to go there.
    after = when(gateway, lambda now: len(now) == 2)
    assert before.items() - after.items(), "the engine has started anew"
    assert run.broken, "streams were on their way"
    assert after[other] == before[other]
    run.finished = 0
    asyncio.run(play(gateway.url, run, turns=range(TURNS, TURNS + 1)))
    assert run.failed == run.silent == []
    assert run.over
    assert set(run.broken.values()) == {dead}
    assert share_that_stayed(run, other) >= 0.95
