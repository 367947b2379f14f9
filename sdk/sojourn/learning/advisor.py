"""The advisor learns tool durations and program graphs from the agents of this process, on its own thread.

    agent's thread ── fact ──▶ queue ──▶ this thread, once a second: durations, transitions, graphs
          ▲                                     │ every five seconds and at the end
          └── estimates: dict look-ups ─────────┤
                                                └──▶ history file (SQLite), read once at the start

The agent's threads take no lock here. Garbage collection may end a program at any moment, even in a thread
that holds a lock. The end of a program goes to two places: to the event sender, which has a lock, and to this
queue. With a lock here too, two threads could each hold one lock and wait for the other lock.
``deque.append`` and ``SimpleQueue.put`` may be called during garbage collection.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from sojourn.aeg import Aeg
from sojourn.errors import ArgumentError
from sojourn.listeners import ProgramListener, remove_listener

from .history_store import DurationSample, HistoryStore
from .run_trace import ProgramRun, RunTrace
from .tool_durations import Durations
from .transitions import ENOUGH_RUNS, MAX_KINDS, Transitions

if TYPE_CHECKING:
    from sojourn.program import Program
    from sojourn.request_tracker import LogicalRequest
    from sojourn.stats import Counters
    from sojourn.tools import ToolCall

FOLD_EVERY_S: Final = 1.0
"""Interval at which the advisor's thread learns the queued facts."""
SAVE_EVERY_S: Final = 5.0
MAX_FACTS: Final = 20_000
"""Maximum number of queued facts (observed events). Further facts are dropped and counted
(``history_dropped``)."""
MAX_UNSAVED: Final = 5_000
MAX_TURNS_LEFT: Final = 1e9
"""Estimates of this or more turns are discarded, since only a damaged history file causes them."""
CLOSE_GRACE_S: Final = 0.05
"""Minimum seconds that ``close`` waits for saving, even if its ``timeout_s`` is less."""
REPORT_AT_RUNS: Final = (1, 2, 4, 8, 16)
REPORT_EVERY_RUNS: Final = 30
"""Number of an agent type's runs between two checks of its graph. A check reports the graph again if it has
changed. The first checks come earlier (``REPORT_AT_RUNS``). Reports are rare, because each version of a graph
is sent in full."""
REPORT_NEW_EDGE_AFTER_RUNS: Final = 4
"""Minimum number of runs between a graph's last change and the report of a new edge. After that many runs, a
new edge is reported at once, not at the next check."""
MOVED: Final = 0.05
"""Smallest change of an edge's probability for which a graph is reported again."""
LIKELY: Final = 0.03
"""An edge below this probability may appear or disappear without a new report."""

_Declared = tuple[str, "Aeg | None"]
"""Agent type, and the graph declared for it, if any."""
Fact = tuple[Callable[[Any, Any], None] | None, Any, Any]
"""An observed event in the queue, as (function, ``RunTrace`` or ``None``, value). The advisor's thread calls
the function with the trace and the value. If the function is ``None``, the value is a ``threading.Event``,
which is set once all earlier facts are learned."""


