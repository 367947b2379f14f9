"""What the core of separated engines is told, and answers, beside what every core is (``core.facts``)."""

from __future__ import annotations

from enum import Enum

from ..core.facts import Ended, Fact, Send


class Role(str, Enum):
    """What an engine does of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineSeen(Fact, frozen=True):
    """An engine registers, or says again that it is there. ``instance`` is another one after a restart."""

    replica_id: str
    instance: str
    role: Role
    node: str
    """The machine whose storage NIC it reads through."""
    kv_tokens: int
    block_s: float
    """Seconds that the node's storage NIC takes for one Full Block."""
    peer: str
    """Address at which other engines reach its traffic manager."""
    max_context_tokens: int = 0
    """Longest context that it computes; 0: not known."""
    epoch: str = ""
    """Which life of its traffic manager; empty: not known."""
    max_running: int = 0
    """Requests that it runs at once; 0: not known."""


class NicTold(Fact, frozen=True):
    """A node says how many seconds of reading wait for its storage NIC."""

    node: str
    queue_s: float


class EndedCounted(Ended, frozen=True, tag="Ended"):
    """A request of a pair is over, and an engine has told its prompt's tokens. To cores that do not know this
    one, a coordinator's among them, it is an ``Ended``."""

    prompt_tokens: int = 0
    """0: not told."""


class SendPair(Send, frozen=True, kw_only=True):
    """Send a request to a prefill engine first, and then to ``replica_id``, which decodes."""

    prefill_id: str
    peer: str
    """Address of the decode engine's traffic manager, to which the prefill engine sends KV."""
    epoch: str = ""
    """The life of it that is meant; empty: whichever is there."""
    decode_share: float = 0.0
    """Part of what storage has of its prompt that the decode engine's node reads, 0 to 1."""
