"""Programs that go through a gateway: where each is at home, how large it will become, what is left of it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...policy.remaining import LengthView, RemainingPolicy, Survival
from ...program.history import SlidingMean
from ...program.output_lengths import OutputLengths

Key = tuple[str, str]
"""Tenant and program id: another tenant's program of the same id is another program."""

LEAST_ENDED = 16
"""Programs of a kind that have to have ended before their peaks are trusted to tell others'."""
MEAN_OF = 256
"""Newest programs or turns that a mean is taken of."""
MOST_KINDS = 512
EXPECTED_VERSION = 1
"""Version of the documents that ``Expectations`` writes and reads."""


@dataclass(slots=True)
class Program:
    """One of them. Sizes in tokens."""

    key: Key
    agent_type: str | None
    parent: Key | None
    began_s: float
    last_s: float
    deadline_s: float | None = None
    home: str | None = None
    """Replica that its turns go to."""
    cached: bool = False
    """Nothing says that its KV is no longer there."""
    context_tokens: int = 0
    """Of its longest turn so far."""
    size_tokens: int = 0
    """What it counts for at its home."""
    turns: int = 0
    in_flight: int = 0
    waiting: int = 0
    moves: int = 0
    moved_at_turn: int = -1
    """The turn it moved before; it stays until that is over."""
    turns_left: float | None = None
    """Expected as of its last turn, where the routing asks for it; ``None``: nothing is known of its kind."""

    @property
    def tenant(self) -> str:
        """Who is charged."""
        return self.key[0]


class Programs:
    """Those that are alive, the one longest silent first. Beyond ``most`` whoever's tenant has most of them
    loses the one longest silent: nobody has another tenant's forgotten."""

    def __init__(self, most: int = 200_000) -> None:
        self._most = most
        self._programs: OrderedDict[Key, Program] = OrderedDict()
        self._of: dict[str, OrderedDict[Key, Program]] = {}
        """The same by tenant."""

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def get(self, key: Key | None) -> Program | None:
        """By its key."""
        return self._programs.get(key) if key is not None else None

    def heard(
        self, key: Key, agent_type: str | None, parent_id: str | None, now: float
    ) -> tuple[Program, Program | None]:
        """The program that a request is of, new or known; and one that is forgotten for it."""
        program = self._programs.get(key)
        if program is not None:
            self.touched(program, now)
            return program, None
        parent = (key[0], parent_id) if parent_id else None
        program = Program(key, agent_type, parent, now, now)
        self.add(program)
        forgotten = self._oldest_idle(program) if len(self._programs) > self._most else None
        if forgotten is not None:
            self.ended(forgotten.key)
        return program, forgotten

    def _oldest_idle(self, but: Program) -> Program | None:
        """Of the tenant that has most; where all of that one's have requests, of the next."""
        for of_tenant in sorted(self._of.values(), key=len, reverse=True):
            for program in of_tenant.values():
                if not program.in_flight and not program.waiting and program is not but:
                    return program
        return None

    def add(self, program: Program) -> None:
        """One that another core knew; said of all, those first that were silent for longest."""
        self._programs[program.key] = program
        self._of.setdefault(program.tenant, OrderedDict())[program.key] = program

    def touched(self, program: Program, now: float) -> None:
        """Something was heard of one that is here."""
        program.last_s = now
        for programs in (self._programs, self._of[program.tenant]):
            programs.move_to_end(program.key)

    def ended(self, key: Key) -> Program | None:
        """Take one out."""
        program = self._programs.pop(key, None)
        if program is not None:
            of_tenant = self._of[key[0]]
            del of_tenant[key]
            if not of_tenant:
                del self._of[key[0]]
        return program

    def silent_since(self, before_s: float) -> list[Program]:
        """Those that nothing was heard of since then and that have no request anywhere."""
        found = []
        for program in self._programs.values():
            if program.last_s >= before_s:
                break
            if not program.in_flight and not program.waiting:
                found.append(program)
        return found


