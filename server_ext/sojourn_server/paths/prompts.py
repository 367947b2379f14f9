"""Contexts that are gathered here for the engine that goes on with them: a peer reads and pushes into them.

The engine says that it expects a transfer before or after anything has come of it, takes its blocks when all
are there, and lets go of it. While it waits, what counts is progress: of an answer that never comes it learns
soon. ``prompt`` says how one is gathered.
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

MOST_EVICTED = 4096
"""Transfers of which it is remembered that their buffers were given to others."""
EVICTED = "nobody had asked for it, and others waited for its buffers"


class Prompts:
    """All contexts that are gathered here."""

    def __init__(self, depot: Depot) -> None:
        self.depot = depot
        self._prompts: dict[str, Prompt] = {}
        self._evicted: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

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
        if transfer in self._evicted:  # it is told at once: nothing comes of it
            del self._evicted[transfer]
            prompt.state, prompt.why = PromptState.FAILED, EVICTED
        self.depot.buffers.renew(prompt.name, now)
        if prompt.state is not PromptState.GATHERING:
            self._event(prompt)

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
        self._evicted.pop(message.transfer, None)
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
        if prompt is not None and prompt.leased:
            prompt.watch.seen(now)
            prompt.take_offer(half, now)
            return
        if prompt is None:
            self._evicted.pop(message.transfer, None)
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
        prompt = self._prompts.get(transfer)
        if prompt is not None and conn in prompt.conns() and not prompt.claimed:
            prompt.watch.told(done, now)
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
        for prompt in list(self._prompts.values()):
            if prompt.state is not PromptState.GATHERING:
                continue
            if prompt.waits_here and prompt.watch.told(done, now, by="here"):
                self.depot.buffers.renew(prompt.name, now)
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
        for _, prompt in sorted(left, key=lambda each: each[0]):
            if not depot.buffers.waiting:
                return
            depot.counts["prompts_evicted"] += 1
            self._evicted[prompt.transfer] = None
            if len(self._evicted) > MOST_EVICTED:
                self._evicted.popitem(last=False)
            prompt.fail(EVICTED, now, tell=True)
            self.let_go(prompt, now)
            depot.grant(now)

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
