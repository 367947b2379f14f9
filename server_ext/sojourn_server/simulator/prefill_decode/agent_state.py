"""An agent in the cluster: the turn that it is at, and where that has got to."""

from __future__ import annotations

from sojourn_server.policies.prefill_decode.prefill_decode_views import PdRequest

from .trajectories import Trajectory


class AgentState:
    """One for each agent, from its first turn to its last; written by whoever has it at the moment.

    What is not set yet of a turn is that of the turn before, or missing. Times are virtual seconds.
    """

    __slots__ = (
        "agent", "cached", "cached_before", "decode", "decode_blocks", "decoded_from_s", "first_token_s",
        "output_tokens", "parts", "prefill_blocks", "request", "second_token_s", "submitted_s", "todo",
        "trajectory", "turn", "worker",
    )  # fmt: skip

    request: PdRequest
    output_tokens: int
    cached: int
    """Prompt tokens whose KV there is: now, and from storage."""
    cached_before: int
    todo: int
    """Prompt tokens that are left to compute."""
    submitted_s: float
    first_token_s: float
    second_token_s: float
    decoded_from_s: float
    worker: int
    """Its prefill device."""
    decode: int
    prefill_blocks: int
    """That the prefill device's node reads."""
    decode_blocks: int
    parts: int
    """Reads that are still under way."""

    def __init__(self, agent: int, trajectory: Trajectory) -> None:
        self.agent = agent
        self.trajectory = trajectory
        self.turn = 0
        """Of the trajectory."""
