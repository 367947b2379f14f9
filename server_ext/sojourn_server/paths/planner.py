"""What is asked of the paths for each request: the connector's half beside the scheduler, without any I/O.

    prefill, or whole                          decode
    ────────────────                           ──────
    asked ── Fetch ──▶ FETCHING                asked ── Expect ──▶ EXPECTING
      wait, without KV blocks                    wait, without KV blocks
    first layers are here ──▶ READY            all of it is here ──▶ READY     never will be ──▶ as whole
    has blocks ── Stream ──▶ RUNNING           has blocks ── Take ──▶ TAKING ──▶ RUNNING
    last chunk of the prompt ── Push ──▶       each Full Block, when full ── Save ──▶
    finished: held until the push is over

A request that has to wait is told so each time it is asked for, and is asked for in every step. Every ask is
answered, by the worker's promise, so none waits for ever. Whatever fails is computed.

A request is preempted by being asked for anew: then it begins again, and what it had stored serves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from .orders import Expect, Fetch, Orders, Push, Reports, Save, Stream, Take
from .request_params import (
    WHOLE,
    Part,
    PathParams,
    answer_params,
    context_name,
    read_params,
    tail_key,
)

MAX_FETCHES = 3
"""In a row for one request. A second is needed where the device has lost, while it waited, what stood before
what was fetched."""


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


class Found(NamedTuple):
    """Tokens that can be had from elsewhere."""

    tokens: int | None
    """``None``: not known yet."""
    beside: bool = False
    """They are brought while the engine does other things, not in the step that computes the request."""


NOTHING = Found(0)
LATER = Found(None)


class Finished(NamedTuple):
    """What becomes of a request that has finished."""

    hold: bool
    """Its blocks are not free yet."""
    answer: dict[str, Any] | None


class Scheduled(NamedTuple):
    """A request of the step that was just planned."""

    request_id: str
    tokens_after: int
    """Computed once this step is over."""


class Phase(Enum):
    """What a request does."""

    NEW = "new"
    FETCHING = "fetching"
    EXPECTING = "expecting"
    READY = "ready"
    """What it waited for is here, and it waits for blocks."""
    TAKING = "taking"
    """Its blocks are being filled beside the computing."""
    RUNNING = "running"


WAITS = (Phase.FETCHING, Phase.EXPECTING)


@dataclass(slots=True, eq=False)
class _Entry:
    """What is known of one request."""

    view: RequestView
    params: PathParams
    context: str = ""
    phase: Phase = Phase.NEW
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


class PathPlanner:
    """Of one engine. One thread."""

    def __init__(
        self, *, block_tokens: int, blocks_per_full: int, saves: bool = True, max_saves: int = 32
    ) -> None:
        """``block_tokens`` are an engine block's. ``max_saves`` is how many Full Blocks of one request are
        stored in one step: of a long prompt it takes some."""
        self.counts: Counter[str] = Counter()
        self._block_tokens = block_tokens
        self._per_full = blocks_per_full
        self._full_tokens = block_tokens * blocks_per_full
        self._saves = saves
        self._max_saves = max_saves
        self._entries: dict[str, _Entry] = {}
        self._asks: dict[int, str] = {}
        """Asks that wait for an answer, and whose they are."""
        self._last_ask = 0
        self._orders = Orders()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def open_asks(self) -> int:
        """Asks that were neither ended nor handed over to the worker."""
        return sum(entry.ask != 0 for entry in self._entries.values())

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    # -- what vLLM asks ---------------------------------------------------------------

    def arrived(self, view: RequestView) -> str | None:
        """A new request; why what it says of its transfer is no good, so that it goes without."""
        self._forget(view.request_id)
        try:
            params, wrong = read_params(view.kv_transfer_params), None
        except ValueError as error:
            params, wrong = WHOLE, str(error)
        if params.part is not Part.WHOLE and view.prompt_token_ids is None:
            params, wrong = WHOLE, "a prompt without tokens cannot go from engine to engine"
        entry = self._entries[view.request_id] = _Entry(view, params)
        if params.part is not Part.WHOLE:
            entry.context = self._context(view, params)
        if params.part is Part.DECODE:
            entry.stored = entry.saved = params.stored
            entry.waits_for_prompt = True
        self.counts["unreadable" if wrong else params.part.value] += 1
        return wrong

    def ask(self, request_id: str, computed: int) -> Found:
        """What can be had behind ``computed`` tokens that the device has, which are whole engine blocks."""
        entry = self._entries.get(request_id)
        if entry is None:
            return NOTHING
        if entry.phase in WAITS:
            return LATER
        if entry.phase is Phase.READY:
            tokens = self._ready_tokens(entry, computed)
            if tokens > 0:
                return Found(tokens, beside=entry.is_prompt)
            self._end(entry)
            if tokens == 0:
                return NOTHING
        elif entry.phase in (Phase.TAKING, Phase.RUNNING):  # that failed, or it was preempted
            entry.fetches = 0
        if entry.waits_for_prompt:
            return self._expect(entry, computed)
        return self._fetch(entry, computed)

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """It has blocks: for what the device has, ``external_tokens`` behind it, and what is computed."""
        entry = self._entries.get(request_id)
        if entry is None or entry.phase is not Phase.READY:
            if external_tokens:  # nothing was promised
                self._orders.not_filled += block_ids
            if entry is not None and not external_tokens:
                entry.phase = Phase.RUNNING
            return
        if not external_tokens:
            self._end(entry)
            entry.phase = Phase.RUNNING
            return
        end = self._ready_end(entry)
        computed = end - external_tokens
        skip = computed // self._block_tokens - entry.first * self._per_full
        ids = list(block_ids[computed // self._block_tokens : -(-end // self._block_tokens)])
        entry.fetches = 0
        if entry.is_prompt:
            self._orders.takes.append(Take(entry.ask, request_id, skip, ids))
            self.counts["tokens_taken"] += external_tokens
            entry.phase = Phase.TAKING
        else:
            self._orders.streams.append(Stream(entry.ask, skip, ids))
            self.counts["tokens_streamed"] += external_tokens
            entry.phase = Phase.RUNNING
        self._close(entry)

    def cannot_fill(self, request_id: str, block_ids: Sequence[int], beside: bool) -> None:
        """It counts on what is to come into these blocks, and nothing will: the worker is to say so."""
        if beside:
            self._orders.takes.append(Take(0, request_id, 0, list(block_ids)))
        else:
            self._orders.not_filled += block_ids

    def scheduled(self, step: Sequence[Scheduled], block_ids: Callable[[str], Sequence[int]]) -> None:
        """A step is planned; these compute in it. ``block_ids`` tells a request's blocks."""
        for request_id, tokens_after in step:
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            prompt_tokens = entry.view.num_prompt_tokens
            if entry.params.part is Part.PREFILL:
                if not entry.pushed and tokens_after >= prompt_tokens:
                    self._push(entry, block_ids)
            elif self._saves:
                self._save(entry, min(tokens_after, entry.view.num_tokens), block_ids)

    def take_orders(self) -> Orders:
        """What the worker has to do with the step that was just planned."""
        orders, self._orders = self._orders, Orders()
        return orders

    def take_reports(self, reports: Reports) -> None:
        """What has come of earlier orders."""
        for ask, blocks in reports.ready.items():
            entry = self._answered(ask)
            if entry is not None:
                self.counts["blocks_found"] += blocks
                # Blocks before them were found on the device: whether the store has those is not known.
                if entry.first <= entry.stored:
                    entry.stored = max(entry.stored, entry.first + blocks)
                self._ready(entry, blocks)
        for ask, blocks in reports.prompts.items():
            entry = self._answered(ask)
            if entry is not None:
                whole = blocks == self._prompt_blocks(entry)
                self.counts["prompts_whole" if whole else "prompts_lost"] += 1
                self._ready(entry, blocks if whole else 0)
        for request_id, index in reports.stored.items():
            saver = self._entries.get(request_id)
            if saver is not None:
                saver.saved = min(saver.saved, index)
                self.counts["saves_put_off"] += 1

    def finished(self, request_id: str, well: bool) -> Finished:
        """It has ended, and will not be asked for again; ``well``: with an answer."""
        entry = self._entries.get(request_id)
        if entry is None:
            return Finished(False, None)
        self._forget(request_id)
        if not entry.pushed:
            return Finished(False, None)
        self._orders.holds.append(request_id)
        if not well:
            self._orders.aborts.append(request_id)
            return Finished(True, None)
        return Finished(True, answer_params(entry.params, entry.context, entry.stored))

    def abandon(self) -> None:
        """Something of ours has failed: ask for nothing more. What is promised or held already stays so."""
        for entry in self._entries.values():
            if entry.phase in WAITS:
                self._end(entry)
            self._drop(entry)
            entry.fetches = MAX_FETCHES

    # -- inside -----------------------------------------------------------------------

    def _context(self, view: RequestView, params: PathParams) -> str:
        whole = view.num_prompt_tokens // self._block_tokens
        last = bytes(view.block_hashes[whole - 1]) if whole else b""
        tail = (view.prompt_token_ids or ())[whole * self._block_tokens :]
        return context_name(params.transfer, last, tail, view.num_prompt_tokens)

    def _prompt_blocks(self, entry: _Entry) -> int:
        return -(-entry.view.num_prompt_tokens // self._full_tokens)

    def _key(self, entry: _Entry, index: int) -> bytes:
        return bytes(entry.view.block_hashes[(index + 1) * self._per_full - 1])

    def _keys(self, entry: _Entry, first: int, tokens: int) -> list[bytes]:
        """Keys of the Full Blocks from ``first`` on that ``tokens`` fill."""
        hashed = len(entry.view.block_hashes) // self._per_full
        return [self._key(entry, index) for index in range(first, min(tokens // self._full_tokens, hashed))]

    def _ready_end(self, entry: _Entry) -> int:
        """Tokens up to the end of what is ready."""
        if entry.is_prompt:
            return entry.view.num_prompt_tokens
        return (entry.first + entry.blocks) * self._full_tokens

    def _ready_tokens(self, entry: _Entry, computed: int) -> int:
        """Of what is ready, the tokens behind ``computed``; below 0: there is a gap between the two."""
        if entry.first * self._full_tokens > computed:
            return -1
        return max(0, self._ready_end(entry) - computed)

    def _expect(self, entry: _Entry, computed: int) -> Found:
        entry.waits_for_prompt = False
        expect = Expect(0, entry.params.context, entry.params.epoch)
        if entry.context != entry.params.context:
            # It was made of other tokens, by the name that the prefill engine gave it.
            self.counts["prompts_foreign"] += 1
            self._orders.drops.append(expect)
            return self._fetch(entry, computed)
        if entry.view.num_prompt_tokens <= computed:
            self._orders.drops.append(expect)
            return NOTHING
        self._open(entry, Phase.EXPECTING)
        entry.first, entry.is_prompt = 0, True
        self._orders.expects.append(expect._replace(ask=entry.ask))
        return LATER

    def _fetch(self, entry: _Entry, computed: int) -> Found:
        entry.phase = Phase.NEW
        if entry.fetches >= MAX_FETCHES:
            return NOTHING
        first = computed // self._full_tokens
        # One token at least is computed: its logits are asked for.
        keys = self._keys(entry, first, entry.view.num_tokens - 1)
        if not keys:
            return NOTHING
        entry.fetches += 1
        self._open(entry, Phase.FETCHING)
        entry.first, entry.is_prompt = first, False
        params = entry.params
        fetch = Fetch(entry.ask, keys)
        if params.part is Part.PREFILL and not entry.pushed:
            fetch = fetch._replace(
                decode_share=params.decode_share,
                peer=params.peer,
                context=entry.context,
                total=self._prompt_blocks(entry),
                epoch=params.epoch,
            )
        self._orders.fetches.append(fetch)
        return LATER

    def _push(self, entry: _Entry, block_ids: Callable[[str], Sequence[int]]) -> None:
        view = entry.view
        keys = self._keys(entry, 0, view.num_prompt_tokens)
        if len(keys) < self._prompt_blocks(entry):
            keys.append(tail_key(entry.context))
        count = -(-view.num_prompt_tokens // self._block_tokens)
        ids = list(block_ids(view.request_id)[:count])
        params = entry.params
        self._orders.pushes.append(Push(view.request_id, entry.context, params.peer, params.epoch, keys, ids))
        self.counts["pushes"] += 1
        entry.pushed = True

    def _save(self, entry: _Entry, tokens: int, block_ids: Callable[[str], Sequence[int]]) -> None:
        per = self._per_full
        first = max(entry.saved, entry.stored)
        full = min(tokens // self._full_tokens, len(entry.view.block_hashes) // per, first + self._max_saves)
        if full <= first:
            return
        ids = list(block_ids(entry.view.request_id))
        for place in range(first, min(full, len(ids) // per)):
            start = place * per
            save = Save(
                request=entry.view.request_id,
                place=place,
                key=self._key(entry, place),
                parent=self._key(entry, place - 1) if place else b"",
                block_ids=ids[start : start + per],
                before=ids[:start],
            )
            self._orders.saves.append(save)
            entry.saved = place + 1

    def _open(self, entry: _Entry, phase: Phase) -> None:
        self._last_ask += 1
        entry.ask, entry.phase, entry.blocks = self._last_ask, phase, 0
        self._asks[entry.ask] = entry.view.request_id

    def _answered(self, ask: int) -> _Entry | None:
        request_id = self._asks.pop(ask, None)
        return None if request_id is None else self._entries[request_id]

    def _ready(self, entry: _Entry, blocks: int) -> None:
        entry.phase, entry.blocks = Phase.READY, blocks
        if blocks:
            return
        self._end(entry)
        if not entry.is_prompt:
            entry.fetches = MAX_FETCHES  # the store has been asked, and would say so again

    def _end(self, entry: _Entry) -> None:
        """What it asked for is not wanted any more."""
        if entry.ask and not self._take_back(entry.ask):
            self._orders.ends.append(entry.ask)
        self._close(entry)
        entry.phase = Phase.NEW

    def _take_back(self, ask: int) -> bool:
        """Whether the worker has not heard of an ask, and never will."""
        orders = self._orders
        for fetch in orders.fetches:
            if fetch.ask == ask:
                orders.fetches.remove(fetch)
                return True
        for expect in orders.expects:
            if expect.ask == ask:
                orders.expects.remove(expect)
                orders.drops.append(expect._replace(ask=0))
                return True
        return False

    def _close(self, entry: _Entry) -> None:
        self._asks.pop(entry.ask, None)
        entry.ask = 0

    def _forget(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._end(entry)
        self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        """Let go of a context that it will not ask for."""
        if entry.waits_for_prompt:
            self._orders.drops.append(Expect(0, entry.params.context, entry.params.epoch))
        entry.waits_for_prompt = False