class Expectations:
    """What programs of a kind came to: their longest contexts, turns, and seconds a turn took.

    ``quantile``: how sure it is to be that a program does not outgrow its size.
    """

    def __init__(self, quantile: float = 0.5, predictor: RemainingPolicy | None = None) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; expected between 0 and 1")
        self._quantile = quantile
        self._predictor = predictor or Survival(min_outputs=LEAST_ENDED, hints=False)
        self._peaks = OutputLengths()
        self._turns = OutputLengths()
        self._turn_s: OrderedDict[str | None, SlidingMean] = OrderedDict()
        self._life_s: OrderedDict[str | None, SlidingMean] = OrderedDict()

    def ended(self, program: Program, now: float) -> None:
        """A program came to its end."""
        if program.turns:
            self._peaks.observe(program.agent_type, None, max(1, program.context_tokens))
            self._turns.observe(program.agent_type, None, program.turns)
            _note(self._life_s, program.agent_type, now - program.began_s)

    def turn_took(self, program: Program, seconds: float) -> None:
        """A turn was answered ``seconds`` after it was sent."""
        _note(self._turn_s, program.agent_type, seconds)

    def size_tokens(self, program: Program, context_tokens: int, most_tokens: int) -> int:
        """The longest context that a program is expected to come to, at least the one it has."""
        left = self._left(
            self._peaks, program.agent_type, context_tokens, max(1, most_tokens - context_tokens)
        )
        return context_tokens + (round(left) if left is not None else 0)

    def turns_left(self, program: Program) -> float | None:
        """Turns that it has yet to have; ``None`` where nothing is known, as of one whose client does not say
        what kind it is: it may not say when it is over either."""
        if program.agent_type is None:
            return None
        return self._left(self._turns, program.agent_type, program.turns, 10_000)

    def work_s(self, program: Program) -> float:
        """Seconds of a replica's time that it has yet to need; 0 where nothing is known."""
        turns = self._left(self._turns, program.agent_type, program.turns, 10_000)
        return (turns or 1.0) * (_mean(self._turn_s, program.agent_type) or 0.0)

    def life_s(self, program: Program) -> float | None:
        """Seconds from a program's first request to its end, of those of its kind; ``None``: not known."""
        return _mean(self._life_s, program.agent_type)

    def snapshot(self) -> dict[str, Any]:
        """All of it as a JSON-able document."""
        return {
            "version": EXPECTED_VERSION,
            "peaks": self._peaks.snapshot(),
            "turns": self._turns.snapshot(),
            "turn_s": [[kind, mean.values()] for kind, mean in self._turn_s.items()],
            "life_s": [[kind, mean.values()] for kind, mean in self._life_s.items()],
        }

    def restore(self, document: Any) -> None:
        """Take in what a ``snapshot`` was taken of, in place of what is known. Raises ``ValueError`` for
        anything else."""
        if not isinstance(document, Mapping) or document.get("version") != EXPECTED_VERSION:
            raise ValueError(f"expectations: expected a document of version {EXPECTED_VERSION}")
        peaks = OutputLengths.restore(document.get("peaks"))
        turns = OutputLengths.restore(document.get("turns"))
        turn_s, life_s = _read_means(document.get("turn_s")), _read_means(document.get("life_s"))
        self._peaks, self._turns, self._turn_s, self._life_s = peaks, turns, turn_s, life_s

    def _left(self, lengths: OutputLengths, kind: str | None, so_far: int, most: int) -> float | None:
        known = lengths.known(kind, None, LEAST_ENDED)
        left = self._predictor.remaining(LengthView("", so_far, most, known, None, None), 0.0)
        return left[min(len(left) - 1, math.floor(len(left) * self._quantile))] if left else None


def _note(means: OrderedDict[str | None, SlidingMean], kind: str | None, value: float) -> None:
    for each in {kind, None}:
        mean = means.get(each)
        if mean is None:
            mean = means[each] = SlidingMean(MEAN_OF)
            if len(means) > MOST_KINDS:
                means.popitem(last=False)
        mean.observe(max(0.0, value))


def _mean(means: OrderedDict[str | None, SlidingMean], kind: str | None) -> float | None:
    mean = means.get(kind) or means.get(None)
    return mean.mean() if mean is not None else None


def _read_means(entries: Any) -> OrderedDict[str | None, SlidingMean]:
    if not isinstance(entries, list):
        raise ValueError(f"expectations: {entries!r}; expected a list of kinds and seconds")
    means: OrderedDict[str | None, SlidingMean] = OrderedDict()
    for entry in entries[-MOST_KINDS:]:
        match entry:
            case [str() | None as kind, list(values)]:
                mean = means[kind] = SlidingMean(MEAN_OF)
                for value in values:
                    if not isinstance(value, (int, float)) or isinstance(value, bool):
                        raise ValueError(f"expectations: {value!r} of {kind!r}; expected seconds")
                    mean.observe(value)
            case _:
                raise ValueError(f"expectations: {entry!r}; expected a kind and its seconds")
    return means
