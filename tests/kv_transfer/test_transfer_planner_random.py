"""Any order of asks, answers, steps, preemptions and ends: nobody waits for ever, nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fake_transfer_requests import BLOCK_TOKENS, FULL_TOKENS, PER_FULL, Request, prompt, to_prefill
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sojourn_server.kv_transfer.transfer_jobs import TransferJobs, TransferResults
from sojourn_server.kv_transfer.transfer_planner import MAX_FETCHES, TransferPlanner
from sojourn_server.kv_transfer.transfer_request import context_name

LENGTHS = st.integers(1, 5 * FULL_TOKENS)


@dataclass
class FakeWorker:
    """What the worker's half would have open, and what it may answer."""

    fetches: dict[int, int] = field(default_factory=dict)
    """Asks that are open: how many blocks they are of."""
    prompts: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    pushes: set[str] = field(default_factory=set)
    """Contexts that are pushed, or that no request with an answer names."""
    read_by_peer: set[str] = field(default_factory=set)
    """Contexts whose beginning a peer has read, and which are not pushed yet."""
    fills: list[str] = field(default_factory=list)
    asks: set[int] = field(default_factory=set)
    """All there ever were."""

    def carry_out(self, orders: TransferJobs) -> None:
        for abort in orders.aborts:
            self.pushes.discard(abort.context)
            self.read_by_peer.discard(abort.context)
        for fetch in orders.fetches:
            self._begin(fetch.ask)
            if fetch.keys:
                self.fetches[fetch.ask] = len(fetch.keys)
                if fetch.peer:
                    self.read_by_peer.add(fetch.context)
            else:
                self.prompts.add(fetch.ask)
                assert not fetch.context.startswith("foreign")
        for ask in orders.ends:
            assert ask in self.fetches or ask in self.prompts, "an ask was ended twice, or never was"
            self.fetches.pop(ask, None)
            self.prompts.discard(ask)
            self.unanswered.discard(ask)
        for stream in orders.streams:
            blocks = self.fetches.pop(stream.ask)
            assert 0 <= stream.skip < stream.skip + len(stream.block_ids) <= blocks * PER_FULL
            assert stream.ask not in self.unanswered
        for take in orders.fills:
            if take.ask in self.prompts:
                self.prompts.remove(take.ask)
            else:
                blocks = self.fetches.pop(take.ask)
                assert 0 <= take.skip < take.skip + len(take.block_ids) <= blocks * PER_FULL
            assert take.ask not in self.unanswered
            assert take.block_ids
            self.fills.append(take.request)
        for push in orders.pushes:
            assert push.context not in self.pushes, "pushed twice"
            assert len(push.keys) == -(-len(push.block_ids) // PER_FULL)
            self.pushes.add(push.context)
            self.read_by_peer.discard(push.context)
        late = {save.request for save in orders.saves}
        for request in orders.holds:
            assert request in late
        assert not orders.not_filled

    def _begin(self, ask: int) -> None:
        assert ask not in self.asks
        self.asks.add(ask)
        self.unanswered.add(ask)


@dataclass
class Life:
    """Where vLLM has a request."""

    request: Request
    stage: str = "waiting"
    """waiting, remote, running."""
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    unknown: int = 0
    """Tokens that planned steps sample."""


class Planning(RuleBasedStateMachine):
    """vLLM's side of it, in any order."""

    concurrent_steps = 1

    def __init__(self) -> None:
        super().__init__()
        self.planner = TransferPlanner(
            block_tokens=BLOCK_TOKENS,
            blocks_per_full=PER_FULL,
            max_saves=2,
            concurrent_steps=self.concurrent_steps,
        )
        self.worker = FakeWorker()
        self.lives: dict[str, Life] = {}
        self.numbers: Iterator[int] = count()
        self.saved: dict[str, int] = {}

    def pick(self, data: st.DataObject, *stages: str) -> Life | None:
        names = [name for name, life in self.lives.items() if life.stage in stages]
        return self.lives[data.draw(st.sampled_from(names))] if names else None

    @rule(
        tokens=LENGTHS,
        part=st.sampled_from(["whole", "prefill", "decode", "foreign"]),
        decode_reads=st.booleans(),
    )
    def add(self, tokens: int, part: str, decode_reads: bool) -> None:
        number = next(self.numbers)
        said: dict[str, Any] | None = None
        ids = prompt(number, tokens)
        if part == "prefill":
            said = to_prefill(f"t{number}", decode_reads=decode_reads)
        elif part != "whole":
            context = f"foreign {number}"
            if part == "decode":
                request = Request("", ids)
                whole = tokens // BLOCK_TOKENS
                last = request.block_hashes[whole - 1] if whole else b""
                context = context_name(f"t{number}", last, ids[whole * BLOCK_TOKENS :], tokens)
            said = {"do_remote_prefill": True, "transfer": f"t{number}", "context": context}
        life = Life(Request(f"r{number}", ids, said))
        self.lives[life.request.request_id] = life
        assert self.planner.arrived(life.request) is None

    @rule(data=st.data(), on_device=st.integers(0, 20), fits=st.booleans())
    def ask(self, data: st.DataObject, on_device: int, fits: bool) -> None:
        life = self.pick(data, "waiting")
        if life is not None:
            self.admit(life, min(on_device, (life.request.num_tokens - 1) // BLOCK_TOKENS), fits)

    def admit(self, life: Life, on_device: int, fits: bool) -> bool:
        """Whether it is known what it gets."""
        name, tokens = life.request.request_id, life.request.num_tokens
        local = on_device * BLOCK_TOKENS
        found = self.planner.ask(name, local)
        if found.tokens is None:
            return False
        assert 0 <= local + found.tokens <= tokens
        assert not found.is_async or found.tokens
        assert found.is_async or local + found.tokens < tokens, "nothing is left to compute"
        if fits:
            life.ids = list(range(1, 1 + -(-tokens // BLOCK_TOKENS)))
            self.planner.allocated(name, life.ids, found.tokens)
            life.computed = local + found.tokens
            life.stage = "remote" if found.is_async else "running"
        return True

    @rule(data=st.data(), chunk=st.integers(1, 200))
    def step(self, data: st.DataObject, chunk: int) -> None:
        step = {}
        for name, life in self.lives.items():
            if life.stage == "running" and data.draw(st.booleans()):
                self.learn(life, self.concurrent_steps - 1)
                known = life.request.num_tokens + life.unknown
                life.computed = min(life.computed + chunk, known)
                life.ids = list(range(1, 1 + -(-life.computed // BLOCK_TOKENS)))
                step[name] = life.computed
                life.unknown += life.computed == known
        self.planner.scheduled(step, lambda name: self.lives[name].ids)
        self.orders()
        if self.concurrent_steps == 1:
            for life in self.lives.values():
                self.learn(life, 0)

    @rule(data=st.data())
    def sampled(self, data: st.DataObject) -> None:
        """The results of a step are known."""
        life = self.pick(data, "running")
        if life is not None:
            self.learn(life, max(0, life.unknown - 1))

    def learn(self, life: Life, unknown: int) -> None:
        """All but the last ``unknown`` of a request's tokens are known."""
        while life.unknown > unknown:
            life.unknown -= 1
            life.request.output.append(1)

    def orders(self) -> None:
        orders = self.planner.take_jobs()
        for save in orders.saves:
            assert save.place <= self.saved.get(save.request, save.place), "a block was left out"
            self.saved[save.request] = max(self.saved.get(save.request, 0), save.place + 1)
            assert len(save.block_ids) == PER_FULL
            assert 0 not in save.block_ids
        for request in orders.holds:
            self.saved.pop(request, None)
        self.worker.carry_out(orders)

    @precondition(lambda self: self.worker.unanswered)
    @rule(data=st.data(), share=st.floats(0, 1))
    def answer(self, data: st.DataObject, share: float) -> None:
        ask = data.draw(st.sampled_from(sorted(self.worker.unanswered)))
        reports = TransferResults()
        if ask in self.worker.fetches:
            reports.ready[ask] = round(self.worker.fetches[ask] * share)
        else:
            reports.ready[ask] = round(6 * share)
        self.worker.unanswered.discard(ask)
        self.planner.take_results(reports)

    @rule(data=st.data(), good=st.integers(0, 5))
    def taken(self, data: st.DataObject, good: int) -> None:
        """A context has been copied, all of it or some."""
        if not self.worker.fills:
            return
        name = self.worker.fills.pop()
        life = self.lives.get(name)
        self.planner.filled(name)
        if life is None or life.stage != "remote":
            return
        life.computed = min(life.computed, life.request.num_tokens - 1, good * FULL_TOKENS)
        life.stage = "running" if life.computed else "waiting"
        if life.computed:
            self.planner.allocated(life.request.request_id, life.ids, 0)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        life = self.pick(data, "running")
        if life is not None:
            life.stage, life.computed = "waiting", 0
            self.learn(life, 0)  # steps that were planned end for it as well

    @rule(data=st.data(), place=st.integers(0, 5))
    def refuse_to_save(self, data: st.DataObject, place: int) -> None:
        if self.saved:
            name = data.draw(st.sampled_from(sorted(self.saved)))
            self.planner.take_results(TransferResults(stored={name: min(place, self.saved[name])}))
            self.saved[name] = min(place, self.saved[name])

    @rule(data=st.data(), well=st.booleans())
    def finish(self, data: st.DataObject, well: bool) -> None:
        life = self.pick(data, "waiting", "remote", "running")
        if life is None:
            return
        name = life.request.request_id
        hold, answer = self.planner.finished(name, well, life.ids)
        pushed = any(context.startswith(f"t{name[1:]}.") for context in self.worker.pushes)
        assert (answer is not None) == (pushed and well)
        filling = life.stage == "remote"
        assert hold or not filling, "its blocks are being filled"
        assert not (hold and (pushed or not well) and not filling), "nobody wants what is left"
        if well:
            self.worker.pushes = {one for one in self.worker.pushes if not one.startswith(f"t{name[1:]}.")}
        del self.lives[name]
        if not hold or filling:
            self.saved.pop(name, None)

    @rule()
    def fail(self) -> None:
        self.planner.abandon()

    @invariant()
    def whoever_waits_has_something_to_wait_for(self) -> None:
        waits = sum(entry.ask != 0 for entry in self.planner._entries.values())
        ordered = len(self.planner._orders.fetches)
        ended = len(self.planner._orders.ends) + len(
            self.planner._orders.streams + self.planner._orders.fills
        )
        assert waits == len(self.worker.fetches) + len(self.worker.prompts) + ordered - ended

    def teardown(self) -> None:
        """From anywhere: all get an answer in a few rounds, and once all have ended nothing is left."""
        for _ in range(2 * MAX_FETCHES + 2):
            self.orders()
            answers = {ask: self.worker.fetches.get(ask, 1) for ask in self.worker.unanswered}
            reports = TransferResults(ready=answers)
            self.worker.unanswered.clear()
            self.planner.take_results(reports)
            known = [self.admit(life, 0, True) for life in self.lives.values() if life.stage == "waiting"]
        assert all(known), "somebody waits for ever"
        for name in list(self.lives):
            self.planner.finished(name, False)
        self.orders()
        assert (len(self.planner), self.planner._asks) == (0, {})
        assert not self.worker.fetches
        assert not self.worker.prompts
        assert not self.worker.pushes
        assert not self.worker.read_by_peer


class PlanningAhead(Planning):
    """Steps are planned before the results of the step before them are known."""

    concurrent_steps = 2

    @invariant()
    def nothing_is_filled_in_the_step_that_computes_from_it(self) -> None:
        assert not self.planner._orders.streams


Planning.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
PlanningAhead.TestCase.settings = Planning.TestCase.settings
test_any_order = Planning.TestCase
test_any_order_of_steps_planned_ahead = PlanningAhead.TestCase
