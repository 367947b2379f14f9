"""What the planner knows of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from .transfer_params import TransferParams


class RequestView(Protocol):
    """A request, as far as the planner looks at it: what vLLM's has."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Of prompt and output, so far."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chain hashes of its engine blocks that are full."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class TransferPhase(Enum):
    """What a request does."""

    NEW = "new"
    FETCHING = "fetching"
    EXPECTING = "expecting"
    READY = "ready"
    """What it waited for is here, and it waits for blocks."""
    TAKING = "taking"
    """Its blocks are being filled beside the computing."""
    RUNNING = "running"


WAITING_PHASES = (TransferPhase.FETCHING, TransferPhase.EXPECTING)


@dataclass(slots=True, eq=False)
class TransferRequest:
    """What is known of one request."""

    view: RequestView
    params: TransferParams
    context: str = ""
    phase: TransferPhase = TransferPhase.NEW
    ask: int = 0
    """Of phases that wait or are ready."""
    first: int = 0
    """Full Block at which what is fetched begins."""
    blocks: int = 0
    """Full Blocks that are ready."""
    is_prompt: bool = False
    """What is ready was pushed here, and not fetched."""
    fetches: int = 0
    """In a row."""
    waits_for_prompt: bool = False
    """A context is pushed here that was not asked for yet."""
    pushed: bool = False
    saved: int = 0
    """Leading Full Blocks of which nothing is to be stored any more."""
    stored: int = 0
    """Leading Full Blocks that were found in the store."""
    sure: int = 0
    """What ``saved`` was before the last step: of that step's blocks it is not known yet whether they were
    taken."""
    computed: int = 0
    """Tokens of it whose KV is in its blocks when the last planned step is over."""

    @property
    def has_context_mismatch(self) -> bool:
        """The context that it was told of is of other tokens than its own."""
        return self.context != self.params.context
