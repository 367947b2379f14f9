"""Reads the surface of a vLLM release: the parts of vLLM that sojourn uses. The source is parsed, not
imported.

``release_surfaces.json`` has the surface of each release that sojourn knows. ``vllm_release.py`` checks a
wheel and adds a release.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from sojourn_server.vllm.compat import UPSTREAM

SURFACES = Path(__file__).with_name("release_surfaces.json")
ReadSource = Callable[[str], str | None]
"""Path of a file relative to the directory that contains ``vllm`` → its source; ``None`` if there is no such
file."""

OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    "Scheduler": (
        "__init__", "add_request", "schedule", "update_from_output", "_free_request", "_preempt_request",
        "reset_prefix_cache", "shutdown",
    ),
    "RequestQueue": (
        "add_request", "peek_request", "pop_request", "prepend_request", "prepend_requests",
        "remove_request", "remove_requests", "__bool__", "__iter__", "__len__",
    ),
    "FreeKVCacheBlockQueue": (
        "__init__", "append", "append_n", "get_all_free_blocks", "iter_blocks_after", "popleft", "popleft_n",
        "remove",
    ),
    "KVConnectorBase_V1": (
        "__init__", "bind_gpu_block_pool", "build_connector_meta", "build_connector_worker_meta",
        "build_kv_connector_stats", "get_block_ids_with_load_errors", "get_finished",
        "get_kv_connector_stats", "get_num_new_matched_tokens", "get_required_kvcache_layout",
        "handle_preemptions", "has_pending_push_work", "on_new_request", "register_kv_caches",
        "request_finished", "requires_piecewise_for_cudagraph", "reset_cache", "save_kv_layer", "shutdown",
        "start_load_kv", "update_connector_output", "update_state_after_alloc", "wait_for_layer_load",
        "wait_for_save",
    ),
    "KVConnectorWorkerMetadata": ("aggregate",),
    "SupportsHMA": ("request_finished_all_groups",),
    "OffloadingConnector": ("__init__", "get_finished", "update_connector_output"),
    "CPUOffloadingManager": (
        "__init__", "complete_load", "complete_store", "lookup", "on_request_finished", "prepare_store",
        "_free_chunk", "_get_load_store_spec",
    ),
    "CPUOffloadingSpec": ("__init__", "get_manager", "get_worker"),
    "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
    "AsyncModelRunnerOutput": ("get_output",),
    "LRUCachePolicy": (
        "__init__", "clear", "evict", "mark_evictable", "mark_non_evictable", "on_request_finished", "remove",
    ),
    "KVCacheManager": ("allocate_slots", "get_num_common_prefix_blocks"),
    "SingleTypeKVCacheManager": (
        "allocate_new_blocks", "cache_blocks", "get_num_blocks_to_allocate", "get_num_skipped_tokens",
        "remove_skipped_blocks",
    ),
    "FullAttentionManager": ("cache_blocks",),
    "KVCacheCoordinator": ("cache_blocks", "remove_skipped_blocks"),
}  # fmt: skip
"""Class, by its name in ``compat`` → methods that sojourn overrides or whose behaviour it relies on. Changes
of their bodies matter."""

CALLED: Mapping[str, tuple[str, ...]] = {
    "Scheduler": (
        "finish_requests", "_handle_invalid_blocks", "_reserve_prefill_lookahead",
        "_update_request_with_output", "_get_local_prefix_cache_hit", "_free_blocks", "_free_request_blocks",
        "_set_kv_fetch_stage",
    ),
    "KVCacheManager": ("get_block_ids", "get_blocks", "get_computed_blocks"),
    "BlockPool": (
        "__init__", "cache_full_blocks", "evict_blocks", "free_blocks", "get_cached_block",
        "get_new_blocks", "get_num_free_blocks", "touch",
    ),
    "KVCacheCoordinator": ("find_longest_cache_hit",),
    "KVCacheSpec": ("max_memory_usage_bytes",),
    "AsyncModelRunnerOutput": ("get_kv_connector_output",),
    "LRUCachePolicy": ("get",),
    "EngineCore": ("add_lora", "collective_rpc", "remove_lora"),
    "Request": ("update_block_hashes",),
}  # fmt: skip
"""Class → methods that sojourn calls or wraps. Only changes of their parameters matter."""

READ: Mapping[str, tuple[str, ...]] = {
    "Scheduler": (
        "_inflight_prefills", "block_size", "connector", "deferred_waiting", "failed_recving_kv_req_ids",
        "finished_recving_kv_req_ids", "hash_block_size", "kv_cache_config", "kv_cache_manager",
        "kv_holding_waiting",
        "max_model_len", "max_num_scheduled_tokens", "need_mamba_block_aligned_split", "num_spec_tokens",
        "pause_state", "policy", "requests", "running", "scheduler_config",
        "use_eagle_block_drop", "vllm_config", "waiting",
    ),
    "KVCacheManager": ("block_pool", "coordinator", "empty_kv_cache_blocks", "enable_caching"),
    "KVCacheCoordinator": ("single_type_managers",),
    "FullAttentionManager": (
        "block_pool", "block_size", "kv_cache_spec", "num_cached_block", "req_to_blocks",
    ),
    "MambaManager": ("cached_blocks_this_step",),
    "KVCacheSpec": ("page_size_bytes",),
    "ReqContext": ("req_id",),
    "OffloadingConnector": ("connector_worker", "scheduler"),
    "CPUOffloadingManager": ("_num_evictable_cache_chunks", "_policy"),
    "ChunkStatus": ("ref_cnt",),
    "BlockPool": ("cached_block_hash_to_block", "free_block_queue", "hash_block_size", "num_gpu_blocks"),
    "KVCacheBlock": (
        "block_hash", "block_hash_num_tokens", "block_id", "is_null", "next_free_block", "prev_free_block",
        "ref_cnt",
    ),
    "SchedulerOutput": (
        "finished_req_ids", "kv_connector_metadata", "num_scheduled_tokens", "preempted_req_ids",
        "scheduled_cached_reqs", "scheduled_new_reqs",
    ),
    "KVConnectorOutput": (
        "failed_recving", "finished_recving", "invalid_block_ids", "kv_connector_worker_meta",
    ),
    "Request": (
        "arrival_time", "block_hashes", "cache_salt", "client_index", "kv_transfer_params", "max_tokens",
        "num_computed_tokens", "num_prompt_tokens", "priority", "request_id", "sampling_params",
        "skip_reading_prefix_cache", "spec_token_ids", "status", "num_tokens", "num_output_tokens",
        "output_token_ids", "all_token_ids", "is_finished", "has_encoder_inputs", "is_prefill_chunk",
        "lora_request", "num_preemptions", "prefill_stats", "resumable",
    ),
    "PrefillStats": ("num_external_cached_tokens", "num_local_cached_tokens"),
}  # fmt: skip
"""Class → attributes that sojourn reads."""


def directory_source(site_packages: Path) -> ReadSource:
    """Return a function that reads source files of an installed vLLM. ``site_packages`` contains ``vllm``."""

    def read(path: str) -> str | None:
        try:
            return (site_packages / path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    return read


def wheel_source(wheel: Path) -> ReadSource:
    """Return a function that reads source files in a wheel of vLLM. Raises ``zipfile.BadZipFile``."""
    archive = ZipFile(wheel)
    names = set(archive.namelist())
    return lambda path: archive.read(path).decode("utf-8") if path in names else None


def read_surface(read: ReadSource) -> dict[str, str]:
    """Return a release's surface: full name in vLLM of each part that sojourn uses → its description.

    Parts that the release lacks are left out. A method's description is its parameters and, for methods in
    ``OVERRIDDEN``, a digest of its body. Raises ``SyntaxError`` for a source that this Python cannot parse.
    """
    surface: dict[str, str] = {}
    parse = cache(lambda module: _parse(read, module))
    for module, name in UPSTREAM.values():
        if name in _defined(parse, module) or parse(f"{module}.{name}") is not None:
            function = _function(parse(module), name)
            surface[f"{module}.{name}"] = "defined" if function is None else _describe(function, body=False)
    for table in (OVERRIDDEN, CALLED, READ):
        for class_name, members in table.items():
            module, name = UPSTREAM[class_name]
            found = _members(parse(module), name)
            for member in members:
                defined = found.get(member)
                if defined is not None:
                    surface[f"{module}.{name}.{member}"] = _describe(defined, body=table is OVERRIDDEN)
    return surface


def known_surfaces() -> dict[str, dict[str, str]]:
    """Return version → surface of each known release, oldest first."""
    text = SURFACES.read_text(encoding="utf-8")
    surfaces: dict[str, dict[str, str]] = json.loads(text)
    return surfaces


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return one line for each difference between two surfaces: a name that is missing in ``found``, is new
    in it, or has another description."""
    lines: list[str] = []
    for name in sorted({*found, *expected}):
        now, before = found.get(name), expected.get(name)
        if now == before:
            continue
        if now is None:
            lines.append(f"{name} is gone")
        elif before is None:
            lines.append(f"{name} is new: {_parameters(now)}")
        elif _parameters(now) != _parameters(before):
            lines.append(f"{name} is {_parameters(now)}; expected {_parameters(before)}")
        else:
            lines.append(f"{name} has another body")
    return lines


