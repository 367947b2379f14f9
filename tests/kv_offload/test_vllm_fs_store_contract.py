"""Our reading of vLLM's ``fs`` tier against vLLM's own: names, bytes, each reading what the other wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faulty_file_system import identity, key

pytest.importorskip("vllm")

from sojourn_server.kv_offload.block_file import BlockCorrupt, KvIdentity
from sojourn_server.kv_offload.disk_store import PutOutcome
from sojourn_server.kv_offload.vllm_fs_store import PAGE_BYTES, VllmFsLayout, VllmFsStore
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
BLOCK = 3000
"""Bytes of a Full Block: no whole page, so that padding shows."""
CHUNKS = 8
PATIENCE_S = 60.0


def layout(**changed: Any) -> VllmFsLayout:
    fields: dict[str, Any] = {
        "model_name": "org/tiny model",
        "dtype": "torch.float32",
        "engine_block_tokens": 16,
        "blocks_per_file": 4,
        "layer_names": LAYERS,
    }
    return VllmFsLayout(**{**fields, **changed})


def of_two_layers() -> KvIdentity:
    return identity(layers=2, block_bytes=BLOCK)


def mapper(root: Path, found: VllmFsLayout) -> FileMapper:
    return FileMapper(
        root_dir=str(root),
        model_name=found.model_name,
        tokens_per_hash=found.engine_block_tokens,
        blocks_per_file=found.blocks_per_file,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        rank=0,
        dtype=found.dtype,
        kv_cache_groups=[
            {"tokens_per_block": found.engine_block_tokens, "layer_names": list(found.layer_names)}
        ],
        parallel_agnostic=found.parallel_agnostic,
    )


@pytest.mark.parametrize(
    "changed",
    [{}, {"parallel_agnostic": True}, {"dtype": "torch.bfloat16"}],
    ids=str,
)
def test_files_have_the_names_that_vllm_gives_them(tmp_path: Path, changed: dict[str, Any]) -> None:
    ours, theirs = layout(**changed), mapper(tmp_path, layout(**changed))
    assert str(ours.folder(tmp_path)) == theirs.base_path
    assert ours.fields() == theirs.get_run_config()
    for number in range(20):
        name = theirs.get_file_name(make_offload_key(key(number), 0))
        assert str(ours.block_path(tmp_path, key(number))) == name


@dataclass
class Job:
    """What vLLM's manager reads of a job."""

    job_id: int
    keys: Sequence[bytes]
    chunk_ids: Any = field(default_factory=list)


