"""After an adapter or the model is loaded again, no request finds KV of the old weights."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.vllm.plugin import register
from turns import add_request, last_turn
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

PROMPT_TOKENS = 300
CACHED_TOKENS = 288


@pytest.fixture
def ask(make_engine: Any, tmp_path: Path) -> Any:
    """``ask(lora_request)`` adds a program's next turn. ``ask.cached()`` runs it and returns how many tokens
    of its prompt were cached."""
    init_none_hash(sha256)
    (tmp_path / "adapter.safetensors").write_bytes(b"old")
    engine = make_engine("fixed-ttl", blocks=129)
    hasher = get_request_block_hasher(16, sha256)
    turns = 0

    def add(lora: LoRARequest | None, salt: str | None = None, program: str = "A") -> Request:
        nonlocal turns
        turns += 1
        return add_request(
            engine, f"a{turns}", range(PROMPT_TOKENS), hints={"program_id": program},
            lora_request=lora, block_hasher=hasher, cache_salt=salt,
        )  # fmt: skip

    def cached() -> int:
        engine.run()
        return int(last_turn(engine, "A")["tokens"]["device"])

    add.engine, add.cached, add.folder = engine, cached, tmp_path  # type: ignore[attr-defined]
    return add


def lora(ask: Any, number: int = 1, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("sql", number, str(ask.folder), load_inplace=load_inplace)


def replace_files(ask: Any) -> None:
    """Write other weights of the same size and date."""
    file = ask.folder / "adapter.safetensors"
    before = file.stat()
    file.write_bytes(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def twice(ask: Any, adapter: LoRARequest | None) -> list[int]:
    found = []
    for _ in range(2):
        ask(adapter)
        found.append(ask.cached())
    return found


def test_the_hashes_are_those_of_vllm_until_an_adapter_is_replaced(ask: Any) -> None:
    for adapter in (None, lora(ask)):
        request = ask(adapter, salt="client")
        assert request.block_hashes == get_request_block_hasher(16, sha256)(
            Request(
                "x", list(range(PROMPT_TOKENS)), SamplingParams(max_tokens=1), None,
                lora_request=adapter, cache_salt="client",
            )
        )  # fmt: skip
        assert request.cache_salt == "client"
    assert ask.cached() == 0
    assert twice(ask, lora(ask)) == [0, CACHED_TOKENS]


def test_an_adapter_loaded_in_place_by_requests_is_another_once_its_files_change(ask: Any) -> None:
    assert twice(ask, lora(ask)) == [0, CACHED_TOKENS]
    replace_files(ask)
    assert twice(ask, lora(ask)) == [CACHED_TOKENS, CACHED_TOKENS], "vLLM has not read the files yet"
    assert twice(ask, lora(ask, load_inplace=True)) == [0, CACHED_TOKENS]
    replace_files(ask)
    assert twice(ask, lora(ask, load_inplace=True)) == [0, CACHED_TOKENS]
    other = LoRARequest("hub", 2, "org/hub-adapter", load_inplace=True)
    assert twice(ask, other) == [0, 0], "of a hub's adapter nobody knows whether it changed"


@pytest.mark.parametrize(
    ("method", "what", "number", "is_new"),
    [
        ("add_lora", LoRARequest("sql", 1, "/a", load_inplace=True), 1, True),
        ("remove_lora", 1, 1, True),
        ("remove_lora", 2, 1, False),
        (None, None, 2, True),
        ("collective_rpc", "reload_weights", 1, True),
        ("collective_rpc", "update_weights_from_ipc", 1, True),
        ("collective_rpc", "compute_weight_checksums", 1, False),
    ],
)
def test_no_request_after_a_load_finds_what_others_computed_before_it(
    ask: Any, method: str | None, what: Any, number: int, is_new: bool
) -> None:
    """Neither one that waits at the load, nor blocks that a running request finishes after it."""
    assert twice(ask, lora(ask)) == [0, CACHED_TOKENS]
    ask(lora(ask), program="B").max_tokens = 50
    ask.engine.step()
    ask(lora(ask, number))
    if method is not None:
        ask.engine.scheduler.sojourn_weights_called(method, what)
    assert ask.cached() == (0 if is_new else CACHED_TOKENS)
    assert twice(ask, lora(ask, number)) == [CACHED_TOKENS, CACHED_TOKENS]


def test_a_connector_forgets_the_hashes_of_its_last_look_up(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's offloading connector keeps those of a request that was looked up and still waits."""
    told: list[Request] = []
    waits = ask(lora(ask))
    connector = SimpleNamespace(on_new_request=told.append)
    monkeypatch.setattr(ask.engine.scheduler, "connector", connector)
    ask.engine.scheduler.sojourn_weights_called("remove_lora", 1)
    assert told == [waits]


def test_a_connector_that_copies_is_reset_once_between_two_steps(make_engine: Any) -> None:
    """vLLM's offloading connector refuses a second reset while the first one's copies still go on."""
    engine = make_engine("continuum", blocks=41, host_blocks=60, max_model_len=640)
    engine.add("a1", list(range(64)), max_tokens=9, program_id="A")
    for _ in range(3):
        engine.step()
    for _ in range(2):
        engine.scheduler.sojourn_weights_called("collective_rpc", "update_weights")
    # The running request keeps vLLM from clearing the device.
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()


def test_kv_of_the_model_that_a_pause_keeps_is_found_after_new_weights(ask: Any) -> None:
    """vLLM clears the cache at a pause, unless its caller wants to go on with the old KV. Leases end."""
    assert twice(ask, None) == [0, CACHED_TOKENS]
    scheduler = ask.engine.scheduler
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.sojourn_weights_called("collective_rpc", "update_weights")
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ask.engine.ask("stats")["leases"] == 0
    assert twice(ask, None) == [CACHED_TOKENS, CACHED_TOKENS]


def test_calls_of_the_engine_that_may_change_weights_are_reported() -> None:
    register()
    told: list[tuple[str, Any]] = []
    divide = {"collective_rpc": lambda method, *args: [1 / method]}
    executor = SimpleNamespace(add_lora=bool, remove_lora=bool, **divide)
    scheduler = SimpleNamespace(sojourn_weights_called=lambda *call: told.append(call))
    for each in (scheduler, SimpleNamespace()):  # also vLLM's own scheduler
        core: Any = SimpleNamespace(model_executor=executor, scheduler=each)
        assert EngineCore.add_lora(core, 7)
        assert EngineCore.remove_lora(core, lora_id=7)
        assert EngineCore.collective_rpc(core, 2, args=()) == [0.5]
        with pytest.raises(ZeroDivisionError):
            EngineCore.collective_rpc(core, 0)
    assert told == [("add_lora", 7), ("remove_lora", 7), ("collective_rpc", 2), ("collective_rpc", 0)]
