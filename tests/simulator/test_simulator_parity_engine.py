"""Parity against the real engine: agents on vLLM with the tiny model, in real time; then the replay."""

from __future__ import annotations

import gc
import heapq
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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
        max_model_len=512,
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


class LiveAgents:
    """Agents in a closed loop: a turn that calls a tool, the tool, the next turn; ended ones are replaced."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        tokenizer = llm.get_tokenizer()
        self._outputs = [[*tokenizer.encode(call), tokenizer.eos_token_id] for call in CALLS]
        self._rng = random.Random(1)
        self._due = [(0.0, f"P{n}") for n in range(AGENTS)]
        self._contexts: dict[str, list[int]] = {}
        self._busy: dict[str, str] = {}
        self._tools: dict[str, tuple[str, float]] = {}
        self._sequence = 0
        self.turns = 0
        self._programs = AGENTS

    def run(self) -> None:
        """Until enough has been decided."""
        end_s = time.monotonic() + LONGEST_S
        decisions = self.scheduler.sojourn.program_scheduler.decisions
        while not decisions.since(WANTED_DECISIONS, 1)[0] and time.monotonic() < end_s:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._turn(heapq.heappop(self._due)[1])
            if not self.engine.has_unfinished_requests():
                time.sleep(max(0.0, min(self._due)[0] - now))
                continue
            for output in self.engine.step():
                if output.finished:
                    self._acted(output.request_id, list(output.outputs[0].token_ids))

    def _turn(self, program: str) -> None:
        from vllm import SamplingParams

        rng = self._rng
        if program in self._tools:
            tool, started_s = self._tools.pop(program)
            took_s = time.monotonic() - started_s
            self._tell("tool_stop", program, call_id=tool, duration_s=took_s)
        context = self._contexts.setdefault(program, list(range(100, 132)))
        context += [rng.randrange(1000, 40_000) for _ in range(rng.randrange(10, 50))]
        forced = rng.choice(self._outputs)
        hint: dict[str, Any] = {"program_id": program}
        if rng.random() < 0.15:
            hint["kv_retention_ttl_seconds"] = rng.uniform(0.01, 0.4)
        self.turns += 1
        request_id = f"{program}-{self.turns}"
        self._busy[request_id] = program
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": context},
            SamplingParams(
                temperature=0,
                max_tokens=len(forced),
                extra_args={"replay_ids": forced, "agentic_context": json.dumps(hint)},
            ),
        )

    def _acted(self, request_id: str, tokens: list[int]) -> None:
        program = self._busy.pop(request_id)
        self._contexts[program] += tokens
        if len(self._contexts[program]) > 400:
            self._tell("program_end", program)
            del self._contexts[program]
            self._programs += 1
            program = f"P{self._programs}"
        elif self._rng.random() < 0.7:
            self._tools[program] = (f"c{self.turns}", time.monotonic())
            self._tell("tool_start", program, call_id=f"c{self.turns}", tool="bash", tool_class="ls")
        heapq.heappush(self._due, (time.monotonic() + self._rng.choice([0.001, 0.01, 0.04, 0.15]), program))

    def _tell(self, kind: str, program: str, **fields: Any) -> None:
        self._sequence += 1
        event = {"type": kind, "program_id": program, "seq": self._sequence, **fields}
        batch = {"v": 1, "emitter": "e", "events": [event]}
        answers = json.loads(self.scheduler.sojourn_call("event_batches", json.dumps([batch])))
        (answer,) = answers["batches"]
        assert answer["outcomes"][0]["outcome"] != "rejected"


@pytest.mark.timeout(600)
def test_two_thousand_decisions_of_the_real_engine_are_reproduced_exactly(llm):
    made, recording = llm
    agents = LiveAgents(made)
    agents.run()
    adapter = agents.scheduler.sojourn
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
