"""Plans the KV transfers of each request, on the scheduler's side of the vLLM connector. No I/O.

Two engines may share a request: one does its prefill, the other its decode. A *whole* request needs no other
engine. It fetches as in the left column, pushes nothing, and saves as in the right column. Names such as
Fetch are jobs (``transfer_jobs``), and names in capitals are phases of the request:

    prefill, or whole                          decode
    ────────────────                           ──────
    asked ── Fetch ──▶ WAITING                 arrived ── Expect ──▶ WAITING
      waits, without KV blocks                   waits, without KV blocks
    first layers arrived ──▶ READY             all arrived ──▶ READY; failed ──▶ as a whole request
    allocated ── Stream ──▶ RUNNING            allocated ── Fill ──▶ FILLING ──▶ RUNNING
    last chunk of the prompt ── Push           each Full Block once it is full ── Save
    finished without a push ── Abort           finished: the rest ── Save; held until it is copied

An *ask* is one attempt to get a request's KV. It may last for many steps. In each of them vLLM calls the
method ``ask`` for the waiting request, and all these calls belong to the same ask. A decode request's first
ask begins when it arrives, so that its prompt stays in the buffers while it is queued. The worker reports a
result for every ask, so that no request waits forever. If a transfer fails, the engine computes the KV. After
a preemption vLLM calls ``ask`` again: the request starts over, and can use the blocks that it stored before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .rank_transfers import check_peer_ranks
from .transfer_jobs import AbortJob, FetchJob, FillJob, PushJob, SaveJob, TransferJobs, TransferResults
from .transfer_request import (
    MATCH_PENDING,
    NO_MATCH,
    WHOLE_REQUEST,
    ExternalMatch,
    RequestView,
    TransferPhase,
    TransferRequest,
    TransferRole,
    context_name,
    parse_transfer_params,
    tail_key,
)

MAX_FETCHES = 3
"""Maximum number of consecutive fetches for one request; after that, its KV is computed. A further fetch is
needed if, during a fetch, the device evicts blocks that precede the fetched blocks in the context."""


class TransferPlanner:
    """Plans the KV transfers of one engine's requests. Not thread-safe."""

    def __init__(
        self,
        *,
        block_tokens: int,
        blocks_per_full: int,
        saves: bool = True,
        max_saves: int = 32,
        ranks: int = 1,
        concurrent_steps: int = 1,
    ) -> None:
        """``block_tokens``: tokens per engine block. ``blocks_per_full``: engine blocks per Full Block.
        ``saves``: whether blocks are stored. ``max_saves``: maximum number of Full Blocks that one step
        stores for one request. ``ranks``: number of workers; each reports its results.
        ``concurrent_steps``: maximum number of planned steps whose results are not known yet. It is above 1
        with async scheduling or pipeline parallelism."""
        self.counts: Counter[str] = Counter()
        self._block_tokens = block_tokens
        self._per_full = blocks_per_full
        self._full_tokens = block_tokens * blocks_per_full
        self._saves = saves
        self._max_saves = max_saves
        self._ranks = ranks
        self._concurrent_steps = concurrent_steps
        self._entries: dict[str, TransferRequest] = {}
        self._asks: dict[int, TransferRequest] = {}
        """Open asks by number. An ask is open until all workers have reported its result, or until the
        planner ends it."""
        self._last_ask = 0
        self._orders = TransferJobs()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_jobs(self) -> bool:
        return bool(self._orders)

    # -- what vLLM asks ---------------------------------------------------------------

    def arrived(self, view: RequestView) -> str | None:
        """Add a new request. If its ``kv_transfer_params`` are invalid, return the reason; this engine then
        computes the request alone. Otherwise return ``None``."""
        self._forget(view.request_id)
        try:
            params, wrong = parse_transfer_params(view.kv_transfer_params), None
            if params.role is TransferRole.PREFILL:
                check_peer_ranks(params.peer, self._ranks)
            if params.role is not TransferRole.WHOLE and view.prompt_token_ids is None:
                raise ValueError("a prompt without tokens cannot go from engine to engine")
        except ValueError as error:
            params, wrong = WHOLE_REQUEST, str(error)
        self.counts["unreadable" if wrong else params.role.value] += 1
        entry = self._entries[view.request_id] = TransferRequest(view, params)
        if params.role is not TransferRole.WHOLE:
            entry.context = context_name(view, params.transfer, self._block_tokens)
        if params.role is TransferRole.DECODE:
            entry.stored = entry.saved = params.stored
            if entry.context == params.context:
                self._open(entry, 0, is_pushed=True)
                self._orders.fetches.append(FetchJob(entry.ask, [], params.context))
            else:  # the pushed context has other tokens, as its name shows
                self.counts["prompts_foreign"] += 1
        return wrong

    def ask(self, request_id: str, computed: int) -> ExternalMatch:
        """Return the number of tokens whose KV a transfer can supply. They follow the first ``computed``
        tokens, whose KV is on the device. If there is KV to ask for, the first call begins an ask and returns
        ``MATCH_PENDING``. ``computed`` must be a multiple of the engine's block size."""
        entry = self._entries.get(request_id)
        if entry is None:
            return NO_MATCH
        entry.computed, entry.is_filling = 0, False  # it has no blocks (any more)
        if entry.phase is TransferPhase.WAITING:
            return MATCH_PENDING
        if entry.phase is TransferPhase.READY:
            end, is_reached = self._ready_end(entry), entry.first * self._full_tokens <= computed
            if is_reached and end > computed:
                return ExternalMatch(end - computed, is_async=entry.is_pushed or not self._streams)
            self._end(entry)
            if is_reached:
                return NO_MATCH
        elif entry.phase is TransferPhase.FILLING:
            # Nothing was filled. vLLM still reserves the request's blocks, and might never have as many again
            # for another asynchronous load.
            entry.fetches = MAX_FETCHES
        elif entry.phase is TransferPhase.RUNNING:  # preempted
            entry.fetches = 0
        return self._fetch(entry, computed)

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """Plan the job that fills a request's new blocks. ``block_ids``: all blocks of the request, in
        context order: first blocks whose KV the device has, then blocks to fill with the KV of
        ``external_tokens`` tokens (as returned by ``ask``), then blocks to compute."""
        entry = self._entries.get(request_id)
        if not external_tokens:
            if entry is not None:
                self._end(entry)
                entry.phase, entry.is_filling = TransferPhase.RUNNING, False
            return
        assert entry is not None
        end = self._ready_end(entry)
        first = (end - external_tokens) // self._block_tokens
        skip = first - entry.first * self._per_full
        fill = FillJob(entry.ask, request_id, skip, list(block_ids[first : -(-end // self._block_tokens)]))
        if entry.is_pushed or not self._streams:
            self._orders.fills.append(fill)
            self.counts["tokens_taken" if entry.is_pushed else "tokens_read"] += external_tokens
            entry.phase, entry.is_filling = TransferPhase.FILLING, True
        else:
            self._orders.streams.append(fill)
            self.counts["tokens_streamed"] += external_tokens
            entry.phase, entry.fetches = TransferPhase.RUNNING, 0
        self._close(entry)

    def reject_fill(self, request_id: str, block_ids: Sequence[int], is_async: bool) -> None:
        """Make the worker report the blocks ``block_ids`` as not filled, so that vLLM computes them.
        ``is_async``: ``ExternalMatch.is_async`` of the answer that vLLM got for the request."""
        if not is_async:
            self._orders.not_filled += block_ids
            return
        self._orders.fills.append(FillJob(0, request_id, 0, list(block_ids)))
        if request_id in self._entries:
            self._entries[request_id].is_filling = True

    def is_loading(self, request_id: str) -> bool:
        """Return whether a fill job for the request has not ended, as far as vLLM knows."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.is_filling

    def filled(self, request_id: str) -> None:
        """Record that vLLM has learned from all workers that a request's fill job has ended."""
        if request_id in self._entries:
            self._entries[request_id].is_filling = False

    def scheduled(self, step: Mapping[str, int], block_ids: Callable[[str], Sequence[int]]) -> None:
        """Plan the pushes and saves of a step that vLLM has scheduled. ``step``: request → number of its
        tokens that are computed after the step. ``block_ids``: function that returns a request's block
        ids."""
        for request_id, tokens_after in step.items():
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            if entry.params.role is TransferRole.PREFILL:
                if not entry.pushed and tokens_after >= entry.view.num_prompt_tokens:
                    self._push(entry, block_ids)
            elif self._saves:
                entry.computed = tokens_after
                entry.saved_before = [*entry.saved_before, entry.saved][-self._concurrent_steps :]
                self._save(entry, block_ids)

    def take_jobs(self) -> TransferJobs:
        """Return and clear the worker's jobs for the step just planned."""
        orders, self._orders = self._orders, TransferJobs()
        return orders

    @property
    def _streams(self) -> bool:
        """Whether fetched blocks are filled layer by layer in the step that uses them. If not, they are
        filled before that step.

        Filling may fail in the middle of the step. The worker then neither stores nor sends KV that was
        computed from the missing block. Other workers, and a step that is planned already, would learn of the
        failure too late. So layer-by-layer filling needs a single worker, and one planned step at a time.
        """
        return self._ranks == self._concurrent_steps == 1

    def take_results(self, reports: TransferResults) -> None:
        """Handle one worker's results of earlier jobs. The workers may answer an ask in different steps. Its
        result is the smallest number of leading blocks, because a block is usable only if every worker has
        its part."""
        for ask, blocks in reports.ready.items():
            entry = self._asks.get(ask)
            if entry is None:
                continue
            entry.answers.append(blocks)
            if len(entry.answers) == self._ranks:
                del self._asks[ask]
                self._ready(entry, min(entry.answers))
        for request_id, index in reports.stored.items():
            saver = self._entries.get(request_id)
            if saver is not None:
                saver.saved = min(saver.saved, index)
                self.counts["saves_put_off"] += 1

    def finished(
        self, request_id: str, well: bool, block_ids: Sequence[int] = (), *, is_loading: bool = False
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle a finished request. Returns whether vLLM must keep its blocks, because they are filled or
        saved, and the parameters for the decode engine, if the prompt was pushed. ``well``: whether the
        request completed normally. If so, and if its prompt was not pushed, the blocks in ``block_ids`` that
        are not stored yet are saved. ``is_loading``: whether another connector still fills its blocks."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False, None
        self._forget(request_id)
        answer: dict[str, Any] | None = None
        if entry.pushed and well:
            answer = {"do_remote_prefill": True, "transfer": entry.params.transfer}
            answer |= {"context": entry.context, "stored": entry.stored}
        elif entry.params.role is TransferRole.PREFILL and (entry.pushed or entry.params.decode_reads):
            self._orders.aborts.append(AbortJob(entry.context, entry.params.peer))
        if entry.is_filling or is_loading:
            # The request was aborted, or preempted and then ended by a step planned before the preemption.
            # When the fill job or load ends, vLLM frees the request's blocks and forgets the request.
            return True, answer
        late = []
        if well and not entry.pushed:
            first = max(min([entry.saved, *entry.saved_before]), entry.stored)
            late = self._save_jobs(entry, block_ids, first, self._keys(entry, first, entry.computed))
        if late:
            self._orders.saves += late
            self._orders.holds.append(request_id)
        return bool(late), answer

    def abandon(self) -> None:
        """Cancel the transfers that requests wait for. Called after an error of sojourn or a cache reset.
        After that, a present request starts a new transfer only if it is preempted. Blocks that vLLM has
        already allocated for KV are still filled, and held blocks stay held."""
        for entry in self._entries.values():
            if entry.phase is TransferPhase.WAITING:
                self._end(entry)
            entry.fetches = MAX_FETCHES

    # -- inside -----------------------------------------------------------------------

    def _prompt_blocks(self, entry: TransferRequest) -> int:
        return -(-entry.view.num_prompt_tokens // self._full_tokens)

    def _key(self, entry: TransferRequest, index: int) -> bytes:
        return bytes(entry.view.block_hashes[(index + 1) * self._per_full - 1])

    def _keys(self, entry: TransferRequest, first: int, tokens: int) -> list[bytes]:
        """Return the keys of the Full Blocks from index ``first`` on, within the first ``tokens`` tokens. A
        key is a hash of the block's tokens, so it exists only once these tokens are known."""
        hashed = len(entry.view.block_hashes) // self._per_full
        return [self._key(entry, index) for index in range(first, min(tokens // self._full_tokens, hashed))]

    def _ready_end(self, entry: TransferRequest) -> int:
        """Return the number of tokens from the start of the context to the end of the ready blocks."""
        if entry.is_pushed:
            return entry.view.num_prompt_tokens
        return (entry.first + entry.blocks) * self._full_tokens

    def _fetch(self, entry: TransferRequest, computed: int) -> ExternalMatch:
        entry.phase = TransferPhase.NEW
        if entry.fetches >= MAX_FETCHES:
            return NO_MATCH
        first = computed // self._full_tokens
        # At least one token is computed, for its logits.
        keys = self._keys(entry, first, entry.view.num_tokens - 1)
        if not keys:
            return NO_MATCH
        entry.fetches += 1
        self._open(entry, first, is_pushed=False)
        params, fetch = entry.params, FetchJob(entry.ask, keys)
        if params.decode_reads and not entry.pushed:
            total = self._prompt_blocks(entry)
            fetch = FetchJob(entry.ask, keys, entry.context, params.peer, total)
        self._orders.fetches.append(fetch)
        return MATCH_PENDING

    def _push(self, entry: TransferRequest, block_ids: Callable[[str], Sequence[int]]) -> None:
        view, params = entry.view, entry.params
        keys = self._keys(entry, 0, view.num_prompt_tokens)
        if len(keys) < self._prompt_blocks(entry):
            keys.append(tail_key(entry.context))
        ids = list(block_ids(view.request_id)[: -(-view.num_prompt_tokens // self._block_tokens)])
        push = PushJob(view.request_id, entry.context, params.peer, keys, ids)
        self._orders.pushes.append(push)
        self.counts["pushes"] += 1
        entry.pushed = True

    def _save(self, entry: TransferRequest, block_ids: Callable[[str], Sequence[int]]) -> None:
        first = max(entry.saved, entry.stored)
        keys = self._keys(entry, first, min(entry.computed, (first + self._max_saves) * self._full_tokens))
        if keys:
            ids = list(block_ids(entry.view.request_id))
            self._orders.saves += self._save_jobs(entry, ids, first, keys)
            entry.saved = max(first, min(first + len(keys), len(ids) // self._per_full))

    def _save_jobs(
        self, entry: TransferRequest, ids: Sequence[int], first: int, keys: Sequence[bytes]
    ) -> list[SaveJob]:
        jobs, size = [], self._per_full
        for place, key in enumerate(keys[: max(0, len(ids) // size - first)], first):
            own = list(ids[place * size : (place + 1) * size])
            parent = self._key(entry, place - 1) if place else b""
            jobs.append(SaveJob(entry.view.request_id, place, key, parent, own))
        return jobs

    def _open(self, entry: TransferRequest, first: int, is_pushed: bool) -> None:
        """Open an ask for the Full Blocks from index ``first`` on."""
        self._last_ask += 1
        entry.ask, entry.phase, entry.blocks, entry.answers = self._last_ask, TransferPhase.WAITING, 0, []
        entry.first, entry.is_pushed = first, is_pushed
        self._asks[entry.ask] = entry

    def _ready(self, entry: TransferRequest, blocks: int) -> None:
        """Handle the result of an ask: the number of leading blocks that have arrived or will arrive."""
        if entry.is_pushed:
            is_whole = blocks == self._prompt_blocks(entry)
            self.counts["prompts_whole" if is_whole else "prompts_lost"] += 1
            blocks *= is_whole
        else:
            self.counts["blocks_found"] += blocks
            # Blocks before ``first`` were on the device; the store may lack them.
            if entry.first <= entry.stored:
                entry.stored = max(entry.stored, entry.first + blocks)
        entry.phase, entry.blocks = TransferPhase.READY, blocks
        if not blocks:
            self._end(entry)
            if not entry.is_pushed:
                entry.fetches = MAX_FETCHES  # the store would give the same answer again

    def _end(self, entry: TransferRequest) -> None:
        """End the request's ask, if one is open."""
        if entry.ask:
            self._orders.ends.append(entry.ask)
        self._close(entry)
        entry.phase = TransferPhase.NEW

    def _close(self, entry: TransferRequest) -> None:
        self._asks.pop(entry.ask, None)
        entry.ask = 0

    def _forget(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._end(entry)
