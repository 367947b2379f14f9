"""Prefill on one real engine, decode on another: what they say together is what one alone says.

Each has a process for its scheduler and one for its worker. In float32, on a model so *loud* that each next
token hangs on all tokens before it; a test fills blocks with something else, and sees it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import (
    BLOCK_TOKENS,
    FAIL,
    MOST_OFF,
    NEEDS_SHARED_MEMORY,
    SPOIL,
    VOCABULARY,
    float32_engine,
    most_off,
    said,
    save_random_model,
    scheduler_of,
)
from sojourn_server.launch.serve_command import SCHEDULER_CLS
from waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
FULL_TOKENS = 64
OUTPUT_TOKENS = 70
"""More than a Full Block, so that one of output is stored."""
LENGTHS = (33, 64, 200, 700)
PATIENCE_S = 200.0
SHAPE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 129,
}


NUMBERS = itertools.count()
"""Of transfers; a number is used once."""


class Spoken(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    params: dict[str, Any] | None


def words(seed: int, count: int) -> list[int]:
    """Made up, and spread over the vocabulary."""
    return [10 + (7919 * seed * (at + 3) + 104_729 * at * at) % 4000 for at in range(count)]


def sampling(max_tokens: int, params: dict[str, Any] | None, alone: bool = False) -> Any:
    """``alone``: without any KV computed before."""
    from vllm import SamplingParams

    return SamplingParams(
        skip_reading_prefix_cache=alone,
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params is not None else None,
    )


def say(
    llm: Any, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None, alone: bool = False
) -> Spoken:
    asked = sampling(max_tokens, params, alone)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    return Spoken(*said(output.outputs[0]), output.kv_transfer_params)


def turns() -> dict[str, list[int]]:
    """First turns, by name, and a later one that begins with what the longest has stored."""
    return {str(count): words(count, count) for count in LENGTHS}


def later(first: list[int], answer: list[int], seed: int) -> list[int]:
    return [*first, *answer, *words(seed, 50)]


OWN = words(77, 700)


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hashes that are the same in every engine, and a file that spoils blocks."""
    patch = pytest.MonkeyPatch()
    spoil = tmp_path_factory.mktemp("spoil") / "now"
    patch.setenv("PYTHONHASHSEED", "0")
    patch.setenv(SPOIL, str(spoil))
    patch.setenv(FAIL, str(spoil.with_name("fail")))
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    patch.setenv("OMP_NUM_THREADS", "1")
    yield spoil
    patch.undo()


@contextmanager
def spoilt_blocks(file: Path) -> Iterator[None]:
    """Blocks that come from elsewhere are filled with something else meanwhile."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@contextmanager
def failing_fills(settings: Path) -> Iterator[None]:
    """Only half of what comes from elsewhere is filled in meanwhile."""
    with spoilt_blocks(settings.with_name("fail")):
        yield


@pytest.fixture(scope="module")
def alone(loud_model: str) -> dict[str, Spoken]:
    """Outputs of one engine for all prompts, and for ``OWN``, which only one test sends."""
    with float32_engine(loud_model, **SHAPE) as llm:
        spoken = {name: say(llm, prompt, OUTPUT_TOKENS) for name, prompt in turns().items()}
        spoken["own"] = say(llm, OWN, OUTPUT_TOKENS)
        spoken["later own"] = say(llm, later(OWN, spoken["own"].tokens, 1), OUTPUT_TOKENS)
        for seed in (1, 2, 3, 4):
            prompt = later(turns()["700"], spoken["700"].tokens, seed)
            spoken[f"later {seed}"] = say(llm, prompt, OUTPUT_TOKENS)
    return spoken


def look(worker: Any) -> dict[str, Any]:
    """Return the worker's open operations and its counters of transfers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    traffic = connector._traffic
    return {
        "open": connector._worker.open_operations,
        "clean": traffic.is_clean,
        "counts": traffic.stats()["counts"],
        "worker": dict(connector._worker.counts),
        "reading": len(traffic.node.reads),
        "waiting": len(connector._worker._sources),
        "held": traffic.stats()["slots_used"],
    }