def _parameters(description: str) -> str:
    return description.partition(" #")[0]


def _parse(read: ReadSource, module: str) -> ast.Module | None:
    path = module.replace(".", "/")
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        source = read(candidate)
        if source is not None:
            return ast.parse(source)
    return None


def _defined(parse: Callable[[str], ast.Module | None], module: str) -> set[str]:
    """Return the names that a module defines or imports. Return also its string constants that are
    identifiers, because its ``__getattr__`` may provide these names."""
    names: set[str] = set()
    tree = parse(module)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names |= _defined(parse, f"{module}.{node.module}" if node.level else str(node.module))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)  # a name that a lazy module resolves, such as ``current_platform``
    return names


def _function(module: ast.Module | None, name: str) -> ast.FunctionDef | None:
    """Return the function ``name`` at the top level of a module, or ``None`` if there is no such function."""
    body = module.body if module is not None else []
    return next((each for each in body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _members(module: ast.Module | None, class_name: str) -> dict[str, ast.AST]:
    """Return name → node of the methods and attributes of a class, and of its bases in the same module."""
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)} if module else {}
    members: dict[str, ast.AST] = {}

    def collect(name: str) -> None:
        node = classes.get(name)
        if node is None:
            return
        for base in node.bases:
            if isinstance(base, ast.Name):
                collect(base.id)
        members.update(_own_members(node))

    collect(class_name)
    return members


def _own_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for each in ast.walk(node):
        if isinstance(each, (ast.Assign, ast.AnnAssign)):
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    if target.value.id == "self":
                        yield target.attr, each
                elif isinstance(target, ast.Name) and each in node.body:
                    yield target.id, each
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield method.name, method


def _describe(node: ast.AST, *, body: bool) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "attribute"
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        return "attribute"
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    described = f"({ast.unparse(arguments.args)})"
    if not body:
        return described
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    code = "\n".join(ast.unparse(statement) for statement in statements)
    return f"{described} #{hashlib.sha256(code.encode()).hexdigest()[:12]}"
