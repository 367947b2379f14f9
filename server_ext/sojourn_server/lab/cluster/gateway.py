"""The gateway's routing core as the lab's clients meet it: what happens to them, as facts."""

from __future__ import annotations

from collections.abc import Sequence

from ...gateway.core import facts
from ...gateway.core.facts import AnyAction
from ...gateway.core.from_preset import core_of
from ...gateway.core.limits import CoreLimits
from ...gateway.core.programs import Program
from ...policy.cluster_preset import ClusterPreset
from ..bare_engine import BareEngineOptions
from ..door import DoorRequest
from ..policies import NEVER_S

TENANT = "lab"
"""On whose behalf programs run of which the workload does not say it."""
EPOCH_S = 0.1
"""How often a core that steals, or gives out shares, is told that time goes by (SAGA §5.2, §6.2)."""
PREFIX_PIECE_TOKENS = 256
"""Of a prompt, what one hash of its beginning is of."""
MOST_WAITING = 1_000_000


class Gateway:
    """One routing core. Nobody is refused for want of room or patience, as no baseline refuses anybody."""

    def __init__(self, preset: ClusterPreset) -> None:
        self.core = core_of(
            preset,
            CoreLimits(most_waiting=MOST_WAITING, wait_s=NEVER_S, lease_s=NEVER_S, silent_program_s=NEVER_S),
        )
        needs_time = preset.stealing.steals or preset.sharing.shares_out or preset.yielding.yields
        self.tick_s = EPOCH_S if needs_time else float("inf")
        self.reads_prefixes = preset.routing.reads_prefixes

    def saw(self, agent_type: str, turns: int, tokens: int, took_s: float, tools_s: float) -> None:
        """A program has ended before the run begins: its turns, its longest context, and the seconds that it
        took, with its tools and these alone."""
        program = Program((TENANT, ""), agent_type, None, 0.0, took_s, context_tokens=tokens, turns=turns)
        self.core.expected.turn_took(program, (took_s - tools_s) / turns)
        self.core.expected.ended(program, took_s)

    def seen(self, replica: str, options: BareEngineOptions, now: float) -> list[AnyAction]:
        """An engine says that it is there."""
        size = options.block_size
        return self.core.take(
            facts.ReplicaSeen(
                replica,
                "1",
                (options.blocks - 1) * size,
                host_tokens=(options.host_blocks + options.disk_blocks) * size,
                max_running=options.max_num_seqs,
                max_context_tokens=options.max_model_len,
            ),
            now,
        )

    def asked(
        self,
        request: DoorRequest,
        *,
        parent_id: str | None,
        agent_type: str,
        tenant: str | None,
        deadline_s: float | None,
        prefix: tuple[int, ...],
        now: float,
    ) -> list[AnyAction]:
        """A request has come. ``deadline_s`` is its program's, on the run's clock."""
        return self.core.take(
            facts.Asked(
                request.request_id,
                tenant or TENANT,
                request.prompt_tokens,
                program_id=request.program_id,
                parent_id=parent_id,
                agent_type=agent_type,
                deadline_s=deadline_s,
                prefix=prefix,
                exact=True,
            ),
            now,
        )

    def began(self, request_id: str, replica: str, now: float) -> list[AnyAction]:
        """Its first token is there."""
        return self.core.take(facts.Began(request_id, replica), now)

    def ended(self, request_id: str, replica: str, output_tokens: int, now: float) -> list[AnyAction]:
        """It is answered."""
        return self.core.take(facts.Ended(request_id, output_tokens, replica), now)

    def program_over(self, program_id: str, tenant: str | None, now: float) -> list[AnyAction]:
        """Its client says so. All clients do: a gateway is told what a server with hints is."""
        return self.core.take(facts.ProgramEnded(program_id, tenant or TENANT), now)

    def tick(self, now: float) -> list[AnyAction]:
        """Time has gone by."""
        return self.core.take(facts.Tick(), now)


def prefix_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Chained hashes of a prompt's pieces; the last, shorter one is left out."""
    chain = 0
    found = []
    for start in range(0, len(prompt) - PREFIX_PIECE_TOKENS + 1, PREFIX_PIECE_TOKENS):
        chain = hash((chain, *prompt[start : start + PREFIX_PIECE_TOKENS]))
        found.append(chain)
    return tuple(found)
