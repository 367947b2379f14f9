"""Starts, inspects and stops the real engines of the prefill/decode benchmarks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sojourn_server.launch.engine_server import EngineServer, ServerStartError
from sojourn_server.models import resolve_model
from sojourn_server.routing.routing_events import PairRole

HERE = Path(__file__).parent
BLOCK_TOKENS = 32
PATIENCE_S = 300.0
WATCHES = "SOJOURN_PD_WATCH"
"""Environment variable with the folder of the connectors' control sockets."""


TOKEN_BYTES = 512
"""KV bytes per token of the model ``tiny`` in 32-bit floats."""
MEGABYTES_S = 4.0
"""Rate of each engine's storage link."""


class Look(NamedTuple):
    """Statistics of one engine's connector."""

    read_bytes: int
    """Bytes read from storage since the start."""
    is_idle: bool
    block_bytes: int
    counts: dict[str, int]


class Engine:
    """One engine, and its connector's control socket."""

    def __init__(self, name: str, role: PairRole, model: str, pool_tokens: int, folder: Path) -> None:
        self.name = name
        self.role = role
        self.peer = f"unix:{folder / name}.sock"
        """Address at which other engines reach this engine's transfer manager."""
        self._watch = folder / f"{name}.watch"
        self._line: socket.socket | None = None
        self._lock = threading.Lock()
        self.server = EngineServer(
            model,
            policy="stock",
            serve_args=serve_args(name, pool_tokens, folder, self.peer),
            env={
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": str(HERE),
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                # An engine that spins while it waits takes cores from working engines. So the worker has no
                # process of its own, which would spin for a second after each step, and threads sleep.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                WATCHES: str(folder),
            },
            log_path=folder / f"{name}.log",
            ready_timeout_s=600.0,
        )

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> None:
        """Start the engine. Raises ``ServerStartError`` with the relevant part of the log."""
        try:
            self.server.start()
        except ServerStartError as failed:
            why = str(failed).partition("\n")[0]
            raise ServerStartError(f"{self.name}: {why}\n{self.server.log_tail(200)}") from None

    def look(self) -> Look:
        """Return the connector's statistics, from its control socket."""
        with self._lock:
            if self._line is None:
                self._line = socket.socket(socket.AF_UNIX)
                self._line.settimeout(PATIENCE_S)
                self._line.connect(str(self._watch))
                self._lines = self._line.makefile("rw")
            self._lines.write("\n")
            self._lines.flush()
            told = json.loads(self._lines.readline())
        return Look(
            read_bytes=told["read_bytes"],
            is_idle=told["clean"] and not told["open"],
            block_bytes=told["block_bytes"],
            counts=told["counts"],
        )

    def forget(self) -> None:
        """Clear the engine's prefix cache, so that contexts are only in storage."""
        answer = httpx.post(f"{self.url}/reset_prefix_cache", timeout=PATIENCE_S, trust_env=False)
        answer.raise_for_status()

    def stop(self) -> None:
        if self._line is not None:
            self._line.close()
        self.server.stop()


def serve_args(name: str, pool_tokens: int, folder: Path, peer: str) -> tuple[str, ...]:
    """Return vLLM's flags for the engine. Its KV pool is also the longest context, up to 16,384 tokens."""
    extra: dict[str, Any] = {
        "listen": peer,
        "store": str(folder / "store"),
        "store_name": name,
        "store_bytes": 1 << 36,
        "buffer_bytes": 2 * pool_tokens * TOKEN_BYTES,
        "save": True,
        "keep_on_reset": True,  # between two runs, only the KV on the device is cleared
        # On a busy machine threads may be delayed for a while. That must not fail the run.
        "patience_s": 10.0,
    }
    transfer = {
        "kv_connector": "WatchedPaths",
        "kv_connector_module_path": "instrumented_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    blocks = pool_tokens // BLOCK_TOKENS
    return (
        "--kv-transfer-config", json.dumps(transfer),
        "--no-async-scheduling",
        "--dtype", "float32",
        "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(blocks + 1),  # one is vLLM's null block
        # Without this flag the CPU engine reserves most of the machine's memory.
        "--kv-cache-memory-bytes", str(1 << 30),
        "--max-model-len", str(min(blocks * BLOCK_TOKENS, 16_384)),
        "--max-num-seqs", "64",
        "--max-num-batched-tokens", "1024",
    )  # fmt: skip


@contextmanager
def started(pairs: int, model: str, pool_tokens: int, folder: Path) -> Iterator[list[Engine]]:
    """Start ``pairs`` prefill engines and as many decode engines at the same time. Yield them, then stop
    them."""
    engines = [
        Engine(f"{letter}{number}", role, model, pool_tokens, folder)
        for number in range(pairs)
        for letter, role in (("p", PairRole.PREFILL), ("d", PairRole.DECODE))
    ]
    with ExitStack() as stack, ThreadPoolExecutor(len(engines)) as pool:
        for engine in engines:
            stack.callback(engine.stop)
        list(pool.map(Engine.start, engines))
        yield engines


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


def all_idle(engines: Sequence[Engine]) -> bool:
    """Return whether every connector is idle, which means that it has no open operation."""
    return all(engine.look().is_idle for engine in engines)
