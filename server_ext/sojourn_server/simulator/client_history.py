"""What the clients of a run have learned of their own programs, as the SDK on one machine does.

It is the SDK's own learning: an agent that is a loop has one node, and a client
expects as many further turns as programs of its kind had left at that turn.
Programs that still run teach nothing, so it holds the past only.
"""

from __future__ import annotations

from sojourn.learning.run_trace import MAX_PATH, MAX_TURNS, ProgramRun
from sojourn.learning.transitions import Transitions

AGENT_NODE = "agent"
"""The one node of an agent that calls the model and its tools in turn."""


class ClientHistory:
    """Shared by all clients of one run."""

    def __init__(self) -> None:
        self._transitions = Transitions()

    def steps_left(self, agent_type: str, turn: int) -> float | None:
        """Turns expected after the ``turn``-th, from 1 on; ``None`` where too few programs have ended."""
        return self._transitions.turns_left(agent_type, turns=turn, node=AGENT_NODE)

    def over(self, agent_type: str, turns: int) -> None:
        """A program has ended after so many turns."""
        self._transitions.learn(
            agent_type,
            ProgramRun(
                path=((AGENT_NODE,),) * min(turns, MAX_PATH),
                turn_nodes=(AGENT_NODE,) * min(turns, MAX_TURNS),
                turns=turns,
            ),
        )
