"""All measurements that the project needs from one GPU, in under ten minutes, without vLLM or a network.

    python benchmarks/gpu/kit.py --out benchmarks/results
    python benchmarks/gpu/kit.py --small --out DIR        # tiny, on the CPU: shows that it runs

Needs torch, numpy and this repository. The parts:

    order       checks all bytes during 100,000 random steps that save, overwrite and load blocks beside long
                kernels, for several layouts; with any wait removed, some bytes must be wrong
    copies      GB/s and host microseconds a call, for 1 to 4,096 blocks, both ways, and both at once
    overlap     how much copies slow down matrix products and reads of KV
    graph       checks saved blocks that a CUDA graph overwrites after ``hold_compute``
    pinning     seconds a GiB of ``cudaHostRegister``
    roofline    an 8B-shaped model (``roofline.py``), as a hardware profile for the simulator

Writes ``gpu_kit_NAME.md``, ``.json`` and ``.toml`` after each part, so an interruption loses no finished
part.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[1] / "server_ext", HERE):
    sys.path.insert(0, str(folder))

import roofline  # noqa: E402
from copy_order import WAITS, Life  # noqa: E402
from driver_copy import driver_batch_copy  # noqa: E402
from kit_page import MAY_BE_UNSEEN, page  # noqa: E402
from sojourn_server.kv_offload.cuda_device_backend import CudaCopy, CudaDeviceBackend, TorchCuda  # noqa: E402
from sojourn_server.kv_offload.kv_pages import KvPages, merge_neighbours, page_views  # noqa: E402
from sojourn_server.kv_offload.offload_jobs import BlockCopy  # noqa: E402

GIB = 2**30
SHORT_SLEEP_CYCLES, LONG_SLEEP_CYCLES = 100_000, 4_000_000
"""Cycles of a sleep kernel after each write of a block, about 50 microseconds and 2 ms. During a long sleep
the host queues several steps, so a wrongly ordered copy starts before the work that it must follow. The host
needs about a millisecond for a step; with short sleeps alone the device would wait for the host, and any
order would look right."""
LONG_SLEEPS = 1 / 6
"""Share of long sleeps. A step writes up to three blocks. With a wait removed, all sleeps are long."""
LAYERS, PAGE_BYTES = 32, 64 * 1024
"""KV of Llama 3.1 8B with bf16: a page has 16 tokens of 8 heads of 128, keys and values."""


class HostCuda:
    """Replacement of the CUDA runtime for a machine without a GPU. Every copy is complete when queued."""

    class Event:
        def record(self, stream: Any) -> None: ...
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...
        def elapsed_time(self, end_event: Any) -> float:
            return 0.0

    class Stream:
        def wait_event(self, event: Any) -> None: ...

    def compute_stream(self) -> HostCuda.Stream:
        return self.Stream()

    def new_stream(self) -> HostCuda.Stream:
        return self.Stream()

    def new_event(self) -> HostCuda.Event:
        return self.Event()

    def pin(self, address: int, size_bytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...

    def copy(self, sources: Any, destinations: Any, sizes: Any, stream: Any, *, stable_sources: bool) -> None:
        for source, destination, size in zip(
            sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(destination, source, size)


class Kit:
    """Runs the parts of the kit. After each part it writes all results so far."""

    def __init__(self, out: Path, small: bool, steps: int, base: str | None) -> None:
        self.cuda = not small
        self.out, self.steps, self.base = out, steps, base
        self.device = torch.device("cuda:0" if self.cuda else "cpu")
        self.runtime: Any = HostCuda()
        copy_call = "memmove"
        title = "CPU: shows that the kit runs, the figures mean nothing"
        if self.cuda:
            self.runtime, copy_call = TorchCuda(self.device, driver_batch_copy()), "cuMemcpyBatchAsync"
            title = torch.cuda.get_device_name(0)
        name = "small" if small else "".join(c if c.isalnum() else "_" for c in title.lower())
        self.name = f"gpu_kit_{name}"
        self.document: dict[str, Any] = {
            "command": "python benchmarks/gpu/kit.py " + " ".join(sys.argv[1:]),
            "device": title,
            "at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "python": platform.python_version(),
            "copy_call": copy_call,
            "seed": 0,
            "seconds": {},
        }

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context manager that times one part, prints it, and writes all results, even if the part fails."""
        print(f"{name} ...", flush=True)
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.document.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
            print(f"{name} FAILED: {error}", flush=True)
        finally:
            self.document["seconds"][name] = round(time.perf_counter() - began, 1)
            print(f"{name}: {json.dumps(self.document.get(name))[:2000]}", flush=True)
            self.write()

    def run(self, limit_s: float) -> int:
        """Run all parts. Returns the exit status: 1 if a byte was wrong or a part failed."""
        with self.part("order"):
            self.document["order"] = self.order(time.monotonic() + 0.45 * limit_s)
        for measure in (self.copies, self.overlap, self.graph, self.pinning, self.roofline):
            with self.part(measure.__name__):
                self.document[measure.__name__] = measure()
        return int(bool(self.document.get("failed")) or not self.verdict())

    def verdict(self) -> bool:
        """Return True if no byte was wrong with all waits, and some bytes were wrong without each wait."""
        order = self.document.get("order", {})
        sound = bool(order) and all(row["wrong"] == 0 for row in order["layouts"])
        if not self.cuda:
            return sound
        graph = self.document.get("graph", {})
        return (
            sound
            and all(found["wrong"] > 0 for wait, found in order["without"].items() if wait != MAY_BE_UNSEEN)
            and graph.get("wrong") == 0
            and graph.get("wrong_without_hold", 0) > 0
        )

    # -- parts

    def order(self, until: float) -> dict[str, Any]:
        """Check the order of copies on several layouts, then with each wait left out. Return the results."""
        rows = []
        layouts = self.layouts()
        for at, (name, caches) in enumerate(layouts.items()):
            steps = self.steps // len(layouts)
            share_s = max(5.0, (until - time.monotonic()) * 0.8 / (len(layouts) - at))
            rows.append({"layout": name, **self.life(caches, steps, time.monotonic() + share_s)})
        without = {}
        caches = next(iter(layouts.values()))
        for missing in WAITS if self.cuda else ():  # copies on the CPU need no waits
            found = self.life(caches, max(50, self.steps // 250), time.monotonic() + 15, missing)
            without[missing] = {"steps": found["steps"], "wrong": found["wrong"]}
        return {"layouts": rows, "without": without}

    def layouts(self) -> dict[str, list[torch.Tensor]]:
        """Return KV caches of four layers for each layout of vLLM. Dimensions: block, head, token,
        channel."""
        layers, blocks, heads, tokens, channels = 4, 48, 2, 16, 32

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int16, device=self.device)

        return {
            "layer by layer": list(zeros(layers, blocks, heads, tokens, channels)),
            "layers within a block": list(zeros(blocks, layers, heads, tokens, channels).transpose(0, 1)),
            "tokens before heads": [
                zeros(blocks, tokens, heads, channels).transpose(1, 2) for _ in range(layers)
            ],
            "kernel blocks of 4 tokens": [zeros(blocks * 4, heads, 4, channels) for _ in range(layers)],
            "heads outside blocks": [
                zeros(heads, blocks, tokens, channels).transpose(0, 1) for _ in range(layers)
            ],
            "MLA": [zeros(blocks, 1, tokens, 576) for _ in range(layers)],
        }

    def life(
        self, caches: list[torch.Tensor], steps: int, until: float, missing: str | None = None
    ) -> dict[str, Any]:
        """Run a ``Life`` for ``steps`` steps, at most until the time ``until``. Returns the numbers of steps
        and of wrong copies."""
        blocks = 48
        views = [view for cache in caches for view in page_views("layer", cache, blocks)]
        backend = CudaDeviceBackend(_pages(views), 24, self.runtime)
        model = TorchModel(views, self.cuda, LONG_SLEEPS if missing is None else 1.0)
        life = Life(
            0, backend, model,
            blocks=blocks, slots=24, passed_event=self.runtime.new_event, missing=missing,
        )  # fmt: skip
        made = 0
        while made < steps and time.monotonic() < until:
            life.step()
            made += 1
        self.sync()
        while life.loading:
            life.look()
        self.sync()
        backend.close()
        return {"steps": made, "pages_a_block": len(_pages(views)), "wrong": life.wrong + model.wrong()}

    def copies(self) -> list[dict[str, Any]]:
        """Return GB/s and host time of copies of 1 to 4,096 scattered blocks, with one page per layer and
        with one page per block."""
        counts = [1, 8, 64, 512, 4096] if self.cuda else [1, 4]
        blocks = counts[-1] + 64
        rows = []
        for name, pages, _keep in self.pools(blocks):
            backend = CudaDeviceBackend(pages, blocks, self.runtime)
            draw = np.random.default_rng(0)
            for count in counts:
                pairs = [
                    BlockCopy(int(block), int(slot))
                    for block, slot in zip(
                        draw.permutation(blocks)[:count], draw.permutation(blocks)[:count], strict=True
                    )
                ]
                row: dict[str, Any] = {"layout": name, "blocks": count}
                size = count * backend.block_bytes
                for way, copy in (("to_host", backend.to_host), ("to_device", backend.to_device)):
                    took, host = self.time_copy(lambda c=copy, b=backend, p=pairs: c(p, b.fence()))
                    row[f"{way}_gb_s"] = round(size / took / 1e9, 2)
                    row[f"{way}_host_us"] = round(host * 1e6, 1)
                if count > 1:
                    both_s, _ = self.time_copy(lambda b=backend, p=pairs: _both_ways(b, p))
                    row["both_ways_gb_s"] = round(size / both_s / 1e9, 2)
                else:
                    row["both_ways_gb_s"] = "–"
                rows.append(row)
            backend.close()
        return rows

    def pools(self, blocks: int) -> Iterator[tuple[str, list[KvPages], Any]]:
        """Yield device memory for ``blocks`` blocks in two layouts: many small pages per block, and one page
        per block."""
        layers, page = (LAYERS, PAGE_BYTES) if self.cuda else (4, 1024)
        for name, shape in (
            ("layer by layer", (layers, blocks, page)),
            ("layers within a block", (blocks, layers, page)),
        ):
            memory = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            caches = memory if name == "layer by layer" else memory.transpose(0, 1)
            yield name, _pages([page_views("layer", each, blocks)[0] for each in caches]), memory

    def time_copy(self, start: Callable[[], Any], repeats: int = 7) -> tuple[float, float]:
        """Return two medians in seconds: until the copies are done, and until the call ``start`` returns."""
        took, host = [], []
        for _ in range(repeats):
            self.sync()
            began = time.perf_counter()
            copy = start()
            host.append(time.perf_counter() - began)
            copy.wait()
            self.sync()
            took.append(max(time.perf_counter() - began, 1e-9))
        return statistics.median(took), statistics.median(host)

    def overlap(self) -> dict[str, float]:
        """Return the factors by which work takes longer while blocks are copied."""
        blocks = 1024 if self.cuda else 4
        # With one page per block the call that starts the copies is short, so they all run beside the work.
        _, pages, keep = list(self.pools(blocks))[1]
        backend = CudaDeviceBackend(pages, blocks, self.runtime)
        size = 8192 if self.cuda else 64
        matrix = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        memory = torch.empty((GIB if self.cuda else 1 << 16,), dtype=torch.uint8, device=self.device)

        def multiply() -> None:
            for _ in range(20):
                torch.mm(matrix, matrix)

        def read() -> None:
            for _ in range(100):
                memory.view(torch.int64).sum()

        pairs = [BlockCopy(at, at) for at in range(blocks)]
        found: dict[str, float] = {}
        for name, work in (("matrix products", multiply), ("memory reads", read)):
            alone = self.time_work(work)
            for way, copy in (("to host", backend.to_host), ("to device", backend.to_device)):
                beside = self.time_work(work, lambda c=copy: c(pairs, self.runtime.new_event()))
                found[f"{name} beside copies {way}"] = round(beside / alone, 3)
        backend.close()
        del keep
        return found

    def time_work(self, work: Callable[[], None], beside: Callable[[], Any] | None = None) -> float:
        """Return the median seconds of ``work`` on the compute stream, with ``beside`` started at the same
        time."""
        took = []
        for _ in range(6):
            self.sync()
            work()  # an idle device begins at another clock rate
            if self.cuda:
                torch.cuda.current_stream().synchronize()
            copy = beside() if beside is not None else None
            began = time.perf_counter()
            work()
            if self.cuda:
                torch.cuda.current_stream().synchronize()
            took.append(max(time.perf_counter() - began, 1e-9))
            if copy is not None:
                copy.wait()
        return statistics.median(took[1:])

    def graph(self) -> dict[str, Any]:
        """Save blocks, then replay a graph that overwrites them, with and without ``hold_compute``. Return
        the number of replays after which saved bytes were wrong."""
        if not self.cuda:
            return {"skipped": "needs CUDA"}
        blocks = 64
        memory = torch.zeros(4, blocks, 4096, dtype=torch.uint8, device=self.device)
        backend = CudaDeviceBackend(
            _pages([page_views("layer", each, blocks)[0] for each in memory]), blocks, self.runtime
        )
        captured = torch.cuda.CUDAGraph()
        self.sync()
        with torch.cuda.graph(captured):
            memory.add_(1)
        found = {}
        for name, hold in (("wrong", True), ("wrong_without_hold", False)):
            wrong = 0
            for step in range(200):
                content = step % 200
                memory.fill_(content)
                torch.cuda._sleep(LONG_SLEEP_CYCLES)
                copy = backend.to_host([BlockCopy(at, at) for at in range(blocks)], backend.fence())
                if hold:
                    backend.hold_compute(copy)
                for _ in range(3):
                    captured.replay()
                copy.wait()
                wrong += any(set(bytes(backend.slot(at))) != {content} for at in range(0, blocks, 7))
                self.sync()
            found[name] = wrong
        backend.close()
        return found

    def pinning(self) -> dict[str, Any]:
        """Return the seconds per GiB to pin host memory."""
        size = (8 * GIB) if self.cuda else 1 << 20
        began = time.perf_counter()
        backend = CudaDeviceBackend([KvPages(0, 2**20, 2**20)], size // 2**20, self.runtime)
        took = time.perf_counter() - began
        backend.close()
        return {"gib": size / GIB, "seconds_a_gib": round(took * GIB / size, 3)}

    def roofline(self) -> dict[str, Any]:
        """Return the measured constants of a hardware profile, and the shipped ones for comparison."""
        return roofline.measure(self.out / f"{self.name}.toml", self.base, smoke=not self.cuda)

    # -- results

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def write(self) -> None:
        """Write the page and the JSON, each atomically."""
        self.out.mkdir(parents=True, exist_ok=True)
        for suffix, text in (
            (".json", json.dumps(self.document, indent=1) + "\n"),
            (".md", page(self.document)),
        ):
            partial = self.out / f"{self.name}{suffix}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.out / f"{self.name}{suffix}")


class TorchModel:
    """Writes and checks blocks with kernels on the current stream."""

    def __init__(self, views: list[torch.Tensor], cuda: bool, long_sleeps: float) -> None:
        self.views = views
        self.cuda = cuda
        self._long_sleeps = long_sleeps
        self._draw = random.Random(0)
        self._wrong = torch.zeros((), dtype=torch.int64, device=views[0].device)

    def compute(self, block_id: int, content: int) -> None:
        for view in self.views:
            view[block_id].fill_(content)
        if self.cuda:  # after the write: a save that starts now must race with the next write
            is_long = self._draw.random() < self._long_sleeps
            torch.cuda._sleep(LONG_SLEEP_CYCLES if is_long else SHORT_SLEEP_CYCLES)

    def check(self, block_id: int, content: int) -> None:
        for view in self.views:
            self._wrong += (view[block_id] != content).any()

    def idle(self) -> None:
        """Do nothing, because the GPU works by itself."""

    def wrong(self) -> int:
        return int(self._wrong)


def _both_ways(backend: CudaDeviceBackend, pairs: list[BlockCopy]) -> CudaCopy:
    """Begin to copy half of the blocks in each direction. The caller must wait for the device."""
    backend.to_host(pairs[::2], backend.fence())
    return backend.to_device(pairs[1::2], backend.fence())


def _pages(views: list[torch.Tensor]) -> list[KvPages]:
    return merge_neighbours([KvPages(view.data_ptr(), view.stride(0), view.shape[1]) for view in views])


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the order of copies on a GPU and measure it.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the page, JSON and profile")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the order's lives together")
    parser.add_argument(
        "--base", help="whose data sheet the profile has, a name or a file; default: the GPU's"
    )
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all parts, about")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA device; --small tries the kit out on the CPU")
    torch.manual_seed(0)
    kit = Kit(arguments.out, arguments.small, arguments.steps, arguments.base)
    status = kit.run(arguments.limit_s)
    verdict = "no byte is wrong" if not status else "LOOK AT THE PAGE"
    print(f"written to {arguments.out / kit.name}.md; {verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main())
