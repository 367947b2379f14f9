"""What the paths connector can be told, and what it refuses."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_group_specs import attention_spec, chunk_spec, state_spec, window_spec
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend
from sojourn_server.kv_offload.kv_pages import device_layout
from sojourn_server.kv_offload.shared_store import IncompatibleStore, SharedStore
from sojourn_server.simulator.simulated_engine import SimulatedEngineOptions, _engine_vllm_config
from sojourn_server.vllm.kv_connector_settings import KVOffloadSettings, KVTransferSettings
from sojourn_server.vllm.kv_offload_connector import SojournConnector
from sojourn_server.vllm.plugin_settings import SettingsError
from turns import paths_settings
from vllm.config import KVTransferConfig
from vllm.config.lora import LoRAConfig
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

FULL_BYTES = 4 * 16 * 2 * 8 * 128 * 2
"""Four engine blocks of 16 tokens, one layer, in bfloat16."""


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def good(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    return paths_settings(tmp_path, **{"buffer_bytes": 10 * FULL_BYTES + 1, **changed})


def read(
    extra: dict[str, Any],
    *,
    block_size: int = 16,
    groups: int = 1,
    other_groups: tuple[Any, ...] = (),
    tensors: tuple[Any, ...] = (),
    spec: Any = None,
    max_model_len: int | None = None,
    lora: bool = False,
    model: str | None = None,
    parallel: dict[str, int] | None = None,
    prefix_caching: bool = True,
    settings: Any = KVTransferSettings,
    **transfer: Any,
) -> Any:
    """As vLLM's scheduler makes the connector's settings; without a model there are no tensors."""
    if spec is not None:
        block_size = spec.block_size
    spec = spec or attention_spec("FullAttentionSpec", block_size)
    config = _engine_vllm_config(SimulatedEngineOptions(block_size=block_size), spec.page_size_bytes)
    if max_model_len is not None:
        config.model_config.max_model_len = max_model_len
    if model is not None:
        config.model_config.model = model
    for name, value in (parallel or {}).items():
        setattr(config.parallel_config, name, value)
    if lora:
        config.lora_config = LoRAConfig(max_lora_rank=8)
    said = {"kv_connector": "PathsConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    config.kv_transfer_config = KVTransferConfig(kv_connector_extra_config=extra, **{**said, **transfer})
    kv = KVCacheConfig(
        num_blocks=64,
        kv_cache_tensors=list(tensors),
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{at}"], each)
            for at, each in enumerate((*[spec] * groups, *other_groups))
        ],
    )
    config.cache_config.enable_prefix_caching = prefix_caching
    return settings.read(config, kv)


def test_what_is_said_is_worked_out(tmp_path: Path) -> None:
    settings = read(good(tmp_path, patience_s=2, lease_s=9), max_model_len=10 * 64 + 1)
    assert (settings.block_tokens, settings.per_full, settings.blocks) == (16, 4, 64)
    assert (settings.identity.block_tokens, settings.identity.block_bytes) == (64, FULL_BYTES)
    assert settings.limits.slots == 10
    assert (settings.limits.patience_s, settings.limits.lease_s) == (2, 9)
    assert isinstance(settings.open_store(), SharedStore)
    assert (settings.options.role, settings.options.node) == (None, socket.gethostname())
    assert (settings.longest_blocks, settings.needed_buffer_bytes) == (11, 11 * FULL_BYTES)
    assert read(good(tmp_path), max_model_len=10 * 64).needed_buffer_bytes == 0
    latent = attention_spec("MLAAttentionSpec", num_kv_heads=1)
    settings = read(good(tmp_path, role="decode", node="n7"), spec=latent)
    assert (settings.options.role, settings.options.node, settings.per_full) == ("decode", "n7", 4)


TWO = {"tensor_parallel_size": 2, "world_size": 2}


def test_each_of_several_workers_has_its_part(tmp_path: Path) -> None:
    told = {"listen": "tcp:127.0.0.1:8500", "buffer_bytes": 20 * FULL_BYTES}
    first, second = (read(good(tmp_path, **told), parallel={**TWO, "rank": rank}) for rank in (0, 1))
    assert (first.ranks, first.shape) == (2, "tensor parallel 2, pipeline parallel 1")
    assert first.shape == second.shape
    assert (first.identity.block_bytes, first.block_bytes) == (FULL_BYTES, 2 * FULL_BYTES)
    assert first.limits.slots == 10
    assert (first.identity.tp_rank, second.identity.tp_rank, second.identity.tp_size) == (0, 1, 2)
    assert (first.listen, second.listen) == ("tcp:127.0.0.1:8500", "tcp:127.0.0.1:8501")
    for settings in (first, second):
        settings.open_store()
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"rank0of2", "rank1of2"}


def test_nodes_with_other_weights_have_kv_of_another_kind(tmp_path: Path) -> None:
    found = set()
    for weights in (b"weights", b"others"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        found.add(read(good(tmp_path), model=str(tmp_path)).identity.model)
    assert len(found) == 2


def test_groups_share_the_bytes_of_a_block() -> None:
    """vLLM gives each group an entry with the size of the one allocation in which all groups lie."""
    block_bytes = 3 * 65_536
    tensors = tuple(
        KVCacheTensor(size=64 * block_bytes, layers=[f"layer{at}"], layer_stride=0, block_stride=0)
        for at in range(3)
    )
    settings = read(
        {"host_bytes": 10 * block_bytes},
        other_groups=(window_spec(), window_spec()),
        tensors=tensors,
        settings=KVOffloadSettings,
        kv_connector="SojournConnector",
    )
    assert (settings.block_bytes, settings.host_slots) == (block_bytes, 10)


HOST = {"settings": KVOffloadSettings, "kv_connector": "SojournConnector"}
HOST_BYTES = {"host_bytes": 1 << 24}
DISK = {**HOST_BYTES, "disk": "/d", "disk_bytes": 1 << 24}
WINDOWS = {"other_groups": (window_spec(),)}
FAILED_LOADS = r'"kv_load_failure_policy": "recompute".*--kv-transfer-config'
ONE_BLOCK = "at least one block of this model, 262144"


@pytest.mark.parametrize(
    ("extra", "shape", "what"),
    [
        ({"listen": None}, {}, "missing required field `listen`"),
        ({"listen": "p.sock"}, {}, "listen: .*not an address"),
        ({"store": 3}, {}, "store is 3; expected `str`, got `int`"),
        ({"store_layout": "vllm-fs"}, {}, "unknown connector setting 'store_layout'"),
        ({"store_bytes": 100}, {}, ONE_BLOCK),
        ({"buffer_bytes": FULL_BYTES - 1}, {}, rf"\(--kv-buffer-gib\) .* {ONE_BLOCK}"),
        ({"block_tokens": 40}, {}, "not a whole number of engine blocks of 16"),
        ({"patience_s": -1}, {}, "expected 0 < patience_s"),
        ({"lease_s": 1.0}, {}, "expected 0 < patience_s"),
        ({"role": "both"}, {}, "role is 'both'; expected Literal.*prefill"),
        ({"node": ""}, {}, "node is ''; expected `str` of length >= 1"),
        ({}, {"block_size": 128}, "a Full Block of 64 tokens is not a whole number of engine blocks of 128"),
        ({}, {"groups": 2}, "2 groups of KV caches"),
        ({}, {"kv_role": "kv_producer"}, "expected 'kv_both'"),
        ({}, {"spec": window_spec()}, "SlidingWindowSpec do not keep the"),
        ({}, {"spec": chunk_spec()}, "keep the KV of all"),
        (
            {},
            {"spec": attention_spec("FullAttentionSpec", sliding_window=128)},
            "FullAttentionSpec do not keep the KV",
        ),
        ({}, {"parallel": {**TWO, "world_size": 4}}, "context parallel"),
        ({}, {"parallel": {**TWO, "decode_context_parallel_size": 2}}, "context parallel"),
        ({"listen": "tcp:h:65535"}, {"parallel": {**TWO, "rank": 1}}, "at most 65534"),
        ({"buffer_bytes": FULL_BYTES}, {"parallel": TWO}, f"{2 * FULL_BYTES}"),
        # The default of vLLM's --kv-transfer-config is "fail".
        ({}, {"kv_load_failure_policy": "fail"}, FAILED_LOADS),
        (HOST_BYTES, {**HOST, "kv_load_failure_policy": "fail"}, FAILED_LOADS),
        # A block's key has an adapter's name and not its weights: other weights of that name found its KV.
        ({}, {"lora": True}, "--enable-lora"),
        (DISK, {**HOST, "lora": True}, "--enable-lora"),
        ({**HOST_BYTES, "host_byte": 1}, HOST, "unknown connector setting 'host_byte'"),
        ({"host_bytes": "8GB"}, HOST, r"expected AtLeast1 \| Literal"),
        ({"host_bytes": 100}, HOST, "expected at least one block"),
        ({**HOST_BYTES, "max_stage_wait_s": -1}, HOST, "max_stage_wait_s is -1"),
        (
            DISK,
            {**HOST, **WINDOWS},
            r"\(FullAttentionSpec, SlidingWindowSpec\).*a disk, pairs and pipeline parallel support one",
        ),
        (HOST_BYTES, {**HOST, **WINDOWS, "spec": window_spec()}, "full attention beside sliding windows"),
        (
            HOST_BYTES,
            {**HOST, "other_groups": (chunk_spec(),)},
            r"ChunkedLocalAttentionSpec.*--disable-hybrid-kv-cache-manager",
        ),
        (HOST_BYTES, {**HOST, "other_groups": (state_spec(),)}, "clears this model's KV blocks"),
    ],
)
def test_what_cannot_be_served_is_named_with_what_was_expected(
    tmp_path: Path, extra: dict[str, Any], shape: dict[str, Any], what: str
) -> None:
    with pytest.raises(SettingsError, match=what):
        read(extra if "settings" in shape else good(tmp_path, **extra), **shape)


def test_host_memory_without_a_disk_keeps_the_kv_of_adapters() -> None:
    assert read(HOST_BYTES, lora=True, **HOST).options.disk is None


@pytest.mark.parametrize("in_pair", [True, False])
def test_hashes_must_be_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_pair: bool
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(SettingsError, match="PYTHONHASHSEED"):
        read(good(tmp_path)) if in_pair else read(DISK, **HOST)


def on_cuda(cache: Any) -> Any:
    """The same memory, as a tensor that calls its device CUDA."""

    class CudaTensor(torch.Tensor):
        device = property(lambda self: torch.device("cuda"))

    return cache.as_subclass(CudaTensor)


def test_the_order_of_bytes_in_a_block_is_part_of_the_identity_on_a_device() -> None:
    """Attention backends differ in it. How many blocks there are, and where, does not matter."""

    def layout(cache: Any, blocks: int) -> str:
        return device_layout({"l0": on_cuda(cache), "l1": on_cuda(cache)}, blocks)

    by_token = torch.zeros(6, 2, 16, 4, 8)
    by_head = torch.zeros(6, 2, 4, 16, 8).transpose(2, 3)
    assert layout(by_token, 6) != layout(by_head, 6)
    assert layout(by_token, 6) == layout(torch.zeros(9, 2, 16, 4, 8), 9)
    strided = torch.zeros(6, 3, 2, 16, 4, 8)[:, 1]
    assert layout(by_token, 6) == layout(strided, 6)
    assert layout(by_token, 6) != layout(by_token, 3), "two blocks of the kernel in each"


def test_an_engine_with_another_order_of_bytes_in_a_block_does_not_read_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA an engine may be started again with another attention backend."""
    by_token = torch.zeros(64, 2, 16, 8, 128, dtype=torch.bfloat16)
    by_head = torch.zeros(64, 2, 8, 16, 128, dtype=torch.bfloat16).transpose(2, 3)
    block_bytes = by_token[0].nbytes
    monkeypatch.setattr(
        "sojourn_server.vllm.kv_offload_connector.open_device_backend",
        lambda *_: CpuDeviceBackend([torch.zeros(64, block_bytes, dtype=torch.uint8).numpy()], 4),
    )

    def start(cache: Any) -> Any:
        connector = object.__new__(SojournConnector)
        connector.settings = read(
            {"host_bytes": 1 << 24, "disk": str(tmp_path), "disk_bytes": 1 << 24},
            settings=KVOffloadSettings,
            kv_connector="SojournConnector",
        )
        return connector._open_worker({"layer0": cache})

    start(on_cuda(by_token)).close()
    with pytest.raises(IncompatibleStore, match="kv_dtype"):
        start(on_cuda(by_head))
    start(on_cuda(by_token)).close()