def hold_reads(worker: Any) -> None:
    """Make reads from storage wait until ``let_reads_go``, at most a minute."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = get_kv_transfer_group()._traffic.storage._store
    get_into, store.gate = store.get_into, threading.Event()

    def held(*arguments: Any) -> None:
        store.gate.wait(60.0)
        get_into(*arguments)

    store.get_into = held


def let_reads_go(worker: Any) -> None:
    """Let the reads that ``hold_reads`` stopped continue."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = get_kv_transfer_group()._traffic.storage._store
    del store.get_into
    store.gate.set()


class Pair:
    """A prefill engine and a decode engine with one store."""

    def __init__(self, prefill: Any, decode: Any, folder: Path, in_process: bool = False) -> None:
        """``in_process``: engines in this process take no steps by themselves."""
        self._in_process = in_process
        self.prefill = prefill
        self.decode = decode
        self.folder = folder

    def say(self, prompt: list[int], decode_reads: bool = False, peer: str | None = None) -> Spoken:
        return say(self.decode, prompt, OUTPUT_TOKENS, self.prefilled(prompt, decode_reads, peer))

    def prefilled(
        self, prompt: list[int], decode_reads: bool = False, peer: str | None = None
    ) -> dict[str, Any]:
        """What the prefill engine answers, for the decode engine."""
        first = say(self.prefill, prompt, 1, self.to_prefill(decode_reads, peer))
        assert first.params is not None
        assert first.params["do_remote_prefill"]
        return first.params

    def to_prefill(self, decode_reads: bool = False, peer: str | None = None) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "transfer": f"t{next(NUMBERS)}",
            "peer": peer or f"unix:{self.folder / 'd.sock'}",
            "decode_reads": decode_reads,
        }

    @contextmanager
    def leaving(self, llm: Any, prompt: list[int], params: dict[str, Any]) -> Iterator[None]:
        """A client that asks, and leaves at the end of the block."""
        llm.llm_engine.add_request("leaves", {"prompt_token_ids": prompt}, sampling(OUTPUT_TOKENS, params))
        try:
            yield
        finally:
            llm.llm_engine.abort_request(["leaves"])
        assert not llm.llm_engine.has_unfinished_requests()

    def until(self, llm: Any, so: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until an engine looks so."""
        wait_until(lambda: so(llm.collective_rpc(look)[0]), self.looks, PATIENCE_S)

    def forget(self) -> None:
        """Nothing is on the devices any more. Blocks that somebody holds could not be forgotten."""
        for llm in (self.prefill, self.decode):
            assert llm.reset_prefix_cache()

    def looks(self) -> list[dict[str, Any]]:
        return [llm.collective_rpc(look)[0] for llm in (self.prefill, self.decode)]

    def settled(self) -> list[dict[str, Any]]:
        """Once nothing is open on either side, in scheduler, worker and traffic manager."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(
            worker["clean"] and not worker["open"]
            for llm in (self.prefill, self.decode)
            for worker in llm.collective_rpc(look)
        ) or any(self._steps_under_way(llm) for llm in (self.prefill, self.decode)):
            for llm in (self.prefill, self.decode) if self._in_process else ():
                llm.llm_engine.step()
            assert time.monotonic() < deadline, self.looks()
            time.sleep(0.1)
        self.forget()
        return self.looks()

    def _steps_under_way(self, llm: Any) -> bool:
        """Whether an engine in this process has planned steps whose results it does not know."""
        return self._in_process and bool(llm.llm_engine.engine_core.engine_core.batch_queue)

    def computed_by_decode(self) -> float:
        """Prompt tokens that the decode engine computed so far, by vLLM's own count."""
        return sum(
            metric.value
            for metric in self.decode.get_metrics()
            if metric.name == "vllm:prompt_tokens_by_source" and metric.labels["source"] == "local_compute"
        )


