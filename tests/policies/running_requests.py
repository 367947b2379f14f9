"""Running requests, and the blocks that they will need, said naively."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from hypothesis import strategies as st
from sojourn_server.policies.policy_views import RunningRequestView

_lives = st.lists(st.integers(1, 3000).map(float), min_size=1, max_size=8).map(sorted).map(tuple)
_requests = st.builds(
    RunningRequestView, st.just(""), st.integers(1, 4), st.just(0), st.integers(0, 20),
    attained_s=st.floats(0, 100), ran_s=st.floats(0, 100),
    context_tokens=st.integers(1, 2000), output_tokens=st.integers(0, 2000), remaining=st.none() | _lives,
    preemptions=st.integers(0, 4), stayed_tokens=st.integers(0, 130), recover_s=st.floats(0, 5),
    of_program=st.booleans(), shared_blocks=st.integers(0, 20),
).map(lambda view: view._replace(blocks=max(view.blocks, view.shared_blocks)))  # fmt: skip
request_sets = st.lists(_requests, min_size=1, max_size=6).map(
    lambda views: [view._replace(request_id=f"r{at}", position=at) for at, view in enumerate(views)]
)


def needed_at(running: Iterable[RunningRequestView], block_size: int, step: float) -> Fraction:
    """Return the blocks needed after ``step`` steps, on average over what each request may yet write."""
    tokens = Fraction(0)
    for view in running:
        present = view.context_tokens + Fraction(block_size, 2)
        if not view.remaining:
            tokens += present
        else:
            lives = [present + Fraction(step) for left in view.remaining if left > step]
            tokens += sum(lives, Fraction(0)) / len(view.remaining)
    return tokens / block_size
