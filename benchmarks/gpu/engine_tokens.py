"""The part ``tokens`` of ``engine.py``: programs whose KV does not fit on the device.

Each arm runs in a process of its own, this script: NUMBER MODEL DISK ANSWER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn_server.launch.kv_options import GIB, KvOffloadOptions, offload_transfer_config

PROGRAMS, TURNS, OUTPUT_TOKENS = 8, 4, 48
"""Size of the part ``tokens``."""
SMALL_BLOCK_TOKENS = 32
DEVICE_BLOCKS = 48
"""Its device memory: room for about three of the eight contexts."""
LOUD_BLOCK_BYTES = SMALL_BLOCK_TOKENS * 2 * 2 * 128 * 4
"""Bytes of a block of its model in float32: keys and values of two layers with one head of 128 numbers."""

BELOW = {"policy": "sojourn", "host_blocks": 1000}
TOKEN_ARMS: tuple[dict[str, Any], ...] = (
    {"arm": "vLLM alone"},
    {"arm": "leases", "policy": "continuum"},
    {"arm": "host memory, layers outermost", "policy": "mori", "host_blocks": 1000, "layers_outermost": True},
    {"arm": "host memory", **BELOW},
    {"arm": "host memory and disk", "policy": "mori", "host_blocks": 40, "disk": True},
    {"arm": "vLLM alone", "dtype": "bfloat16"},
    {"arm": "host memory", "dtype": "bfloat16", **BELOW},
    {"arm": "vLLM alone", "runner": "V1"},
    {"arm": "host memory", "runner": "V1", **BELOW},
    {"arm": "vLLM alone", "model": "windows"},
    {"arm": "host memory", "model": "windows", **BELOW},
)
"""Each has the tokens of the arm "vLLM alone" with the same model, data type and model runner."""
ARM_LIMIT_S = 300.0
AT_ONCE = 4
"""Arms of the part ``tokens`` that run at the same time."""
ROUNDING_SHARE = 1 / 8
"""Share of tokens that may differ in bfloat16, where the other requests of a batch decide how a sum is
rounded. Wrong KV changes nearly all tokens after it."""
USUAL = {"model": "loud", "dtype": "float32", "runner": "V2"}
"""What an arm of the part ``tokens`` has unless it says otherwise."""


def small_models(folder: Path) -> dict[str, str]:
    """Make two small random models whose tokens depend on all earlier ones. Return their directories.

    ``windows`` has a layer with a sliding window beside one with full attention.
    """
    import torch
    import transformers
    from sojourn_server.models.model_cache import resolve_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("tiny", progress=False))
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,  # tied embeddings make it repeat the last token
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    kinds = {
        "loud": (transformers.LlamaConfig(**common), transformers.LlamaForCausalLM),
        "windows": (transformers.Gemma3TextConfig(**common, **windows), transformers.Gemma3ForCausalLM),
    }
    for name, (config, model) in kinds.items():
        torch.manual_seed(1)
        model(config).to(torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in kinds}


def generate_tokens(arm: dict[str, Any], model: str, disk: str) -> dict[str, Any]:
    """Run the programs of the part ``tokens`` in this process. Return the tokens and what was loaded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    dtype = arm.get("dtype", "float32")
    settings: dict[str, Any] = {}
    if torch.cuda.is_available():
        # Several arms run at once, so vLLM cannot measure what is free for itself.
        settings["kv_cache_memory_bytes"] = 2**30
        settings["attention_backend"] = "TRITON_ATTN" if dtype == "float32" else "FLASH_ATTN"
    if "policy" in arm:
        settings["scheduler_cls"] = "sojourn_server.vllm.scheduler.make_scheduler"
        settings["additional_config"] = {"sojourn": {"strict": True, "policy": arm["policy"]}}
    asked = None
    if "host_blocks" in arm:
        options = KvOffloadOptions(host_gib=str(arm["host_blocks"] * LOUD_BLOCK_BYTES / GIB))
        if arm.get("disk"):
            options = replace(options, disk=disk, disk_gib=1.0)
        transfer = offload_transfer_config(options, cpu_build=not torch.cuda.is_available(), stock=False)
        if arm.get("layers_outermost"):
            transfer["kv_connector_extra_config"].pop("kv_layout", None)
        asked = transfer["kv_connector_extra_config"].get("kv_layout")
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    llm = LLM(
        model=model,
        dtype=dtype,
        block_size=SMALL_BLOCK_TOKENS,
        seed=0,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=PROGRAMS,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=DEVICE_BLOCKS * (2 if "windows" in model else 1) + 1,
        gpu_memory_utilization=0.05,
        disable_log_stats=True,
        **settings,
    )
    core = llm.llm_engine.engine_core.engine_core
    contexts = [[1 + (7919 * (n + 1) * (i + 3)) % 8000 for i in range(200)] for n in range(PROGRAMS)]
    produced: list[list[int]] = [[] for _ in range(PROGRAMS)]
    for turn in range(TURNS):
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                extra_args={
                    "agentic_context": json.dumps({"program_id": f"P{n}", "kv_retention_ttl_seconds": 120})
                }
                if "policy" in arm
                else None,
            )
            for n in range(PROGRAMS)
        ]
        prompts: Any = [{"prompt_token_ids": context} for context in contexts]
        for n, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
            tokens = list(output.outputs[0].token_ids)
            produced[n] += tokens
            added = [1 + (104_729 * (n + 2) * (i + 5) * (turn + 1)) % 8000 for i in range(40)]
            contexts[n] = [*contexts[n], *tokens, *added]
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "tokens": produced,
        "async": bool(config.scheduler_config.async_scheduling),
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "layout": config.cache_config.kv_cache_layout,
        "layout asked for": asked,
        "attention": settings.get("attention_backend", "vLLM's choice"),
    }
    if "policy" in arm:
        found["stats"] = json.loads(core.scheduler.sojourn_call("stats", ""))
    llm.llm_engine.engine_core.shutdown()
    return found