def transfers(folder: Path, name: str) -> Any:
    """How an engine takes part in a pair: p or d."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="WatchedPaths",
        kv_connector_module_path="instrumented_kv_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "listen": f"unix:{folder / name}.sock" if name == "d" else "tcp:127.0.0.1:0",
            "role": {"p": "prefill", "d": "decode"}[name],
            "node": "n7",
            "store": str(folder / "store"),
            "store_name": name,
            "store_bytes": 64 * MIB,
            "buffer_bytes": 16 * MIB,
            "patience_s": 4.0,  # one test waits for as long
            "keep_on_reset": True,  # to forget what is on the device
        },
    )


@pytest.fixture(scope="module")
def pair(loud_model: str, alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("p")
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with (
        float32_engine(loud_model, **SHAPE, kv_transfer_config=transfers(folder, "p")) as prefill,
        float32_engine(
            loud_model, **SHAPE, kv_transfer_config=transfers(folder, "d"), disable_log_stats=False
        ) as decode,
    ):
        yield Pair(prefill, decode, folder)
    patch.undo()


def assert_same(here: Spoken, there: Spoken) -> None:
    assert here.tokens == there.tokens
    assert most_off(here.logprobs, there.logprobs) < MOST_OFF


def test_cold_prompts(pair: Pair, alone: dict[str, Spoken]) -> None:
    for name, prompt in turns().items():
        before = pair.computed_by_decode()
        assert_same(pair.say(prompt), alone[name])
        assert pair.computed_by_decode() == before, "the decode engine has computed of the prompt"
    looks = pair.settled()
    assert looks[0]["counts"]["pushes_complete"] == len(LENGTHS)
    assert looks[1]["counts"]["write_stored"] == sum(
        (count + OUTPUT_TOKENS - 1) // FULL_TOKENS for count in LENGTHS
    )


@pytest.mark.parametrize(("decode_reads", "seed"), [(False, 1), (True, 2)])
def test_prompts_that_are_stored(pair: Pair, alone: dict[str, Spoken], decode_reads: bool, seed: int) -> None:
    pair.settled()
    before, computed = pair.looks(), pair.computed_by_decode()
    prompt = later(turns()["700"], alone["700"].tokens, seed)
    assert_same(pair.say(prompt, decode_reads), alone[f"later {seed}"])
    assert pair.computed_by_decode() == computed
    after = pair.settled()
    read = [
        now["counts"].get("blocks_read", 0) - then["counts"].get("blocks_read", 0)
        for now, then in zip(after, before, strict=True)
    ]
    stored = (700 + OUTPUT_TOKENS - 1) // FULL_TOKENS
    assert read == [stored * (not decode_reads), stored * decode_reads]


def test_it_would_show(pair: Pair, alone: dict[str, Spoken], settings: Path) -> None:
    """The negative control: blocks filled with something else give other logprobs, and other tokens."""
    prompt = turns()["700"]
    assert_same(pair.say(prompt), alone["700"])  # so that it is stored before a spoilt block could be
    pair.settled()
    with spoilt_blocks(settings):
        spoken = pair.say(prompt)
    assert spoken.tokens != alone["700"].tokens
    assert most_off(spoken.logprobs, alone["700"].logprobs) > 100 * MOST_OFF
    pair.settled()


@pytest.mark.parametrize(("decode_reads", "seed"), [(False, 1), (True, 2)])
def test_clients_that_leave_while_their_context_is_read(
    pair: Pair, alone: dict[str, Spoken], decode_reads: bool, seed: int
) -> None:
    prompt = later(turns()["700"], alone["700"].tokens, seed)
    pair.say(prompt)  # so that it is stored
    pair.settled()
    reader = pair.decode if decode_reads else pair.prefill
    reader.collective_rpc(hold_reads)
    try:
        with pair.leaving(pair.prefill, prompt, pair.to_prefill(decode_reads)):
            pair.until(reader, lambda seen: seen["reading"] > 0)
    finally:
        reader.collective_rpc(let_reads_go)
    pair.settled()
    assert_same(pair.say(prompt, decode_reads), alone[f"later {seed}"])


def test_a_file_that_is_damaged_is_computed(pair: Pair, alone: dict[str, Spoken]) -> None:
    pair.settled()
    for file in pair.folder.glob("store/*/*/*.kv"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    for decode_reads in (False, True):
        prompt = later(turns()["700"], alone["700"].tokens, 4)
        assert_same(pair.say(prompt, decode_reads), alone["later 4"])
        pair.forget()
    pair.settled()


def test_host_memory_and_the_default_policy_on_the_prefill_engine(
    loud_model: str, pair: Pair, alone: dict[str, Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's second turn finds in host memory what others have displaced from the device. Another
    prefill engine of the pair, whose scheduler is in this process."""
    from vllm.config import KVTransferConfig

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    extra = transfers(pair.folder, "p").kv_connector_extra_config
    with_host = KVTransferConfig(
        kv_connector="PairConnector",
        kv_connector_module_path="sojourn_server.vllm.pair_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={**extra, "store_name": "h", "host": {"host_bytes": 16 * MIB}},
    )
    ours = {
        **SHAPE,
        "distributed_executor_backend": "mp",
        "scheduler_cls": SCHEDULER_CLS,
        "additional_config": {"sojourn": {"policy": "sojourn", "strict": True}},
        "num_gpu_blocks_override": 2048 // BLOCK_TOKENS + 1,
    }
    computed = pair.computed_by_decode()
    with float32_engine(loud_model, **ours, kv_transfer_config=with_host) as prefill:

        def turn(program: str, prompt: list[int]) -> Spoken:
            asked = sampling(1, pair.to_prefill())
            asked.extra_args["agentic_context"] = json.dumps({"program_id": program})
            (first,) = prefill.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
            return say(pair.decode, prompt, OUTPUT_TOKENS, first.kv_transfer_params)

        assert_same(turn("p", OWN), alone["own"])
        for number in range(3):
            turn(f"q{number}", words(number + 20, 900))
        assert_same(turn("p", later(OWN, alone["own"].tokens, 1)), alone["later own"])
        assert pair.computed_by_decode() == computed
        first, second = scheduler_of(prefill).sojourn.program_scheduler.turns_of("p")
        assert first.outcome == second.outcome == "prefilled"
        assert second.tokens is not None
        assert second.tokens.host >= 700 // BLOCK_TOKENS * BLOCK_TOKENS - second.tokens.device > 300


