"""Preserve, swap or discard, whichever wastes least memory: InferCept (arXiv 2402.01869)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Keep, Reason
from .views import TurnView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWaste:
    """Keep a context while keeping it wastes less than letting it go would.

    Waste is memory times seconds. With C the context, C' the tokens of the
    requests that run beside it and M bytes a token (§3.2, §4.1–4.3):

        preserve  T · C · M
        discard   T_fwd(C) · C · M / 2  +  n · T_fwd(C / n) · C' · M     computed again in n pieces
        swap      T_swap(C) · C · M                                      copied back beside the others' work

    T, how long the tool will take, is estimated by how long it has taken so far
    (§4.4). So every context is preserved at first, and let go at the moment at
    which T · C · M exceeds the cheaper of the others: that moment is the
    time-to-live. C' is looked at once, when the turn ends; the paper looks again
    at every step.

    Swap is what the paper's pipelining leaves of it, and how Continuum §6.1
    reckons its InferCept over a non-blocking host cache: nobody else is held
    up, and the memory it comes back to is idle during the copy. It counts only
    where a host tier holds what the device lets go, and stands for a swap of
    the whole context: a budget of tokens a step, and contexts of which a part
    is swapped, are left out. ``max_ttl_s`` is ours, the paper has no bound.
    """

    max_ttl_s: float = 300.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_ttl_s) and self.max_ttl_s >= 0):
            raise ValueError(f"max_ttl_s is {self.max_ttl_s}; expected finite seconds ≥ 0")

    def keep(self, turn: TurnView, now: float) -> Keep:
        if turn.tool is None:
            return Keep(0.0, Reason.NO_TOOL_CALL)
        others = turn.running_tokens / max(1, turn.context_tokens)
        worth_s = turn.reload_s / 2 + turn.chunked_reload_s * others
        if turn.host_reload_s is not None:
            worth_s = min(worth_s, turn.host_reload_s)
        if worth_s <= 0.0:
            return Keep(0.0, Reason.NOT_WORTH_IT)
        return Keep(min(worth_s, self.max_ttl_s), Reason.LEAST_WASTE)
