"""Random agents on the simulated engine, in virtual time, while a recording is written; and functions that
edit recordings."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
BLOCKS = 97
"""Number of KV blocks. The agents' contexts together are several times as large."""


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeToolCallReader:
    """Replaces the engine's reader of outputs, because the simulated engine has no tokenizer."""

    def read(self, token_ids: Any) -> Any:
        from sojourn_server.programs.tool_call_parsers import ParsedToolCall

        count = len(token_ids)
        if count % 5 == 0:
            return ()
        shell = ParsedToolCall("bash", ("ls", "pytest", "grep")[count % 3])
        return (shell, ParsedToolCall("TodoWrite", plan_items=count % 7))[: 1 + (count % 4 == 0)]


def make_engine(
    recording: Path | None, clock: Clock, policy: str = "continuum", *, host_blocks: int = 0, **sojourn: Any
) -> Any:
    """A simulated engine with too few KV blocks, and ``host_blocks`` blocks of sojourn's host memory."""
    from sojourn_server.simulator.simulated_engine import (
        DUMMY_TOKEN,
        STOP_TOKEN,
        SimulatedEngine,
        SimulatedEngineOptions,
    )

    settings = {"policy": policy, "strict": True, **sojourn}
    if recording is not None:
        settings["recording_file"] = str(recording)
    engine = SimulatedEngine(
        SimulatedEngineOptions(
            blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=800,
            host_blocks=host_blocks,
            own_tiers=True,
            sojourn=settings,
        ),
        clock,
    )
    engine.scheduler.sojourn.reader = FakeToolCallReader()
    # Outputs that vLLM cuts off are not read.
    engine.tokens = lambda request: (
        STOP_TOKEN if request.num_output_tokens + 1 >= request.max_tokens else DUMMY_TOKEN
    )
    return engine


class Agents:
    """Closed-loop agents that alternate turns and tools. A new agent replaces one that has ended. Some agents
    send more hints and events than others. Gaps and hinted leases last ``pace`` times as long."""

    def __init__(self, engine: Any, clock: Any, seed: int, programs: int = 14, pace: float = 1.0) -> None:
        self.engine = engine
        self.clock = clock
        self.rng = random.Random(seed)
        self._pace = pace
        self._sequence = 0
        self._requests = 0
        self._due: dict[str, float] = {f"P{n}": clock.now for n in range(programs)}
        self._contexts: dict[str, list[int]] = {}
        self._busy: dict[str, str] = {}
        self._tools: dict[str, float] = {}
        self._next_program = programs

    def run(self, steps: int, on_step: Callable[[int], None] | None = None) -> None:
        """Run ``steps`` engine steps."""
        for step in range(steps):
            for program in [p for p, due in self._due.items() if due <= self.clock.now]:
                self._turn(program)
            planned = self.engine.step()
            tokens = planned.planned.total_num_scheduled_tokens
            self.clock.now += 0.02 + 0.004 * tokens * self.rng.uniform(0.9, 1.1)
            for request_id in planned.finished:
                self._acted(self._busy.pop(request_id, None))
            if on_step is not None:
                on_step(step)

    def _turn(self, program: str) -> None:
        rng = self.rng
        del self._due[program]
        started_s = self._tools.pop(program, None)
        if started_s is not None:
            self._tell("tool_stop", program, call_id="c", duration_s=self.clock.now - started_s)
        context = self._contexts.setdefault(program, list(range(48)) if rng.random() < 0.5 else [])
        context += [rng.randrange(30_000) for _ in range(rng.randrange(20, 90))]
        self._requests += 1
        request_id = f"r{self._requests}"
        hint: dict[str, Any] = {}
        if rng.random() < 0.1:
            hint["kv_retention_ttl_seconds"] = self._pace * rng.uniform(0.5, 400.0)
        if rng.random() < 0.1:
            hint["sojourn"] = {
                "v": 1,
                "emitter": "rider",
                "agent_type": "coder",
                "heartbeat": rng.random() < 0.3,
            }
            if rng.random() < 0.5:
                hint["sojourn"]["expected_steps_left"] = float(rng.randrange(12))
        stranger = rng.random() < 0.05
        self.engine.add(
            request_id,
            context,
            max_tokens=rng.randrange(1, 9),
            program_id=None if stranger else program,
            context=hint,
            arrival_s=self.clock.now,
        )
        self._busy[request_id] = program
        if rng.random() < 0.02:
            self.engine.abort(request_id)
            self._acted(self._busy.pop(request_id))

    def _acted(self, program: str | None) -> None:
        if program is None:
            return
        rng = self.rng
        if len(self._contexts[program]) > 650 or rng.random() < 0.06:
            if rng.random() < 0.8:
                self._tell("program_end", program, status="ok")
            del self._contexts[program]
            self._next_program += 1
            program = f"P{self._next_program}"
        elif rng.random() < 0.6:
            self._tools[program] = self.clock.now
            self._tell("tool_start", program, call_id="c", tool="bash", tool_class=rng.choice(["ls", "make"]))
        if rng.random() < 0.1:
            self._tell("heartbeat", program)
        self._due[program] = self.clock.now + self._pace * rng.choice([0.05, 0.4, 2.0, 9.0])

    def _tell(self, kind: str, program: str, **fields: Any) -> None:
        self._sequence += 1
        self.engine.tell({"type": kind, "program_id": program, "seq": self._sequence, **fields})


def record(path: Path, *, seed: int = 1, steps: int = 400, policy: str = "continuum", **sojourn: Any) -> Any:
    """Run agents for ``steps`` engine steps while a recording is written to ``path``. Stop the engine and
    return it."""
    clock = Clock()
    engine = make_engine(path, clock, policy, **sojourn)
    Agents(engine, clock, seed).run(steps)
    assert engine.scheduler.sojourn.failures == 0
    engine.scheduler.shutdown()
    return engine


def recording_lines(path: Path) -> list[Any]:
    """The decoded lines of a recording."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write a recording of these lines."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def grants(lines: list[Any]) -> dict[int, tuple[float, str]]:
    """Index of each line that granted a lease → the lease's TTL in seconds, and its reason."""
    return {
        index: (action[2], action[3])
        for index, line in enumerate(lines)
        if isinstance(line, list) and isinstance(line[1], list)
        for action in line[2][0]
        if action[0] == "LeaseGranted"
    }