class Advisor(ProgramListener):
    """Learns tool durations and program graphs in one SDK session, and returns estimates from them.
    ``history=None``: nothing is read from or saved to a file."""

    def __init__(
        self,
        counters: Counters,
        history: HistoryStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        fold_every_s: float = FOLD_EVERY_S,
        save_every_s: float = SAVE_EVERY_S,
    ) -> None:
        self.durations = Durations()
        self.estimates = self.durations.estimates
        self.transitions = Transitions()
        self.history = history
        self._counters = counters
        self._clock = clock
        self._fold_every_s = fold_every_s
        self._save_every_s = save_every_s
        self._loaded = history is None
        self._graphs: dict[_Declared, Aeg] = {}
        """Graphs corrected by observed runs."""
        self._renewed: dict[_Declared, tuple[int, int]] = {}
        """(Agent type, declared graph) → two numbers of learned runs of the agent type: at the last check of
        the graph, and at its last change."""
        self._moved: dict[_Declared, None] = {}
        """Graphs to check again: new graphs, and graphs whose agent type had new runs since the last
        update."""
        self._fresh()

    def _fresh(self) -> None:
        self._facts: deque[Fact] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread. The facts are in a ``deque`` instead, because ``put`` into this queue is slower
        and may wake the thread, which then competes with the agent for the interpreter."""
        self._asleep = True
        """True while the thread waits for a fact, or is absent."""
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = False
        self._closed = False
        self._unsaved: list[DurationSample] = []
        self._unsaved_runs: list[tuple[str, ProgramRun]] = []
        self._save_due_s: float | None = None

    # ---- questions, on the agent's threads

    def turns_left(self, program: Program, node: str | None) -> float | None:
        """Return the number of LLM requests expected after the current one, rounded to two decimals; ``None``
        if too few finished programs of this type are known."""
        run_trace = program.run_trace
        if run_trace is None:
            return None
        # Not cached, since a turn takes about as long as the time between two updates.
        left = self.transitions.turns_left(run_trace.kind, turns=run_trace.turns, node=node)
        if left is None or not 0.0 <= left < MAX_TURNS_LEFT:
            return None
        # ``round`` takes many times as long with cold caches.
        return int(left * 100.0 + 0.5) / 100.0

    def graph(self, program: Program) -> Aeg | None:
        """Return the graph to report for ``program``: the declared graph, corrected by earlier runs if there
        are enough. Without a declared graph, returns the graph learned from earlier runs; ``None`` if none
        was learned."""
        declared = program.aeg
        kind = _kind(program)
        if kind is None:
            return declared
        found = self._graphs.get((kind, declared))
        if found is None and declared is not None and self.transitions.runs(kind):
            self._put(self._announced, None, (kind, declared))  # the agent type is known, the graph is new
        return declared if found is None else found

    # ---- facts, on the agent's threads

    def program_started(self, program: Program) -> None:
        self._begin_trace(program)

    def node_entered(self, program: Program, node: str) -> None:
        run_trace = program.run_trace or self._begin_trace(program)
        if run_trace is not None:
            run_trace.graph = program.aeg
            run_trace.has_nodes = True  # before the fact is queued
            self._put(self._entered, run_trace, node)

    # The next four are called directly, not as a listener's methods, since they run in each turn of each
    # agent. The two that also run for programs without nodes inline ``_put``.

    def request_begins(self, request: LogicalRequest) -> None:
        """Record the start of a request."""
        run_trace = request.program.run_trace or self._begin_trace(request.program)
        if run_trace is not None:
            run_trace.turns += 1
            if request.node is not None:
                run_trace.has_nodes = True
            facts = self._facts
            if self._closed or len(facts) >= MAX_FACTS:
                self._count_dropped(run_trace)
                return
            facts.append((self._requested, run_trace, request.node))
            if self._asleep:
                self._wake_thread()

    def request_over(self, run_trace: RunTrace, node: str | None) -> None:
        """Record the end of a request of a program with nodes. ``node``: the node that the request named;
        ``None`` if it named none."""
        self._put(self._answered, run_trace, node)

    def tool_begins(self, run_trace: RunTrace, tool: str) -> None:
        """Record the start of a tool call of a program with nodes."""
        self._put(self._called, run_trace, tool)

    def tool_over(self, call: ToolCall, duration_s: float, status: str) -> None:
        """Record the end of a tool call."""
        facts = self._facts
        if self._closed or len(facts) >= MAX_FACTS:
            self._count_dropped(None)
            return
        facts.append((self._stopped, None, (call.tool, call.tool_class, duration_s, status)))
        if self._asleep:
            self._wake_thread()

    def program_ended(self, program: Program, status: str) -> None:
        run_trace, program.run_trace = program.run_trace, None
        if run_trace is not None:
            run_trace.graph = program.aeg
            self._put(self._ended, run_trace, status)

    def _begin_trace(self, program: Program) -> RunTrace | None:
        kind = _kind(program)
        if kind is not None and program.is_open and program.is_whole:  # part of a run is not learned
            program.run_trace = RunTrace(kind)
        return program.run_trace

    def _put(self, fold: Callable[[Any, Any], None], run_trace: RunTrace | None, what: Any) -> None:
        facts = self._facts
        if self._closed or len(facts) >= MAX_FACTS:
            self._count_dropped(run_trace)
            return
        facts.append((fold, run_trace, what))
        # Read after the append, since the thread sets ``_asleep`` before its last check of the queue.
        if self._asleep:
            self._wake_thread()

    def _count_dropped(self, run_trace: RunTrace | None) -> None:
        """Count a dropped fact, and mark its trace as incomplete."""
        if run_trace is not None:
            run_trace.lossy = True
        self._counters.add("history_dropped")

    def _wake_thread(self) -> None:
        """Start the thread, or wake it."""
        self._asleep = False
        if self._thread is None:
            self.start()
        # Also after ``start``. If another thread did the start, the advisor's thread may be asleep by now.
        self._bell.put(None)

    # ---- lifecycle

    def start(self) -> None:
        """Start the thread, which reads the history and then learns. A second call does nothing. Never
        raises."""
        if self._thread is not None or self._starting or self._closed:
            return
        self._starting = True  # a garbage collection may end a program and so call this method
        try:
            thread = threading.Thread(target=self._run, name="sojourn-history", daemon=True)
            contextvars.Context().run(thread.start)
            self._thread = thread
        except Exception:
            self._closed = True  # without a thread the queue would only grow
            self._counters.add("thread_start_failed")
        finally:
            self._starting = False

    def begin_shutdown(self) -> None:
        """Stop listening and make the thread save its data. Does not wait for the thread; ``close`` does."""
        remove_listener(self)
        if not self._closed:
            self._closed = True
            self._hurry.set()
            self._bell.put(None)

    def close(self, timeout_s: float) -> None:
        """Stop, and wait up to ``timeout_s`` until the thread has saved. A second call is harmless. Never
        raises."""
        self.begin_shutdown()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(CLOSE_GRACE_S, timeout_s))

    def wait_until_learned(self, timeout_s: float = 5.0) -> bool:
        """Wait until all queued facts are learned. Return False if ``timeout_s`` passes first. For tests."""
        self.start()
        done = threading.Event()
        self._facts.append((None, None, done))
        self._hurry.set()
        self._bell.put(None)
        return done.wait(timeout_s)

    def after_fork(self) -> None:
        """Reset queue and thread in a forked child. The child keeps the estimates; unsaved data stays with
        the parent, which saves it."""
        self._fresh()

    # ---- the thread

    def _run(self) -> None:
        self._load()
        while True:
            self._asleep = True
            if not self._facts:
                try:
                    self._bell.get(timeout=self._until_save_s())
                except Empty:
                    self._asleep = False
                    self._save()
                    continue
            self._asleep = False
            while not self._bell.empty():  # several may have rung
                self._bell.get_nowait()
            if self._hurry.wait(self._fold_every_s):
                self._hurry.clear()
            self._fold()
            closed = self._closed and not self._facts
            if closed or self._until_save_s() == 0.0:
                self._save()
            if closed:
                return

    def _until_save_s(self) -> float | None:
        """Return the seconds until the next save is due; ``None`` if none is due."""
        return None if self._save_due_s is None else max(0.0, self._save_due_s - self._clock())

    def _fold(self) -> None:
        waiting: list[threading.Event] = []
        facts = self._facts
        for _ in range(len(facts)):
            fold, run_trace, what = facts.popleft()
            if fold is None:
                waiting.append(what)
                continue
            try:
                fold(run_trace, what)
            except Exception:
                self._counters.add("internal_error")
        self._update_estimates()
        for done in waiting:
            done.set()
        if self._save_due_s is None and (self._unsaved or self._unsaved_runs):
            self._save_due_s = self._clock() + self._save_every_s

    def _entered(self, run_trace: RunTrace, node: str) -> None:
        self._learn(run_trace, run_trace.entered(node))

    def _requested(self, run_trace: RunTrace, node: str | None) -> None:
        self._learn(run_trace, run_trace.requested(node))

    def _answered(self, run_trace: RunTrace, node: str | None) -> None:
        run_trace.answered(node)

    def _called(self, run_trace: RunTrace, tool: str) -> None:
        run_trace.called(tool)

    def _announced(self, _: None, declared: _Declared) -> None:
        self._moved[declared] = None

    def _ended(self, run_trace: RunTrace, status: str) -> None:
        self._learn(run_trace, run_trace.ended(broken_off=status == "cancelled"))

    def _stopped(self, _: None, duration: tuple[str, str | None, float, str]) -> None:
        if self.durations.add(*duration) and self._keeps:
            self._unsaved.append(DurationSample(*duration))

    def _learn(self, run_trace: RunTrace, run: ProgramRun | None) -> None:
        if run is None or run_trace.lossy or not (run.path or run.turns):
            return
        self.transitions.learn(run_trace.kind, run)
        self._moved[run_trace.kind, run_trace.graph] = None
        if self._keeps:
            self._unsaved_runs.append((run_trace.kind, run))

    @property
    def _keeps(self) -> bool:
        return self.history is not None and self.history.usable

    def _update_estimates(self) -> None:
        """Update the estimates and graphs from what was learned."""
        moved, self._moved = self._moved, {}
        try:
            self.durations.update_estimates()
            for kind, declared in moved:
                self._renew(kind, declared)
            while len(self._renewed) > MAX_KINDS:
                forgotten = next(iter(self._renewed))
                del self._renewed[forgotten]
                self._graphs.pop(forgotten, None)
        except Exception:
            self._counters.add("internal_error")

    def _renew(self, kind: str, declared: Aeg | None) -> None:
        runs = self.transitions.runs(kind)
        looked, changed = self._renewed.get((kind, declared), (0, 0))
        due = runs // REPORT_EVERY_RUNS > looked // REPORT_EVERY_RUNS or any(
            looked < at <= runs for at in REPORT_AT_RUNS
        )
        if not due and runs - changed < REPORT_NEW_EDGE_AFTER_RUNS:
            return
        edges = self.transitions.edges(kind)
        if not edges or (declared is None and runs < ENOUGH_RUNS):
            return
        before = self._graphs.get((kind, declared), declared)
        try:
            graph = (declared or _UNKNOWN).corrected(edges, self.transitions.tools(kind))
        except ArgumentError:  # too many names, or names that are too long
            self._counters.add("graph_too_large")
            changed = runs  # not tried again at once, since a try takes tens of milliseconds
        else:
            if before is None or (_differ(before, graph) if due else _has_new_edge(before, graph)):
                self._graphs[kind, declared] = graph
                changed = runs
        # Re-inserted last, since ``_update_estimates`` removes the first entries first.
        self._renewed.pop((kind, declared), None)
        self._renewed[kind, declared] = (runs, changed)

    def _load(self) -> None:
        if self._loaded or self.history is None:
            return
        # Once closed, no agent asks for estimates. Learning a full file takes seconds, and would keep the
        # process from saving its own facts in time.
        recorded = self.history.load(lambda: self._closed)
        self._loaded = recorded is not None or not self.history.usable
        if recorded is None:
            return
        for duration in recorded.durations:
            self.durations.add(*duration)
        for kind, run in recorded.runs:
            if self._closed:
                return
            try:
                self.transitions.learn(kind, run)
            except Exception:
                self._counters.add("internal_error")
        self._moved.update(dict.fromkeys((kind, None) for kind, _ in recorded.runs))
        self._update_estimates()

    def _save(self) -> None:
        self._save_due_s = None
        durations, runs = self._unsaved, self._unsaved_runs
        history = self.history
        if history is not None and (durations or runs):
            if not self._closed:
                self._load()  # the file may have been locked at the start
            if not history.save(durations, runs) and history.usable:
                lost = max(0, len(durations) - MAX_UNSAVED) + max(0, len(runs) - MAX_UNSAVED)
                if lost:
                    self._counters.add("history_dropped", lost)
                self._unsaved, self._unsaved_runs = durations[-MAX_UNSAVED:], runs[-MAX_UNSAVED:]
                self._save_due_s = self._clock() + self._save_every_s
                return
        self._unsaved, self._unsaved_runs = [], []


_UNKNOWN = Aeg((), complete=False)


def _kind(program: Program) -> str | None:
    """Return the program's agent type, or its name if it has no type."""
    return program.agent_type or program.name


def _differ(before: Aeg, after: Aeg) -> bool:
    """Return whether ``after`` differs enough from ``before`` to be reported again."""
    if before.nodes != after.nodes or before.complete != after.complete:
        return True
    for edge in before.edges.keys() | after.edges.keys():
        old, new = before.edges.get(edge, 0.0), after.edges.get(edge, 0.0)
        if old is None or new is None:
            if old is not new:
                return True
        elif abs(old - new) >= MOVED or (min(old, new) < LIKELY <= max(old, new)):
            return True
    return False


def _has_new_edge(before: Aeg, after: Aeg) -> bool:
    """Return whether ``after`` has an edge of at least ``LIKELY`` that ``before`` lacks."""
    return any((p is None or p >= LIKELY) and edge not in before.edges for edge, p in after.edges.items())
