"""``sojourn serve`` with a model split over two workers or two stages: the tokens of stock, from host memory
and disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_tools import LOUD_BLOCK_BYTES, NEEDS_SHARED_MEMORY
from multi_turn_programs import BLOCKS, OUTPUT_TOKENS, TURNS, added_tokens, first_prompt, generate, usual_hint
from sojourn_server.launch.engine_server import EngineServer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500),
    NEEDS_SHARED_MEMORY,
]  # fmt: skip

GIB = 1 << 30
HOST_GIB = 2 * 40 * LOUD_BLOCK_BYTES / GIB
DISK_GIB = 2 * 350 * LOUD_BLOCK_BYTES / GIB
PROGRAMS = 5


def generate_over_http(server: EngineServer) -> list[list[int]]:
    """All tokens of the programs of ``generate``, asked for as an agent does."""
    contexts = [first_prompt(n) for n in range(PROGRAMS)]
    produced: list[list[int]] = [[] for _ in range(PROGRAMS)]

    def take_turn(n: int) -> list[int]:
        body = {
            "model": "loud",
            "prompt": contexts[n],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {"agentic_context": usual_hint(n)},
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(PROGRAMS) as pool:
        for turn in range(TURNS):
            for n, tokens in enumerate(pool.map(take_turn, range(PROGRAMS))):
                produced[n].extend(tokens)
                contexts[n] = [*contexts[n], *tokens, *added_tokens(n, turn)]
    return produced


def serve(model: str, policy: str, *flags: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of programs at a server of two workers, and its statistics."""
    usual = (
        "--served-model-name", "loud", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--num-gpu-blocks-override", str(BLOCKS + 1),
    )  # fmt: skip
    # The cores of each worker are those that ``sojourn serve`` chooses.
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "0"}
    with EngineServer(
        model, policy=policy, serve_args=(*usual, *flags), env=env, ready_timeout_s=900
    ) as server:
        tokens = generate_over_http(server)
        return tokens, httpx.get(f"{server.url}/sojourn/v1/stats", trust_env=False).json()


# The model has two layers and one head: a stage has half of a block's bytes, a tensor-parallel worker all.
@pytest.mark.parametrize(("split", "share"), [("tensor", 1.0), ("pipeline", 0.5)])
def test_two_workers_give_the_tokens_of_stock_from_host_memory_and_disk(
    loud_model: str, tmp_path: Path, split: str, share: float
) -> None:
    disk = ("--kv-disk", str(tmp_path), "--kv-disk-gib", str(share * DISK_GIB))
    workers, host_gib = f"--{split}-parallel-size", str(share * HOST_GIB)
    tokens, stats = serve(loud_model, "mori", workers, "2", "--kv-host-gib", host_gib, *disk)
    # By one worker: what two of them add up in another order changes no token in float32.
    assert tokens == generate(loud_model, None, hints=False, programs=PROGRAMS)[0]
    assert stats["host_tokens"] > 300
    # On a busy machine a block may leave before its copy is made; no other loss is allowed.
    assert stats["lost_tokens"].keys() <= {"evicted"}
    assert stats["tiers"]["moves"]["spilled"] > 0
    assert stats["tiers"]["moves"].get("failed", 0) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rank0of2", "rank1of2"}


def test_two_workers_give_the_tokens_of_stock_from_the_host_memory_of_vllms_connector(
    loud_model: str,
) -> None:
    host = ("--kv-host-gib", str(4 * HOST_GIB), "--tier-backend", "vllm")
    tokens, stats = serve(loud_model, "sojourn", "--tensor-parallel-size", "2", *host)
    assert tokens == generate(loud_model, None, hints=False, programs=PROGRAMS)[0]
    assert stats["host_tokens"] > 300
    assert stats["lost_tokens"] == {}
