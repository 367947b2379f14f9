"""A real prefill and a real decode engine on Ray: what one writes the next reads, also after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from engine_tools import ON_RAY
from ray_gateway import RayGateway, started

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

START_S = 400.0
"""What engines may take to be there, on a machine that has much else to do; else a minute or less."""
PROGRAMS = 6
STORED = 640
"""Tokens of a first prompt: ten Full Blocks."""
ADDED = 40
OUTPUT = 8
FULL_TOKENS = 64
TIMEOUT = aiohttp.ClientTimeout(total=START_S)
MEMBER: dict[str, Any] = {
    "min": 1,
    "num_cpus": 0.1,
    "drain_s": 5,
    "args": [
        "--max-model-len", 2048, "--max-num-seqs", 16, "--num-gpu-blocks-override", 1024,
        "--kv-buffer-gib", 0.1, "--kv-store-gib", 1,
    ],
    "environment": ON_RAY,
}  # fmt: skip


def of_pairs(home: Path) -> RayGateway:
    (home / "store").mkdir()
    made = RayGateway(home, {}, start_s=START_S)
    del made.config["engines"]
    member = {**MEMBER, "log_dir": str(home / "e")}
    made.config |= {"pairs": {"store": str(home / "store")}, "prefill": member, "decode": member}
    return made


@pytest.fixture(scope="module")
def gateway() -> Iterator[RayGateway]:
    pytest.importorskip("vllm")
    pytest.importorskip("ray.serve")
    with started(of_pairs) as made:
        yield made


def told(gateway: RayGateway, what: str) -> Any:
    """What the gateway tells its owner."""
    answer = httpx.get(
        f"{gateway.url}/sojourn/v1/{what}",
        headers={"Authorization": "Bearer root"}, timeout=30, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()


def engines(gateway: RayGateway, but: str | None = None) -> dict[str, str]:
    """Waits until there is one of each role, none of them the instance ``but``; their names."""
    end = time.monotonic() + START_S
    while True:
        up = [one for one in told(gateway, "replicas")["replicas"] if one["health"] == "up"]
        if len({one["role"] for one in up if one["instance"] != but}) == 2 == len(up):
            return {one["role"]: one["replica"] for one in up}
        assert time.monotonic() < end, (up, gateway.log.read_text()[-3000:])
        time.sleep(0.25)


def paths(gateway: RayGateway) -> dict[str, dict[str, Any]]:
    """What each engine tells of its paths, by role."""
    stats = told(gateway, "stats")["engines"]
    return {role: stats[f"http://{name}"]["paths"] for role, name in engines(gateway).items()}


def read_bytes(gateway: RayGateway) -> int:
    """From storage, by the engines that are there now."""
    return sum(one["links"]["storage read"]["moved_bytes"] for one in paths(gateway).values())


def words(seed: int, count: int) -> list[int]:
    """Made up, and spread over the vocabulary."""
    return [10 + (7919 * seed * (at + 3) + 104_729 * at * at) % 4000 for at in range(count)]


async def turn(http: aiohttp.ClientSession, gateway: RayGateway, number: int, prompt: list[int]) -> list[int]:
    """The tokens of an answer."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    headers = {"X-Session-ID": f"p{number}"}
    async with http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as answer:
        document = await answer.json()
        assert answer.status == 200, document
        return list(document["choices"][0]["token_ids"])


async def turns(gateway: RayGateway, prompts: list[list[int]]) -> list[list[int]]:
    """One of each program, all at once; their answers."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        asked = [turn(http, gateway, number, prompt) for number, prompt in enumerate(prompts)]
        return await asyncio.gather(*asked)


def test_a_killed_prefill_engine_fails_nobody_and_the_next_reads_what_was_stored(gateway: RayGateway) -> None:
    known = engines(gateway)
    prompts = [words(number + 1, STORED) for number in range(PROGRAMS)]
    answers = asyncio.run(turns(gateway, prompts))
    full_bytes = told_once = 0
    end = time.monotonic() + START_S
    while told_once < PROGRAMS * STORED // FULL_TOKENS:  # the last may still be written
        decode = paths(gateway)["decode"]
        told_once = decode["counts"].get("write_stored", 0)
        full_bytes = decode["links"]["storage write"]["moved_bytes"] // max(1, told_once)
        assert time.monotonic() < end, decode
    assert decode["requests"]["tokens_taken"] == PROGRAMS * STORED
    ledger: dict[str, Any] = {"turns": 0}
    while ledger["turns"] < PROGRAMS:  # a turn is in it once the engine has closed the request
        ledger = told(gateway, "stats")["engines"][f"http://{known['decode']}"]["ledger"]
        assert time.monotonic() < end, ledger
    assert ledger["new_tokens"] == PROGRAMS, "of each prompt the last token alone, for its logits"
    assert read_bytes(gateway) == 0, "nothing had been stored"

    instance = next(
        one["instance"] for one in told(gateway, "replicas")["replicas"] if one["replica"] == known["prefill"]
    )
    group = os.getpgid(gateway.listens_at(int(known["prefill"].rpartition(":")[2])))
    assert group != os.getpgid(0)
    later = [
        [*prompt, *answer, *words(number + 100, ADDED)]
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    os.killpg(group, signal.SIGKILL)
    asyncio.run(turns(gateway, later))
    after = engines(gateway, but=instance)
    assert after["decode"] == known["decode"], "nobody touched it"
    assert read_bytes(gateway) == told_once * full_bytes, "each Full Block once"
