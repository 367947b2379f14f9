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

from .actions import PromptOver, Send
from .buffers import TooLarge
from .depot import Depot
from .link import Item
from .prompt import Answer, Chunk, OfferHalf, Prompt, PromptState, ReadHalf, ReadState
from .wire import Abort, Complete, Data, Failed, Offer, Read

MOST_GONE = 4096
"""Transfers of which it is remembered that their buffers were given back before anybody asked for them."""
EVICTED = "nobody had asked for it, and others waited for its buffers"
CROWDED_OUT = "its request was among the last in the queue, and others waited for its buffers"
ALL_PEERS = 4
"""All peers together may have so many times here what one may."""
SILENT_LEASES = 4
"""So many times ``lease_s`` a peer may take to give something of a context that has its buffers, however
often it says that it lives. A step may be long; one that hangs does not end."""


class Prompts:
    """All contexts that are gathered here."""

    def __init__(self, depot: Depot) -> None:
        self.depot = depot
        self._prompts: dict[str, Prompt] = {}
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
            prompt = self._prompts[transfer] = Prompt(self, transfer, now)
        if prompt.expected:
            raise ValueError(f"transfer {transfer!r} is expected already")
        prompt.expected = True
        prompt.watch.seen(now)
        self._wanted.pop(transfer, None)
        if transfer in self._gone:  # it is told at once: nothing comes of it
            prompt.state, prompt.why = PromptState.FAILED, self._gone.pop(transfer)
        self.depot.buffers.renew(prompt.name, now)
        if prompt.state is not PromptState.GATHERING:
            self._event(prompt)

    def want(self, transfers: Sequence[str], now: float) -> None:
        """They will be expected. Said again, that holds for another ``lease_s``."""
        for transfer in transfers:
            prompt = self._prompts.get(transfer)
            if prompt is not None and prompt.expected:
                continue
            self._wanted[transfer] = now + self.depot.limits.lease_s
            if prompt is not None and prompt.state is PromptState.COMPLETE:
                self.depot.buffers.renew(prompt.name, now)

    def blocks(self, transfer: str) -> list[memoryview]:
        """The blocks of a context that is complete, in the order in which they were offered; nobody else gets
        their slots before ``forget``. Raises ``ValueError``."""
        prompt = self._prompts.get(transfer)
        if prompt is None or prompt.state is not PromptState.COMPLETE or prompt.offer is None:
            raise ValueError(f"transfer {transfer!r} is not complete here, or gone")
        if not prompt.claimed:
            prompt.claimed = True
            for slot in prompt.offer.slots:
                self.depot.buffers.pin(slot)
        return [self.depot.memory.block(slot.index) for slot in prompt.offer.slots]

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
                self.depot.buffers.unpin(slot)
        self.let_go(prompt, now)

    def end_all(self, why: str, now: float) -> None:
        for prompt in list(self._prompts.values()):
            prompt.fail(why, now, tell=True)
            if not prompt.claimed:
                self.forget(prompt.transfer, now)
        self._wanted.clear()

    # -- what peers ask for ---------------------------------------------------------

    def read(self, conn: int, message: Read, now: float) -> None:
        prompt = self._prompts.get(message.transfer)
        if prompt is not None and (
            prompt.read is not None or prompt.offer is not None or prompt.state is not PromptState.GATHERING
        ):
            self.say(conn, Failed(transfer=message.transfer, index=0, reason="it is under way here already"))
            return
        keys = message.keys
        if not keys or len(set(keys)) != len(keys):
            why = "no blocks, or one of them twice"
            self.say(conn, Failed(transfer=message.transfer, index=0, reason=why))
            return
        refused = self._refusal(conn, message.transfer, len(keys))
        if refused:
            self.say(conn, Failed(transfer=message.transfer, index=0, reason=refused))
            return
        self._gone.pop(message.transfer, None)
        prompt = prompt or Prompt(self, message.transfer, now)
        prompt.read = ReadHalf(conn, keys, message.traffic_class)
        self._prompts[message.transfer] = prompt
        self.depot.counts["prompts"] += 1
        self._lease(prompt, keys, max(0, message.total - len(keys)), now)

    def offer(self, conn: int, message: Offer, now: float) -> None:
        prompt = self._prompts.get(message.transfer)
        if prompt is not None and prompt.offer is not None:
            if prompt.state is PromptState.COMPLETE and prompt.offer.keys == message.keys:
                self.say(conn, Complete(transfer=message.transfer))  # offered again by one that was cut off
            else:
                self.say(conn, Abort(transfer=message.transfer, reason="it was offered already"))
            return
        keys = message.keys
        if not keys or len(set(keys)) != len(keys):
            self.say(conn, Abort(transfer=message.transfer, reason="no blocks, or one of them twice"))
            return
        half = OfferHalf(conn, keys)
        if prompt is not None and prompt.state is not PromptState.GATHERING:
            self.say(conn, Abort(transfer=message.transfer, reason=prompt.why))
            return
        refused = self._refusal(conn, message.transfer, len(keys))
        if refused:
            self.say(conn, Abort(transfer=message.transfer, reason=refused))
            if prompt is not None and prompt.conns() <= {conn}:
                prompt.fail(refused, now, tell=False)
            return
        if prompt is not None and prompt.leased:
            prompt.watch.seen(now)
            prompt.take_offer(half, now)
            return
        if prompt is None:
            self._gone.pop(message.transfer, None)
            prompt = self._prompts[message.transfer] = Prompt(self, message.transfer, now)
            self.depot.counts["prompts"] += 1
        prompt.offer = half
        prompt.watch.seen(now)
        self._lease(prompt, keys, 0, now)

    def data(self, conn: int, message: Data, payload: memoryview, now: float) -> bool:
        """A layer from a peer; whether it is of a context that is gathered here at all."""
        prompt = self._prompts.get(message.transfer)
        if prompt is None or prompt.offer is None or prompt.offer.conn != conn:
            return False
        if prompt.state is PromptState.GATHERING and not prompt.data(message, payload, now):
            self.depot.counts["out_of_order"] += 1
            prompt.fail("the peer sent what was not asked for", now, tell=True)
        return True

    def aborted(self, conn: int, message: Abort, now: float) -> None:
        """A peer does not go on with it."""
        prompt = self._prompts.get(message.transfer)
        if prompt is None or conn not in prompt.conns():
            return
        prompt.fail(message.reason, now, tell=False)

    def told(self, conn: int, transfer: str, done: int, now: float) -> None:
        """A peer says that it goes on. Who waits for room is kept in line by what is done, not by words; who
        has its buffers keeps them, while it gives something now and then, for ``SILENT_LEASES``."""
        prompt = self._prompts.get(transfer)
        if prompt is None or conn not in prompt.conns() or prompt.claimed:
            return
        if prompt.watch.told(done, now) or not prompt.waits_for_room:
            self.depot.buffers.renew(prompt.name, now)

    def open_on(self, conn: int) -> list[str]:
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
                    and prompt.read.state is not ReadState.DONE
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
        done = self.depot.done(now)
        silent_s = SILENT_LEASES * self.depot.limits.lease_s
        for transfer in [each for each, until_s in self._wanted.items() if until_s <= now]:
            del self._wanted[transfer]
        for prompt in list(self._prompts.values()):
            if prompt.state is not PromptState.GATHERING:
                continue
            if prompt.waits_here and prompt.watch.told(done, now, by="here"):
                self.depot.buffers.renew(prompt.name, now)
                prompt.moved_s = now
            if prompt.leased and not prompt.waits_for_room and now - prompt.moved_s >= silent_s:
                self.depot.counts["stalls"] += 1
                self.remember(prompt, "its peer gave nothing of it")
                prompt.fail("its peer gave nothing of it", now, tell=True)
                continue
            if prompt.expected and prompt.watch.stalled(now):
                self.depot.counts["stalls"] += 1
                prompt.fail("nothing comes of it", now, tell=True)
        self._make_room(now)

    # -- the link -------------------------------------------------------------------

    def begin(self, item: Item, now: float) -> None:
        """The link has come to a chunk that was read here."""
        chunk: Chunk = item.work
        read = chunk.prompt.read
        assert read is not None
        assert read.conn is not None, "what was to go to a peer that is gone was not taken back"
        message = Data(
            transfer=chunk.prompt.transfer,
            layer=chunk.layer,
            indices=chunk.indices,
            traffic_class=item.traffic_class,
        )
        payload = [self.depot.memory.layer(slot.index, chunk.layer) for slot in chunk.slots]
        self.depot.actions.append(Send(read.conn, message, payload, item.number))

    def finished(self, item: Item, now: float) -> None:
        """A chunk is out, or will never be."""
        chunk: Chunk = item.work
        read = chunk.prompt.read
        assert read is not None
        for slot in chunk.slots:
            self.depot.buffers.unpin(slot)
        del read.in_line[item.number]
        self.depot.buffers.renew(chunk.prompt.name, now)
        self.depot.counts["bytes_streamed"] += item.nbytes
        if not read.in_line:
            read.state = ReadState.DONE

    # -- inside ---------------------------------------------------------------------

    def _make_room(self, now: float) -> None:
        """While others wait for buffers, what nobody has asked for gives up its own: what was left longest
        goes first. Sooner than those lose patience, and not at once, for the request may be on its way."""
        depot = self.depot
        if not depot.buffers.waiting:
            return
        least_s = depot.limits.patience_s / 2
        left = [
            (prompt.rests_since_s, prompt)
            for prompt in self._prompts.values()
            if prompt.is_left and prompt.rests_since_s is not None and now - prompt.rests_since_s >= least_s
        ]
        unwanted = [each for each in left if not self._is_wanted(each[1])]
        for _, prompt in sorted(unwanted, key=lambda each: each[0]):
            self._evict(prompt, EVICTED, now)
            if not depot.buffers.waiting:
                return
        if len(unwanted) < len(left):
            for prompt in self._beyond_share({prompt.transfer for _, prompt in left}):
                self._evict(prompt, CROWDED_OUT, now)
                if not depot.buffers.waiting:
                    return

    def _is_wanted(self, prompt: Prompt) -> bool:
        """By a request in the queue, which can take it as it is."""
        return prompt.transfer in self._wanted and prompt.state is PromptState.COMPLETE

    def _beyond_share(self, rest: set[str]) -> list[Prompt]:
        """Of those at ``rest`` that requests in the queue want, what is more than their share, the last of
        the queue first: were it the first, all would be given up just before their turn."""
        most = self.depot.limits.queue_share * self.depot.limits.slots
        slots: set[int] = set()
        found: list[Prompt] = []
        for transfer in self._wanted:
            prompt = self._prompts.get(transfer)
            if prompt is None or prompt.offer is None or not self._is_wanted(prompt) or transfer not in rest:
                continue
            is_first = not slots
            slots.update(slot.index for slot in prompt.offer.slots)
            if len(slots) > most and not is_first:
                found.append(prompt)
        return found[::-1]

    def _evict(self, prompt: Prompt, why: str, now: float) -> None:
        self.depot.counts["prompts_evicted"] += 1
        self.remember(prompt, why)
        prompt.fail(why, now, tell=True)
        self.let_go(prompt, now)
        self.depot.grant(now)

    def remember(self, prompt: Prompt, why: str) -> None:
        """It goes before anybody has asked for it: who does yet is told at once."""
        if prompt.expected:
            return
        self._gone[prompt.transfer] = why
        if len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)

    def _refusal(self, conn: int, transfer: str, keys: int) -> str:
        """Why a peer's next context is not taken in; empty: it is."""
        limits = self.depot.limits
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
            most_contexts, most_keys = ALL_PEERS * limits.peer_contexts, ALL_PEERS * limits.peer_keys
            if sum(contexts.values()) < most_contexts and sum(held.values()) <= most_keys:
                return ""
            who = "all peers together"
        else:
            who, most_contexts, most_keys = "one peer", limits.peer_contexts, limits.peer_keys
        self.depot.counts["contexts_refused"] += 1
        return f"{who} may have {most_contexts} contexts of {most_keys} keys here at a time, and no more"

    def let_go(self, prompt: Prompt, now: float) -> None:
        """Its buffers are others'; it stays known as long as its engine has not ended it."""
        self.depot.release(prompt.name, now)
        self.depot.reads.close(prompt.name)
        if not prompt.expected:
            self._prompts.pop(prompt.transfer, None)

    def say(self, conn: int | None, message: Answer) -> None:
        if conn is not None:
            self.depot.actions.append(Send(conn, message))

    def tell(self, prompt: Prompt) -> None:
        """The engine, if it waits."""
        if prompt.state is PromptState.COMPLETE:
            self.depot.counts["prompts_complete"] += 1
        if prompt.expected:
            self._event(prompt)

    def _event(self, prompt: Prompt) -> None:
        complete = prompt.state is PromptState.COMPLETE
        self.depot.events.append(PromptOver(prompt.transfer, complete, prompt.why))

    def _lease(self, prompt: Prompt, keys: Sequence[bytes], extra: int, now: float) -> None:
        prompt.leased = True
        try:
            self.depot.lease(prompt.name, prompt, list(keys), extra, now)
        except TooLarge as error:
            self.depot.counts["too_large"] += 1
            prompt.leased = False
            read, prompt.read = prompt.read, None
            if read is not None:
                self.say(read.conn, Failed(transfer=prompt.transfer, index=0, reason=str(error)))
                if prompt.offer is None and not prompt.expected:
                    del self._prompts[prompt.transfer]
                return
            prompt.fail(str(error), now, tell=True)