def compare_tokens(kept: Path, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Run the arms with these numbers in processes of their own, and return one row for each."""
    models = small_models(kept)
    rows: list[dict[str, Any]] = []
    expected: dict[tuple[str, ...], list[list[int]]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda number: in_a_process(number, models, kept), numbers)
        for arm, found in zip((TOKEN_ARMS[number] for number in numbers), answers, strict=True):
            row = token_row(arm, found, expected)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def token_row(
    arm: dict[str, Any], found: dict[str, Any], expected: dict[tuple[str, ...], list[list[int]]]
) -> dict[str, Any]:
    """Return the row of one arm; ``failed`` says what is wrong with it.

    ``found`` is the result of ``in_a_process``. ``expected`` has the tokens of vLLM alone by model, data type
    and model runner; those of such an arm are added.
    """
    row = {name: arm.get(name, usual) for name, usual in USUAL.items()} | {"arm": arm["arm"]}
    kind = tuple(str(row[name]) for name in USUAL)
    if "tokens" not in found:
        return {**row, "failed": found["failed"]}
    tokens = found["tokens"]
    if "policy" not in arm:
        expected[kind] = tokens
    same = expected.get(kind)
    if same is None:
        return {**row, "failed": "no tokens of vLLM alone to compare with"}
    pairs = [
        pair for mine, theirs in zip(tokens, same, strict=True) for pair in zip(mine, theirs, strict=True)
    ]
    stats = found.get("stats", {})
    moves = (stats.get("tiers") or {}).get("moves") or {}
    differ = sum(one != other for one, other in pairs)
    loaded = stats.get("host_tokens", 0)
    row |= {
        "tokens": len(pairs),
        "differ": differ,
        "scheduled ahead": found["async"],
        "layout": found["layout"],
        "attention": found["attention"],
        "tokens loaded": loaded,
        "blocks saved": moves.get("stored", 0) + moves.get("saved", 0),
        "blocks from disk": moves.get("staged", 0),
        "leases": stats.get("leases", 0),
    }
    if differ > (0 if row["dtype"] == "float32" else len(pairs) * ROUNDING_SHARE):
        row["failed"] = "other tokens"
    elif found["layout asked for"] not in (None, found["layout"]) and row["model"] != "windows":
        row["failed"] = f"vLLM did not take the layout {found['layout asked for']}"
    elif ("V2" if ".gpu.model_runner" in found["runner"] else "V1") != row["runner"]:
        row["failed"] = f"ran on {found['runner']}"
    elif "policy" in arm and "host_blocks" not in arm and not row["leases"]:
        row["failed"] = "no lease was held"
    elif "host_blocks" in arm and not loaded:
        row["failed"] = "nothing was loaded"
    elif arm.get("disk") and not moves.get("staged"):
        row["failed"] = "nothing was read from disk"
    return row


def in_a_process(number: int, models: dict[str, str], kept: Path) -> dict[str, Any]:
    """Run ``generate_tokens`` in a new process; ``{"failed": text}`` if it does not end well."""
    arm = TOKEN_ARMS[number]
    answer, log, disk = (kept / f"tokens-{number}{suffix}" for suffix in (".json", ".log", ".disk"))
    disk.mkdir()
    command = [
        sys.executable, __file__,
        str(number), models[arm.get("model", USUAL["model"])], str(disk), str(answer),
    ]  # fmt: skip
    runner = "1" if arm.get("runner", USUAL["runner"]) == "V2" else "0"
    with log.open("wb") as into, suppress(subprocess.SubprocessError):
        subprocess.run(
            command,
            env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner, "PYTHONHASHSEED": "0"},
            stdout=into,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=ARM_LIMIT_S,
        )
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text())
        return found
    lines = log.read_text(errors="replace").splitlines()
    print(f"{arm} FAILED\n" + "\n".join(lines[-40:]), flush=True)
    return {"failed": " ".join(lines[-2:])[:300]}


if __name__ == "__main__":
    number, model, disk, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(generate_tokens(TOKEN_ARMS[int(number)], model, disk)))
