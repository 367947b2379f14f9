"""Small random access logs that a real run could have recorded. They fit their pool at every moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st
from sojourn_server.simulator.limits.block_accesses import AccessLog, BlockAccess, BlockAccessKind


@dataclass
class _Request:
    number: int
    program: int
    prompt: int
    """Full blocks of the prompt."""
    length: int
    """Full blocks at the request's end."""
    held: int = 0
    full: int = 0
    waits: bool = True


@dataclass
class _Run:
    rng: Random
    log: AccessLog
    ids: dict[tuple[int, int], int] = field(default_factory=dict)
    contexts: list[list[int]] = field(default_factory=list)
    requests: dict[int, _Request] = field(default_factory=dict)
    """Request of each busy program."""

    def chain(self, program: int) -> list[int]:
        chain = self.contexts[program]
        if self.rng.random() < 0.3:
            chain = chain[: self.rng.randrange(len(chain) + 1)]
        for _ in range(self.rng.randrange(0 if chain else 1, 3)):
            parent = chain[-1] if chain else -1
            chain = [*chain, self.ids.setdefault((parent, self.rng.randrange(2)), len(self.ids))]
        return chain[: self.log.pool_blocks - 1]

    def submit(self, program: int) -> None:
        chain = self.contexts[program] = self.chain(program)
        prompt = self.rng.randrange(max(1, len(chain) - 2), len(chain) + 1)
        self.log.chains.append(chain)
        self.log.prompt_blocks.append(prompt - (self.rng.random() < 0.2))
        self.log.owners.append(f"p{program}")
        self.requests[program] = _Request(len(self.log.chains) - 1, program, prompt, len(chain))

    def note(self, kind: BlockAccessKind, request: _Request) -> None:
        held, full = (0, 0) if kind == BlockAccessKind.FREE else (request.held, request.full)
        self.log.accesses.append(BlockAccess(kind, request.number, held, full))

    def move(self, request: _Request) -> None:
        """Admit the request, let it continue, finish it, preempt it or abort it."""
        if not request.waits and request.full >= request.length:
            self.note(BlockAccessKind.FREE, request)
            del self.requests[request.program]
            return
        if not request.waits and self.rng.random() < 0.1:
            self.note(BlockAccessKind.FREE, request)
            request.waits, request.held, request.full = True, 0, 0
            if self.rng.random() < 0.3:
                del self.requests[request.program]
            return
        prefill = request.held < request.prompt
        more = self.rng.randrange(1, max(2, request.prompt)) if prefill else 1
        held = min(request.held + more, request.length + 1)
        room = self.log.pool_blocks - sum(other.held for other in self.requests.values())
        if held - request.held > room:
            if not request.waits and self.rng.random() < 0.5:
                self.note(BlockAccessKind.FREE, request)
                request.waits, request.held, request.full = True, 0, 0
            return
        kind = BlockAccessKind.ADMIT if request.waits else BlockAccessKind.GROW
        full = min(held - (self.rng.random() < 0.4), request.length)
        request.waits, request.held, request.full = False, held, max(request.full, full)
        self.note(kind, request)


def random_log(rng: Random, *, pool: int, programs: int, moves: int) -> AccessLog:
    run = _Run(rng, AccessLog(pool_blocks=pool, block_size=4), contexts=[[] for _ in range(programs)])
    for _ in range(moves):
        program = rng.randrange(programs)
        if program not in run.requests:
            run.submit(program)
        run.move(run.requests[program])
    return run.log


def access_logs(*, pool: int, programs: int, moves: int) -> st.SearchStrategy[AccessLog]:
    """Strategy for logs of at most these sizes."""
    return st.builds(
        random_log,
        st.integers(0, 2**32).map(Random),  # drawing each number from hypothesis takes ten times as long
        pool=st.integers(2, pool),
        programs=st.integers(1, programs),
        moves=st.integers(1, moves),
    )
