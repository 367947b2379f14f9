"""What the planner knows of one request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

MAX_TRANSFER_BYTES = 200
"""The wire's bound on names, less what ``context_name`` adds."""
MAX_CONTEXT_BYTES = MAX_TRANSFER_BYTES + 33


class TransferRole(Enum):
    """What an engine has to do with a request."""

    WHOLE = "whole"
    """All of it: no other engine is involved."""
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParams:
    """What a request says, checked."""

    part: TransferRole = TransferRole.WHOLE
    transfer: str = ""
    peer: str = ""
    decode_share: float = 0.0
    epoch: str | None = None
    context: str = ""
    stored: int = 0


WHOLE_REQUEST = TransferParams()


def parse_transfer_params(given: Mapping[str, Any] | None) -> TransferParams:
    """Raises ``ValueError``, which says what is wrong and what was expected."""
    given = given or {}
    prefill, decode = given.get("do_remote_decode"), given.get("do_remote_prefill")
    for name, value in (("do_remote_decode", prefill), ("do_remote_prefill", decode)):
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected true or false")
    if prefill and decode:
        raise ValueError("do_remote_decode and do_remote_prefill are both set; an engine does one of them")
    if not prefill and not decode:
        return WHOLE_REQUEST
    transfer = _text(given, "transfer", MAX_TRANSFER_BYTES)
    epoch = _text(given, "epoch", MAX_TRANSFER_BYTES) if given.get("epoch") is not None else None
    if decode:
        stored = given.get("stored", 0)
        if not isinstance(stored, int) or isinstance(stored, bool) or stored < 0:
            raise ValueError(f"stored is {stored!r}; expected a number of blocks")
        context = _text(given, "context", MAX_CONTEXT_BYTES)
        return TransferParams(
            part=TransferRole.DECODE, transfer=transfer, epoch=epoch, context=context, stored=stored
        )
    share = given.get("decode_share", 0.0)
    if not isinstance(share, int | float) or isinstance(share, bool) or not math.isfinite(share):
        raise ValueError(f"decode_share is {share!r}; expected a number from 0 to 1")
    if not 0 <= share <= 1:
        raise ValueError(f"decode_share is {share!r}; expected 0 to 1")
    peer = _text(given, "peer", 4096)
    return TransferParams(
        part=TransferRole.PREFILL, transfer=transfer, peer=peer, decode_share=float(share), epoch=epoch
    )


def transfer_answer_params(params: TransferParams, context: str, stored: int) -> dict[str, Any]:
    """What the prefill engine answers."""
    answer: dict[str, Any] = {
        "do_remote_prefill": True,
        "transfer": params.transfer,
        "context": context,
        "stored": stored,
    }
    if params.epoch is not None:
        answer["epoch"] = params.epoch
    return answer


def context_name(transfer: str, last_key: bytes, tail: Sequence[int], tokens: int) -> str:
    """The name under which a prompt goes from engine to engine: other prompts have other names.

    ``last_key`` is the chain hash of its last whole engine block, which tells all tokens up to there, and
    ``tail`` the tokens behind it.
    """
    text = f"{last_key.hex()} {','.join(map(str, tail))} {tokens}"
    return f"{transfer}.{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def tail_key(context: str) -> bytes:
    """The key of a prompt's last Full Block where that is not full: nobody else has it, and no store."""
    return hashlib.blake2b(f"tail of {context}".encode(), digest_size=32).digest()


def _text(given: Mapping[str, Any], name: str, max_bytes: int) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value or len(value.encode(errors="replace")) > max_bytes:
        raise ValueError(f"{name} is {value!r:.80}; expected a text of at most {max_bytes} bytes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is no text that can be sent") from None
    return value


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
