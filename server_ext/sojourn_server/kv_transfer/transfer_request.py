"""A request's ``kv_transfer_params``, and the transfer planner's state of a request.

The router writes these parameters for the prefill engine::

    {"do_remote_decode": true, "transfer": ID, "peer": ADDRESS, "decode_reads": false}

``peer`` is the address of the decode engine's transfer manager. If the engine has several workers, it lists
one address per worker, separated by commas (``rank_transfers``). ``decode_reads``: whether the decode engine
reads the prompt's stored blocks; if not, the prefill engine does. The prefill engine answers with the
parameters for the decode engine::

    {"do_remote_prefill": true, "transfer": ID, "context": NAME, "stored": 12}

``context`` identifies the transfer *and* the prompt's tokens, so that KV of other tokens is never used.
``stored`` is the number of leading Full Blocks (64 tokens each) that the store already has. Unknown keys are
ignored, because vLLM adds some. vLLM itself also reads ``do_remote_prefill`` and ``do_remote_decode``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

Name = Annotated[str, msgspec.Meta(max_length=4096, pattern="^[^\\ud800-\\udfff]+$")]
"""A text of at least one character, without halves of surrogate pairs, which UTF-8 cannot encode."""


class TransferRole(Enum):
    """The part of a request that this engine computes."""

    WHOLE = "whole"
    """The whole request, without another engine."""
    PREFILL = "prefill"
    DECODE = "decode"


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_transfer_params`` of a request. The module's docstring explains the fields."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer: Name = ""
    peer: Name = ""
    decode_reads: bool | None = None
    context: Name = ""
    stored: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def role(self) -> TransferRole:
        if self.do_remote_decode:
            return TransferRole.PREFILL
        return TransferRole.DECODE if self.do_remote_prefill else TransferRole.WHOLE


WHOLE_REQUEST = TransferParams()


def parse_transfer_params(given: Mapping[str, Any] | None) -> TransferParams:
    """Validate ``kv_transfer_params`` and return them; ``WHOLE_REQUEST`` if no other engine takes part.
    Raises ``ValueError`` if a value is invalid."""
    try:
        params = msgspec.convert(given or {}, TransferParams)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if params.do_remote_decode and params.do_remote_prefill:
        raise ValueError("do_remote_decode and do_remote_prefill are both set; an engine does one of them")
    if params.role is TransferRole.WHOLE:
        return WHOLE_REQUEST
    for name in ("transfer", "peer" if params.do_remote_decode else "context"):
        if not getattr(params, name):
            raise ValueError(f"{name} is missing")
    return params


def context_name(view: RequestView, transfer: str, block_tokens: int) -> str:
    """Return the name under which two engines transfer a request's prompt. Prompts with different tokens get
    different names: the hash of the last whole block of ``block_tokens`` tokens covers all before it."""
    whole = view.num_prompt_tokens // block_tokens
    last = bytes(view.block_hashes[whole - 1]) if whole else b""
    tail = (view.prompt_token_ids or ())[whole * block_tokens :]
    text = f"{last.hex()} {','.join(map(str, tail))} {view.num_prompt_tokens}"
    return f"{transfer}.{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def tail_key(context: str) -> bytes:
    """Return a key for a prompt's last Full Block (64 tokens) if the prompt fills this block only in part.
    ``context``: the prompt's ``context_name``. Such a block is pushed but not stored, and no other transfer
    uses its key."""
    return hashlib.blake2b(f"tail of {context}".encode(), digest_size=32).digest()


class RequestView(Protocol):
    """The attributes of vLLM's request that the planner reads."""

    request_id: str
    num_tokens: int
    """Number of tokens of the prompt and of the output so far."""
    num_prompt_tokens: int
    prompt_token_ids: Sequence[int] | None
    block_hashes: Sequence[bytes]
    """Chain hashes of the request's full engine blocks, in order."""
    kv_transfer_params: Mapping[str, Any] | None


class ExternalMatch(NamedTuple):
    """Number of tokens whose KV the connector can supply, and how it loads the KV."""

    tokens: int | None
    """Number of tokens; ``None`` if not known yet."""
    is_async: bool = False
    """Whether the KV is loaded before the request runs, while other requests compute. If not, the KV is
    loaded layer by layer in the step that runs the request."""


NO_MATCH = ExternalMatch(0)
MATCH_PENDING = ExternalMatch(None)


class TransferPhase(Enum):
    """Stage of a request's KV transfer."""

    NEW = "new"
    WAITING = "waiting"
    """An ask is open: the request waits for KV from storage or a peer."""
    READY = "ready"
    """The request's KV has arrived, and the request waits for engine blocks."""
    FILLING = "filling"
    """The request's blocks are being filled while other requests compute."""
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class TransferRequest:
    """The planner's state of one request."""

    view: RequestView
    params: TransferParams
    context: str = ""
    phase: TransferPhase = TransferPhase.NEW
    ask: int = 0
    """Number of the open ask (an attempt to get KV from storage or a peer); 0 if none is open."""
    first: int = 0
    """Index of the ask's first Full Block among all Full Blocks of the request."""
    blocks: int = 0
    """Number of Full Blocks of the ask that are ready, from ``first`` on."""
    is_pushed: bool = False
    """Whether the ready blocks were pushed to this engine by a peer. If not, this engine fetched them."""
    fetches: int = 0
    """Number of consecutive fetches so far, at most ``MAX_FETCHES``."""
    pushed: bool = False
    """Whether a push of the prompt to the decode engine has been planned."""
    saved: int = 0
    """Number of leading Full Blocks that need no further save job. It falls if the worker could not save a
    block."""
    saved_before: list[int] = field(default_factory=list)
    """Value of ``saved`` before each of the last ``concurrent_steps`` steps. The results of these steps may
    be missing, so the store may still refuse their saves."""
    stored: int = 0
    """Number of leading Full Blocks that are known to be stored."""
    answers: list[int] = field(default_factory=list)
    """Results of the ask from the workers that have reported."""
    computed: int = 0
    """Number of tokens whose KV is in the request's blocks after the last planned step. If steps are planned
    ahead, the last of these tokens are not known yet."""
    is_filling: bool = False
    """Whether the request has a fill job whose end vLLM does not know yet."""
