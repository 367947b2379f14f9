"""Selection of the prefill engine that computes a prompt (DualPath §6.1; mechanism D4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .storage_read_queues import StorageReadQueues

SPEED_WINDOW_S = 60.0
"""Seconds of engines' work over which their speed is averaged, with exponential weights."""
MIN_SPEED_S = 1.0
"""The speed counts as known after this many seconds of engines' work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSelectionLimits:
    """Limits for the selection, the paper's α and β.

    In the paper, both limits are token counts: α is what a node reads within a fixed time, and β what an
    engine computes within a fixed time. Both times are illegible in the text available to us; router and
    simulator use 3 s and 5 s. Here α is the time itself, since nodes may differ in speed. β is a token count,
    a time, or both (then the lower limit applies). The measured speed of the engines converts the time to
    tokens. Raises ``ValueError`` for limits < 0, and for ``most_tokens_s`` of 0.
    """

    short_queue_s: float = 3.0
    """α: engines on nodes whose storage NIC has a longer read queue are chosen last."""
    most_tokens: float = math.inf
    """β: an engine with more unfinished tokens gets no new request. ``inf``, the default: no limit."""
    most_tokens_s: float = math.inf
    """β as seconds of an engine's computation. This limit does not apply until the engines' speed is
    known."""

    def __post_init__(self) -> None:
        if not (self.short_queue_s >= 0 and self.most_tokens >= 0 and self.most_tokens_s > 0):
            raise ValueError(
                f"short_queue_s is {self.short_queue_s}, expected seconds ≥ 0; most_tokens is "
                f"{self.most_tokens}, expected ≥ 0; most_tokens_s is {self.most_tokens_s}, "
                "expected seconds > 0"
            )


class PrefillSpeed:
    """The mean number of prompt tokens that a prefill engine finishes per second while it has requests.

    Tokens that are read from storage count like computed tokens, both here and in an engine's unfinished
    tokens. The end of a request takes effect at the next call to ``advance``.
    """

    def __init__(self) -> None:
        self._unfinished: dict[int, int] = {}
        """Engine → number of its requests. Engines without requests are absent."""
        self._since_s: dict[int, float] = {}
        """Engine → time up to which its work is counted."""
        self._done: list[tuple[int, int]] = []
        """(engine, prompt tokens) of each request that left since ``advance``; 0 tokens if not computed."""
        self._work_s = self._tokens = 0.0

    def begin(self, engine: int, now: float) -> None:
        """Record that an engine got a request."""
        if not self._unfinished.get(engine):
            self._since_s[engine] = now
        self._unfinished[engine] = self._unfinished.get(engine, 0) + 1

    def end(self, engine: int, tokens: int) -> None:
        """Record that a request left an engine. ``tokens``: length of the request's prompt; 0 if the prompt
        was not computed."""
        self._done.append((engine, tokens))

    def advance(self, now: float) -> None:
        """Count the requests that ended since the last call."""
        for engine, tokens in self._done:
            since_s = self._since_s.get(engine)
            if since_s is None:
                continue
            spent_s = max(0.0, now - since_s)
            kept = max(0.0, 1.0 - spent_s / SPEED_WINDOW_S)
            self._work_s = self._work_s * kept + spent_s
            self._tokens = self._tokens * kept + tokens
            self._since_s[engine] = now
            self._unfinished[engine] -= 1
            if not self._unfinished[engine]:
                del self._unfinished[engine], self._since_s[engine]
        self._done.clear()

    @property
    def tokens_per_s(self) -> float | None:
        """Mean tokens per second of work; ``None``: unknown."""
        return self._tokens / self._work_s if self._work_s >= MIN_SPEED_S and self._tokens else None


@dataclass(slots=True, eq=False)
class PrefillEngine:
    """A prefill engine and its load."""

    number: int
    node: int
    tokens: int = 0
    """Prompt tokens of the requests that are assigned to the engine and not prefilled yet."""
    is_suspended: bool = False


class PrefillEngineSelector:
    """Chooses the prefill engine for each request.

    Of the engines with at most β unfinished tokens, those on nodes with a read queue of at most α seconds are
    preferred. Of these, the engine with the fewest tokens is chosen. Ties go to the lowest number. If no
    engine has at most β tokens, the request waits. ``PrefillSelectionLimits`` defines α and β.
    """

    def __init__(self, limits: PrefillSelectionLimits, queues: StorageReadQueues) -> None:
        self._limits = limits
        self.most_tokens = limits.most_tokens
        """β in tokens, at present."""
        self._queues = queues
        self.engines: dict[int, PrefillEngine] = {}

    def add(self, number: int, node: int) -> None:
        """Add an engine without requests on a known node. Raises ``KeyError`` for an unknown node."""
        self._queues.block_s(node)
        self.engines[number] = PrefillEngine(number, node)

    def available(self) -> list[PrefillEngine]:
        """Return all engines that are not suspended."""
        return [engine for engine in self.engines.values() if not engine.is_suspended]

    def choose(self, now: float) -> int | None:
        """Return the number of the engine for the next request; ``None``: the request must wait. The caller
        records the choice with ``assign``."""
        busy_until_s, most, short_s = self._queues.busy_until_s, self.most_tokens, self._limits.short_queue_s
        best: tuple[bool, int, int] | None = None
        for engine in self.engines.values():
            if not engine.is_suspended and engine.tokens <= most:
                rank = (busy_until_s[engine.node] - short_s > now, engine.tokens, engine.number)
                if best is None or rank < best:
                    best = rank
        return best[2] if best is not None else None

    def assign(self, number: int, tokens: int) -> None:
        """Count a new request of ``tokens`` prompt tokens on an engine."""
        self.engines[number].tokens += tokens

    def finish(self, number: int, tokens: int) -> None:
        """Stop counting a request on the engine ``number``: it was prefilled or cancelled. ``tokens``: length
        of its prompt. No effect if the engine was removed."""
        engine = self.engines.get(number)
        if engine is not None:
            engine.tokens -= tokens
