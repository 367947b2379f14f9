"""Contexts that are gathered here for the engine that goes on with them: a peer reads and pushes into them.

The engine says that it expects a transfer before or after anything has come of it, takes its blocks when all
are there, and lets go of it. While it waits, what counts is progress: of an answer that never comes it learns
soon. Before, while the request is in its queue, the engine says that it wants the transfer: then what is
whole stays as long as that is said again. ``prompt`` says how one is gathered.

Who wants buffers that others have gets them in this order: what nobody has asked for; of what requests in the
queue want, the last, as far as it is more than their share. Nobody else yields: whoever has nothing yet loses
nothing but his patience.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .buffer_pool import LeaseTooLarge
from .incoming_prompt import (
    IncomingPrompt,
    PeerAnswer,
    PromptOfferSide,
    PromptReadSide,
    PromptReadState,
    PromptState,
    ReadChunk,
)
from .transfer_actions import PromptTransferEnded, SendMessage
from .transfer_context import TransferContext
from .transfer_link import LinkItem
from .transfer_wire import (
    AbortMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    OfferMessage,
    ReadMessage,
)

MAX_REMEMBERED_EVICTIONS = 4096
"""Transfers of which it is remembered that their buffers were given back before anybody asked for them."""
EVICTED_UNCLAIMED = "nobody had asked for it, and others waited for its buffers"
EVICTED_LOW_PRIORITY = "its request was among the last in the queue, and others waited for its buffers"
ALL_PEERS_FACTOR = 4
"""All peers together may have so many times here what one may."""
MAX_SILENT_LEASES = 4
"""So many times ``lease_s`` a peer may take to give something of a context that has its buffers, however
often it says that it lives. A step may be long; one that hangs does not end."""


class IncomingPromptTable:
    """All contexts that are gathered here."""

    def __init__(self, transfer_context: TransferContext) -> None:
        self.transfer_context = transfer_context
        self._prompts: dict[str, IncomingPrompt] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Transfers that are not here any more, and why."""
        self._wanted: dict[str, float] = {}
        """Transfers that requests in the queue will expect, in that order, and until when that holds."""

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def wanted(self) -> int:
        """Transfers that requests in the engine's queue are known to want."""
        return len(self._wanted)

    # -- what the engine asks for ---------------------------------------------------

    def expect(self, transfer: str, now: float) -> None:
        """The engine waits for it. Raises ``ValueError`` where it does already."""
        prompt = self._prompts.get(transfer)
        if prompt is None:
            prompt = self._prompts[transfer] = IncomingPrompt(self, transfer, now)
        if prompt.expected:
            raise ValueError(f"transfer {transfer!r} is expected already")
        prompt.expected = True
        prompt.watch.seen(now)
        self._wanted.pop(transfer, None)
        if transfer in self._gone:  # it is told at once: nothing comes of it
            prompt.state, prompt.why = PromptState.FAILED, self._gone.pop(transfer)
        self.transfer_context.buffers.renew(prompt.name, now)
        if prompt.state is not PromptState.GATHERING:
            self._event(prompt)

    def want(self, transfers: Sequence[str], now: float) -> None:
        """They will be expected. Said again, that holds for another ``lease_s``."""
        for transfer in transfers:
            prompt = self._prompts.get(transfer)
            if prompt is not None and prompt.expected:
                continue
            self._wanted[transfer] = now + self.transfer_context.limits.lease_s
            if prompt is not None and prompt.state is PromptState.COMPLETE:
                self.transfer_context.buffers.renew(prompt.name, now)

    def blocks(self, transfer: str) -> list[memoryview]:
        """The blocks of a context that is complete, in the order in which they were offered; nobody else gets
        their slots before ``forget``. Raises ``ValueError``."""
        prompt = self._prompts.get(transfer)
        if prompt is None or prompt.state is not PromptState.COMPLETE or prompt.offer is None:
            raise ValueError(f"transfer {transfer!r} is not complete here, or gone")
        if not prompt.claimed:
            prompt.claimed = True
            for slot in prompt.offer.slots:
                self.transfer_context.buffers.pin(slot)
        return [self.transfer_context.memory.block(slot.index) for slot in prompt.offer.slots]

    def forget(self, transfer: str, now: float, why: str = "") -> None:
        """It was taken, or is not wanted any more: peers are told ``why`` then. Nothing for what is gone."""
        self._wanted.pop(transfer, None)
        prompt = self._prompts.get(transfer)
        if prompt is None:
            return
        prompt.expected = False  # who does not want it need not be told
        prompt.fail(why or "it is not wanted any more", now, tell=True)
        if prompt.claimed and prompt.offer is not None:
            for slot in prompt.offer.slots:
                self.transfer_context.buffers.unpin(slot)
        self.let_go(prompt, now)

    def end_all(self, why: str, now: float) -> None:
        for prompt in list(self._prompts.values()):
            prompt.fail(why, now, tell=True)
            if not prompt.claimed:
                self.forget(prompt.transfer, now)
        self._wanted.clear()

    # -- what peers ask for ---------------------------------------------------------

    def read(self, conn: int, message: ReadMessage, now: float) -> None:
        prompt = self._prompts.get(message.transfer)
        if prompt is not None and (
            prompt.read is not None or prompt.offer is not None or prompt.state is not PromptState.GATHERING
        ):
            self.say(
                conn, FailedMessage(transfer=message.transfer, index=0, reason="it is under way here already")
            )
            return
        keys = message.keys
        if not keys or len(set(keys)) != len(keys):
            why = "no blocks, or one of them twice"
            self.say(conn, FailedMessage(transfer=message.transfer, index=0, reason=why))
            return
        refused = self._refusal(conn, message.transfer, len(keys))
        if refused:
            self.say(conn, FailedMessage(transfer=message.transfer, index=0, reason=refused))
            return
        self._gone.pop(message.transfer, None)
        prompt = prompt or IncomingPrompt(self, message.transfer, now)
        prompt.read = PromptReadSide(conn, keys, message.traffic_class)
        self._prompts[message.transfer] = prompt
        self.transfer_context.counts["prompts"] += 1
        self._lease(prompt, keys, max(0, message.total - len(keys)), now)

    def offer(self, conn: int, message: OfferMessage, now: float) -> None:
        prompt = self._prompts.get(message.transfer)
        if prompt is not None and prompt.offer is not None:
            if prompt.state is PromptState.COMPLETE and prompt.offer.keys == message.keys:
                self.say(
                    conn, CompleteMessage(transfer=message.transfer)
                )  # offered again by one that was cut off
            else:
                self.say(conn, AbortMessage(transfer=message.transfer, reason="it was offered already"))
            return
        keys = message.keys
        if not keys or len(set(keys)) != len(keys):
            self.say(conn, AbortMessage(transfer=message.transfer, reason="no blocks, or one of them twice"))
            return
        half = PromptOfferSide(conn, keys)
        if prompt is not None and prompt.state is not PromptState.GATHERING:
            self.say(conn, AbortMessage(transfer=message.transfer, reason=prompt.why))
            return
        refused = self._refusal(conn, message.transfer, len(keys))
        if refused:
            self.say(conn, AbortMessage(transfer=message.transfer, reason=refused))
            if prompt is not None and prompt.conns() <= {conn}:
                prompt.fail(refused, now, tell=False)
            return
        if prompt is not None and prompt.leased:
            prompt.watch.seen(now)
            prompt.take_offer(half, now)
            return
        if prompt is None:
            self._gone.pop(message.transfer, None)
            prompt = self._prompts[message.transfer] = IncomingPrompt(self, message.transfer, now)
            self.transfer_context.counts["prompts"] += 1
        prompt.offer = half
        prompt.watch.seen(now)
        self._lease(prompt, keys, 0, now)

    def data(self, conn: int, message: DataMessage, payload: memoryview, now: float) -> bool:
        """A layer from a peer; whether it is of a context that is gathered here at all."""
        prompt = self._prompts.get(message.transfer)
        if prompt is None or prompt.offer is None or prompt.offer.conn != conn:
            return False
        if prompt.state is PromptState.GATHERING and not prompt.data(message, payload, now):
            self.transfer_context.counts["out_of_order"] += 1
            prompt.fail("the peer sent what was not asked for", now, tell=True)
        return True

    def aborted(self, conn: int, message: AbortMessage, now: float) -> None:
        """A peer does not go on with it."""
        prompt = self._prompts.get(message.transfer)
        if prompt is None or conn not in prompt.conns():
            return
        prompt.fail(message.reason, now, tell=False)

    def told(self, conn: int, transfer: str, done: int, now: float) -> None:
        """A peer says that it goes on. Who waits for room is kept in line by what is done, not by words; who
        has its buffers keeps them, while it gives something now and then, for ``MAX_SILENT_LEASES``."""
        prompt = self._prompts.get(transfer)
        if prompt is None or conn not in prompt.conns() or prompt.claimed:
            return
        if prompt.watch.told(done, now) or not prompt.waits_for_room:
            self.transfer_context.buffers.renew(prompt.name, now)

    def open_transfers_on(self, conn: int) -> list[str]:
        """Transfers for which this peer waits for us."""
        return [
            transfer
            for transfer, prompt in self._prompts.items()
            if prompt.state is PromptState.GATHERING
            and (
                (prompt.offer is not None and prompt.offer.conn == conn)
                or (
                    prompt.read is not None
                    and prompt.read.conn == conn
                    and prompt.read.state is not PromptReadState.DONE
                )
            )
        ]

    def all_conns(self) -> set[int]:
        return {conn for prompt in self._prompts.values() for conn in prompt.conns()}

    def lost(self, conn: int, why: str, now: float) -> None:
        """A connection has ended. What was read here stays for a while: it may be offered by another."""
        for prompt in list(self._prompts.values()):
            if prompt.let_go_of(conn, now):
                prompt.fail(why, now, tell=False)

    def tick(self, now: float) -> None:
        done = self.transfer_context.done(now)
        silent_s = MAX_SILENT_LEASES * self.transfer_context.limits.lease_s
        for transfer in [each for each, until_s in self._wanted.items() if until_s <= now]:
            del self._wanted[transfer]
        for prompt in list(self._prompts.values()):
            if prompt.state is not PromptState.GATHERING:
                continue
            if prompt.waits_for_local_resources and prompt.watch.told(done, now, by="here"):
                self.transfer_context.buffers.renew(prompt.name, now)
                prompt.moved_s = now
            if prompt.leased and not prompt.waits_for_room and now - prompt.moved_s >= silent_s:
                self.transfer_context.counts["stalls"] += 1
                self.remember(prompt, "its peer gave nothing of it")
                prompt.fail("its peer gave nothing of it", now, tell=True)
                continue
            if prompt.expected and prompt.watch.stalled(now):
                self.transfer_context.counts["stalls"] += 1
                prompt.fail("nothing comes of it", now, tell=True)
        self._make_room(now)

    # -- the link -------------------------------------------------------------------

    def begin(self, item: LinkItem, now: float) -> None:
        """The link has come to a chunk that was read here."""
        chunk: ReadChunk = item.work
        read = chunk.prompt.read
        assert read is not None
        assert read.conn is not None, "what was to go to a peer that is gone was not taken back"
        message = DataMessage(
            transfer=chunk.prompt.transfer,
            layer=chunk.layer,
            indices=chunk.indices,
            traffic_class=item.traffic_class,
        )
        payload = [self.transfer_context.memory.layer(slot.index, chunk.layer) for slot in chunk.slots]
        self.transfer_context.actions.append(SendMessage(read.conn, message, payload, item.number))

    def finished(self, item: LinkItem, now: float) -> None:
        """A chunk is out, or will never be."""
        chunk: ReadChunk = item.work
        read = chunk.prompt.read
        assert read is not None
        for slot in chunk.slots:
            self.transfer_context.buffers.unpin(slot)
        del read.in_queue[item.number]
        self.transfer_context.buffers.renew(chunk.prompt.name, now)
        self.transfer_context.counts["bytes_streamed"] += item.nbytes
        if not read.in_queue:
            read.state = PromptReadState.DONE

    # -- inside ---------------------------------------------------------------------

    def _make_room(self, now: float) -> None:
        """While others wait for buffers, what nobody has asked for gives up its own: what was left longest
        goes first. Sooner than those lose patience, and not at once, for the request may be on its way."""
        transfer_context = self.transfer_context
        if not transfer_context.buffers.waiting:
            return
        least_s = transfer_context.limits.patience_s / 2
        left = [
            (prompt.rests_since_s, prompt)
            for prompt in self._prompts.values()
            if prompt.is_left and prompt.rests_since_s is not None and now - prompt.rests_since_s >= least_s
        ]
        unwanted = [each for each in left if not self._is_wanted(each[1])]
        for _, prompt in sorted(unwanted, key=lambda each: each[0]):
            self._evict(prompt, EVICTED_UNCLAIMED, now)
            if not transfer_context.buffers.waiting:
                return
        if len(unwanted) < len(left):
            for prompt in self._beyond_share({prompt.transfer for _, prompt in left}):
                self._evict(prompt, EVICTED_LOW_PRIORITY, now)
                if not transfer_context.buffers.waiting:
                    return

    def _is_wanted(self, prompt: IncomingPrompt) -> bool:
        """By a request in the queue, which can take it as it is."""
        return prompt.transfer in self._wanted and prompt.state is PromptState.COMPLETE

    def _beyond_share(self, rest: set[str]) -> list[IncomingPrompt]:
        """Of those at ``rest`` that requests in the queue want, what is more than their share, the last of
        the queue first: were it the first, all would be given up just before their turn."""
        most = self.transfer_context.limits.queue_share * self.transfer_context.limits.slots
        slots: set[int] = set()
        found: list[IncomingPrompt] = []
        for transfer in self._wanted:
            prompt = self._prompts.get(transfer)
            if prompt is None or prompt.offer is None or not self._is_wanted(prompt) or transfer not in rest:
                continue
            is_first = not slots
            slots.update(slot.index for slot in prompt.offer.slots)
            if len(slots) > most and not is_first:
                found.append(prompt)
        return found[::-1]

    def _evict(self, prompt: IncomingPrompt, why: str, now: float) -> None:
        self.transfer_context.counts["prompts_evicted"] += 1
        self.remember(prompt, why)
        prompt.fail(why, now, tell=True)
        self.let_go(prompt, now)
        self.transfer_context.grant(now)

    def remember(self, prompt: IncomingPrompt, why: str) -> None:
        """It goes before anybody has asked for it: who does yet is told at once."""
        if prompt.expected:
            return
        self._gone[prompt.transfer] = why
        if len(self._gone) > MAX_REMEMBERED_EVICTIONS:
            self._gone.popitem(last=False)

    def _refusal(self, conn: int, transfer: str, keys: int) -> str:
        """Why a peer's next context is not taken in; empty: it is."""
        limits = self.transfer_context.limits
        contexts = {True: 0, False: 0}
        held = {True: keys, False: 0}
        """By whether they are this peer's; what a peer has left behind is its lease's."""
        for prompt in self._prompts.values():
            halves = [half for half in (prompt.read, prompt.offer) if half is not None]
            for half in halves:
                held[half.conn == conn] += len(half.keys)
            if halves and prompt.transfer != transfer:
                contexts[conn in prompt.conns()] += 1
        if contexts[True] < limits.peer_contexts and held[True] <= limits.peer_keys:
            most_contexts, most_keys = (
                ALL_PEERS_FACTOR * limits.peer_contexts,
                ALL_PEERS_FACTOR * limits.peer_keys,
            )
            if sum(contexts.values()) < most_contexts and sum(held.values()) <= most_keys:
                return ""
            who = "all peers together"
        else:
            who, most_contexts, most_keys = "one peer", limits.peer_contexts, limits.peer_keys
        self.transfer_context.counts["contexts_refused"] += 1
        return f"{who} may have {most_contexts} contexts of {most_keys} keys here at a time, and no more"

    def let_go(self, prompt: IncomingPrompt, now: float) -> None:
        """Its buffers are others'; it stays known as long as its engine has not ended it."""
        self.transfer_context.release(prompt.name, now)
        self.transfer_context.reads.close(prompt.name)
        if not prompt.expected:
            self._prompts.pop(prompt.transfer, None)

    def say(self, conn: int | None, message: PeerAnswer) -> None:
        if conn is not None:
            self.transfer_context.actions.append(SendMessage(conn, message))

    def tell(self, prompt: IncomingPrompt) -> None:
        """The engine, if it waits."""
        if prompt.state is PromptState.COMPLETE:
            self.transfer_context.counts["prompts_complete"] += 1
        if prompt.expected:
            self._event(prompt)

    def _event(self, prompt: IncomingPrompt) -> None:
        complete = prompt.state is PromptState.COMPLETE
        self.transfer_context.events.append(PromptTransferEnded(prompt.transfer, complete, prompt.why))

    def _lease(self, prompt: IncomingPrompt, keys: Sequence[bytes], extra: int, now: float) -> None:
        prompt.leased = True
        try:
            self.transfer_context.lease(prompt.name, prompt, list(keys), extra, now)
        except LeaseTooLarge as error:
            self.transfer_context.counts["too_large"] += 1
            prompt.leased = False
            read, prompt.read = prompt.read, None
            if read is not None:
                self.say(read.conn, FailedMessage(transfer=prompt.transfer, index=0, reason=str(error)))
                if prompt.offer is None and not prompt.expected:
                    del self._prompts[prompt.transfer]
                return
            prompt.fail(str(error), now, tell=True)
