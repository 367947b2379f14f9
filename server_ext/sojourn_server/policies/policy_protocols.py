"""The reasons of decisions, and decisions that several modules share.

Each question of a preset has a base class in the module of its policies. An instance of the base class is a
policy too: mostly one that leaves the decision to the engine. A policy computes a decision from a frozen view
and ``now``, engine time in seconds on the engine's monotonic clock. It reads no clock, does no I/O and knows
no engine, so the same object runs in vLLM and in the simulator. Policies do not raise.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class DecisionReason(str, Enum):
    """Why a decision was made. The decision log records the reason."""

    NO_TOOL_CALL = "no_tool_call"
    FINAL_TURN = "final_turn"
    COLD_START = "cold_start"
    ALL_TOOLS = "all_tools"
    THIS_TOOL = "this_tool"
    FIXED = "fixed"
    LEAST_WASTE = "least_waste"
    HINTED = "hinted"
    NOT_WORTH_IT = "not_worth_it"
    OVER_BUDGET = "over_budget"
    POLICY_OFF = "policy_off"
    NOTHING_CACHED = "nothing_cached"
    # results of a prefetch
    IN_PLACE = "in_place"
    NO_TIER = "no_tier"
    IN_HOST = "in_host"
    FROM_DISK = "from_disk"
    TO_DEVICE = "to_device"
    # ends of a lease
    TTL = "ttl"
    RETURN = "return"
    END = "end"
    SILENT = "silent"
    PRESSURE = "pressure"
    RESET = "reset"
    SUPERSEDED = "superseded"
    SWITCHED_OFF = "switched_off"
    """The operator switched the policy off."""
    PLACED = "placed"
    """The placement policy has decided that the program's KV belongs in another tier."""


class EndedKvHandling(str, Enum):
    """What happens to the KV of a program that has ended."""

    REUSED_FIRST = "reused-first"
    """Blocks that only this program used are evicted first, since no other request is expected to need
    them."""
    LEFT = "left"
    """The blocks stay cached in the ordinary eviction order, as in an engine without end-of-program hints."""


class RetentionDecision(NamedTuple):
    """How long to keep a turn's KV. ``ttl_s`` 0 grants no lease."""

    ttl_s: float
    reason: DecisionReason


class PredictionSource(str, Enum):
    """The source of a prediction."""

    HINTS = "hints"
    """Declared by the client: a graph and the present node, the number of steps left, or a tool call."""
    INFERRED = "inferred"
    """Inferred from earlier programs of this agent type."""
    COLD = "cold"
    """Nothing is known about the program's workflow."""


class NextStepPrediction(NamedTuple):
    """A prediction of what follows a turn, and its source."""

    source: PredictionSource
    continuation_probability: float | None
    """Probability that another turn follows; ``None``: unknown."""
    successor: str | None = None
    """The most likely next workflow step; ``None``: unknown, or not likely enough to act on."""
    successors: tuple[tuple[str, float], ...] = ()
    """Possible next steps with their probabilities, as declared or inferred; empty: unknown."""