class StockTier:
    """vLLM's own manager of the tier, over host memory of ``CHUNKS`` chunks as its worker lays them out."""

    def __init__(self, root: Path, found: VllmFsLayout) -> None:
        stride = -(-BLOCK // PAGE_BYTES) * PAGE_BYTES
        # O_DIRECT, which vLLM uses where it can, wants memory that begins with a page.
        raw = np.zeros((CHUNKS + 1) * stride, np.int8)
        start = -raw.ctypes.data % PAGE_BYTES
        self.rows = raw[start : start + CHUNKS * stride].reshape(CHUNKS, stride)
        parallel = SimpleNamespace(
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            rank=0,
            is_parallelism_agnostic=found.parallel_agnostic,
        )
        config = SimpleNamespace(
            model=SimpleNamespace(name=found.model_name, dtype=found.dtype),
            cache=SimpleNamespace(tokens_per_hash=found.engine_block_tokens),
            parallel=parallel,
            groups=[
                SimpleNamespace(
                    tokens_per_block=found.engine_block_tokens, layer_names=list(found.layer_names)
                )
            ],
            canonical_layout=False,
            replicated_layout=False,
            kv_cache_layout=None,
        )
        spec: Any = SimpleNamespace(
            config=config, blocks_per_chunk=found.blocks_per_file, replicated_layout=False
        )
        self.manager = FileSystemTierManager(
            spec, self.rows.data, "fs", str(root), n_read_threads=1, n_write_threads=1
        )
        self._job = 0

    def store(self, keys: Sequence[bytes]) -> bool:
        return self._run(self.manager.submit_store, keys)

    def load(self, keys: Sequence[bytes]) -> bool:
        return self._run(self.manager.submit_load, keys)

    def finds(self, key: bytes) -> bool:
        """Its lookups are answered beside the step: ask until one is."""
        context: Any = SimpleNamespace(req_id="r")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            answer = self.manager.lookup(make_offload_key(key, 0), context)
            if answer is not LookupResult.RETRY:
                return bool(answer is LookupResult.HIT)
            self.manager.on_schedule_end(SimpleNamespace())
        raise AssertionError("no answer from vLLM's lookup")

    def _run(self, submit: Any, keys: Sequence[bytes]) -> bool:
        self._job += 1
        chunk_ids = np.arange(len(keys))
        submit(Job(self._job, [make_offload_key(key, 0) for key in keys], chunk_ids))
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for result in self.manager.get_finished_jobs():
                assert result.job_id == self._job
                return bool(result.success)
        raise AssertionError("vLLM's tier did not finish")


@pytest.fixture(params=[False, True], ids=["one-worker", "agnostic"])
def found_layout(request: pytest.FixtureRequest) -> VllmFsLayout:
    return layout(parallel_agnostic=request.param)


@pytest.fixture
def stock(tmp_path: Path, found_layout: VllmFsLayout) -> Iterator[StockTier]:
    tier = StockTier(tmp_path, found_layout)
    yield tier
    tier.manager.shutdown()


def content(number: int) -> bytes:
    return bytes((number * 31 + at) % 251 for at in range(BLOCK))


def test_what_vllm_stored_is_read_here(tmp_path: Path, stock: StockTier, found_layout: VllmFsLayout) -> None:
    for number in range(CHUNKS):
        stock.rows[number, :BLOCK] = np.frombuffer(content(number), np.int8)
    stock.rows[:, BLOCK:] = 77  # what lies in the padding is nobody's business
    assert stock.store([key(number) for number in range(CHUNKS)])
    ours = VllmFsStore(tmp_path, of_two_layers(), found_layout)
    assert ours.leading([key(number) for number in range(CHUNKS + 1)]) == CHUNKS
    for number in range(CHUNKS):
        layers = [bytearray(BLOCK // 2), bytearray(BLOCK // 2)]
        ours.get_into(key(number), layers)
        assert b"".join(layers) == content(number)
    assert ours.put(key(0), [content(0)]) is PutOutcome.ALREADY


def test_what_was_stored_here_vllm_finds_and_loads(
    tmp_path: Path, stock: StockTier, found_layout: VllmFsLayout
) -> None:
    ours = VllmFsStore(tmp_path, of_two_layers(), found_layout)
    keys = [key(number) for number in range(CHUNKS)]
    for number, one in enumerate(keys):
        assert ours.put(one, [content(number)]) is PutOutcome.STORED
    assert all(stock.finds(one) for one in keys)
    assert not stock.finds(key(99))
    assert stock.load(keys)
    for number in range(CHUNKS):
        assert stock.rows[number, :BLOCK].tobytes() == content(number)


def test_a_torn_file_is_refused_by_both_and_neither_stops(
    tmp_path: Path, stock: StockTier, found_layout: VllmFsLayout
) -> None:
    ours = VllmFsStore(tmp_path, of_two_layers(), found_layout)
    ours.put(key(1), [content(1)])
    path = found_layout.block_path(tmp_path, key(1))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BlockCorrupt):
        ours.get_into(key(1), [bytearray(BLOCK)])
    assert not path.exists()
    assert not stock.load([key(1)])
    assert ours.put(key(1), [content(1)]) is PutOutcome.STORED
    assert stock.load([key(1)])


def test_either_may_make_the_folder(tmp_path: Path, found_layout: VllmFsLayout) -> None:
    VllmFsStore(tmp_path, of_two_layers(), found_layout)
    config = found_layout.folder(tmp_path) / "config.json"
    assert json.loads(config.read_text()) == mapper(tmp_path, found_layout).get_run_config()
    tier = StockTier(tmp_path, found_layout)
    tier.manager.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == [found_layout.folder(tmp_path).name]