def say_all(llm: Any, prompts: list[list[int]], max_tokens: int, params: list[Any]) -> list[Spoken]:
    """As ``say``, all at once."""
    asked = [sampling(max_tokens, each) for each in params]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [Spoken(*said(output.outputs[0]), output.kv_transfer_params) for output in outputs]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_steps_planned_ahead_on_both_sides(
    loud_model: str,
    alone: dict[str, Spoken],
    tmp_path: Path,
    settings: Path,
    planned_ahead: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cold, read by either side and by both, filled in by half, and with spoilt blocks as the negative
    control; several requests at once, so that steps with others are planned before results are known."""
    from async_scheduling_worker import WORKER_CLASS

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    shape: dict[str, Any] = {**SHAPE, "distributed_executor_backend": "mp", "worker_cls": WORKER_CLASS}
    with (
        asynchronous_scheduling(),
        float32_engine(loud_model, **shape, kv_transfer_config=transfers(tmp_path, "p")) as prefill,
        float32_engine(
            loud_model, **shape, kv_transfer_config=transfers(tmp_path, "d"), disable_log_stats=False
        ) as decode,
    ):
        both = Pair(prefill, decode, tmp_path, in_process=True)

        def through(prompts: list[list[int]], decode_reads: bool = False) -> list[Spoken]:
            params = [both.to_prefill(decode_reads) for _ in prompts]
            first = say_all(prefill, prompts, 1, params)
            return say_all(decode, prompts, OUTPUT_TOKENS, [each.params for each in first])

        names = list(turns())
        for name, spoken in zip(names, through(list(turns().values())), strict=True):
            assert_same(spoken, alone[name])
        assert both.computed_by_decode() == 0
        looks = both.settled()
        assert looks[0]["counts"]["pushes_complete"] == len(LENGTHS)
        assert looks[1]["counts"]["write_stored"] == sum(
            (count + OUTPUT_TOKENS - 1) // FULL_TOKENS for count in LENGTHS
        )
        longer = {seed: later(turns()["700"], alone["700"].tokens, seed) for seed in (1, 2, 3, 4)}
        for decode_reads in (False, True):
            for seed, spoken in zip(longer, through(list(longer.values()), decode_reads), strict=True):
                assert_same(spoken, alone[f"later {seed}"])
            both.settled()
        assert both.computed_by_decode() == 0
        assert min(look["counts"]["blocks_read"] for look in both.looks()) > 0
        with failing_fills(settings):
            for seed, spoken in zip(longer, through(list(longer.values()), True), strict=True):
                assert_same(spoken, alone[f"later {seed}"])
        looks = both.settled()
        assert min(look["worker"]["blocks_not_filled"] for look in looks) > 0
        with failing_fills(settings):  # alone: the engine that reads plans further steps
            for seed, spoken in zip(
                longer, say_all(decode, list(longer.values()), OUTPUT_TOKENS, [None] * 4), strict=True
            ):
                assert_same(spoken, alone[f"later {seed}"])
        assert both.settled()[1]["worker"]["blocks_not_filled"] > looks[1]["worker"]["blocks_not_filled"]
        with spoilt_blocks(settings):
            (spoilt,) = through([longer[1]])
        assert spoilt.tokens != alone["later 1"].tokens
    assert planned_ahead["ahead"] > 100


def model_of_two_heads(tokenizer: str, target: Path) -> str:
    """A loud model whose keys and values two workers share between them: each has a head of its own."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    return save_random_model(lambda: transformers.LlamaForCausalLM(config), target, tokenizer)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@NEEDS_SHARED_MEMORY
def test_two_workers_on_each_side(
    tiny_model: str, tmp_path: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, read by both sides, and with spoilt blocks as the negative control."""
    model = model_of_two_heads(tiny_model, tmp_path / "model")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    two: dict[str, Any] = {**SHAPE, "distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    with (
        float32_engine(model, **two, kv_transfer_config=transfers(tmp_path, "p")) as prefill,
        float32_engine(
            model, **two, kv_transfer_config=transfers(tmp_path, "d"), disable_log_stats=False
        ) as decode,
    ):
        peer = f"unix:{tmp_path / 'd.sock'},unix:{tmp_path / 'd.sock'}.rank1"
        both = Pair(prefill, decode, tmp_path, in_process=True)
        prompt = words(700, 700)
        cold = both.say(prompt, peer=peer)
        both.settled()
        longer = later(prompt, cold.tokens, 3)
        read_by_decode = both.say(longer, True, peer)
        assert both.computed_by_decode() == 0
        both.settled()
        stored = (700 + OUTPUT_TOKENS - 1) // FULL_TOKENS
        for llm, blocks in ((prefill, 0), (decode, stored)):
            read = [worker["counts"].get("blocks_read", 0) for worker in llm.collective_rpc(look)]
            assert read == [blocks] * 2
        assert_same(cold, say(prefill, prompt, OUTPUT_TOKENS, alone=True))
        assert_same(read_by_decode, say(prefill, longer, OUTPUT_TOKENS, alone=True))
        both.settled()
        with spoilt_blocks(settings):
            spoilt = both.say(longer, True, peer)
        assert spoilt.tokens != read_by_decode.tokens
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"rank0of2", "rank1of2"}
