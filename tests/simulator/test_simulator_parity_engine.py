"""Parity against the real engine: agents on vLLM with the tiny model, in real time; then the replay."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulator_parity_workload import Agents
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.simulator.parity_replay import replay_recording

# vLLM and torch warn about themselves; only our own warnings are errors here.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error:::sojourn"),
]

AGENTS = 20
BLOCKS = 49
"""Of 32 tokens: a handful of the contexts."""
CALLS = ("ls()", "make()", "grep()", "test()")
"""Outputs that call a tool, in few tokens: a step of this engine takes the longer the busier the machine."""
WANTED_DECISIONS = 2100
LONGEST_S = 200.0
"""Real seconds after which the agents stop, whatever they have done."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """The engine core in this process, so that its adapter's log can be compared with its recording."""
    pytest.importorskip("vllm")
    from sojourn_server.models import resolve_model

    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    # One thread: where the machine is busy, two wait for each other at every kernel.
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    patch.setenv("OMP_NUM_THREADS", "1")
    import torch
    from vllm import LLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("parity")
    recording, profile = folder / "engine.recording", folder / "profile.toml"
    # As of a slow device, so that leases pay however fast the machine of the test is.
    slow = EngineProfile("tiny", "none", "vllm", 32, PrefillCurve(0.0, 0.001, 0.0), points=())
    profile.write_text(slow.to_toml(), encoding="utf-8")
    made = LLM(
        model=resolve_model("tiny", progress=False),
        block_size=32,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=BLOCKS,
        enforce_eager=True,
        seed=0,
        disable_log_stats=True,
        scheduler_cls="sojourn_server.vllm.scheduler.make_scheduler",
        logits_processors=["sojourn_server.vllm.forced_tokens:ForcedTokens"],
        additional_config={
            "sojourn": {
                "policy": "continuum",
                "strict": True,
                "profile_file": str(profile),
                "recording_file": str(recording),
            }
        },
    )
    yield made, recording
    made.llm_engine.engine_core.shutdown()
    del made
    gc.collect()
    torch.set_num_threads(threads)
    patch.undo()


class LiveEngine:
    """vLLM's engine and the real clock, with the interface of the simulated ones."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        tokenizer = llm.get_tokenizer()
        self._outputs = [[*tokenizer.encode(call), tokenizer.eos_token_id] for call in CALLS]
        self._rng = random.Random(1)

    @property
    def now(self) -> float:
        return time.monotonic()

    @now.setter
    def now(self, _: float) -> None:
        """A step takes as long as it takes."""

    def step(self) -> Any:
        finished = []
        if self.engine.has_unfinished_requests():
            finished = [output.request_id for output in self.engine.step() if output.finished]
        else:
            time.sleep(0.001)
        return SimpleNamespace(finished=finished, planned=SimpleNamespace(total_num_scheduled_tokens=0))

    def add(
        self, request_id: str, prompt: list[int], *, program_id: str | None, context: dict[str, Any], **_: Any
    ) -> None:
        from vllm import SamplingParams

        forced = self._rng.choice(self._outputs)
        hint = json.dumps({"program_id": program_id, **context} if program_id else {})
        extra = {"replay_ids": forced, "agentic_context": hint}
        sampling = SamplingParams(temperature=0, max_tokens=len(forced), extra_args=extra)
        self.engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])

    def tell(self, event: dict[str, Any]) -> None:
        batch = {"v": 1, "emitter": "e", "events": [event]}
        answers = json.loads(self.scheduler.sojourn_call("event_batches", json.dumps([batch])))
        assert answers["batches"][0]["outcomes"][0]["outcome"] != "rejected"


@pytest.mark.timeout(600)
def test_two_thousand_decisions_of_the_real_engine_are_reproduced_exactly(llm):
    made, recording = llm
    engine = LiveEngine(made)
    adapter = engine.scheduler.sojourn
    agents = Agents(engine, engine, seed=1, programs=AGENTS, pace=0.01)
    end_s = time.monotonic() + LONGEST_S
    while not adapter.program_scheduler.decisions.since(WANTED_DECISIONS, 1)[0] and time.monotonic() < end_s:
        agents.run(20)
    assert adapter.failures == 0
    logged, _ = adapter.program_scheduler.decisions.since(0, 1_000_000)
    made.llm_engine.engine_core.shutdown()  # as when a server stops: it ends the recording

    report = replay_recording(recording)
    assert report.difference is None
    assert report.ended == "the engine stopped"
    assert report.decisions_by_kind == Counter(decision.kind for decision in logged)
    assert report.decisions >= 2000
    # Leases were granted on request and by cost and benefit, ended early, and blocks were taken.
    granted = Counter(d.reason for d in logged if d.numbers.get("ttl_s"))
    assert granted["hinted"] > 50
    assert granted["this_tool"] + granted["all_tools"] > 50
    assert report.decisions_by_kind["release"] > 10
    assert report.evictions > 100
    assert report.actions_by_kind["LeaseGranted"] > 100
