"""The background sender against servers that answer, fail, hang or are absent."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
from scripted_transport import Script, Source
from sojourn import event_sender as event_sender_module
from sojourn.dialect_probe import ServerDialect
from sojourn.event_queue import PendingEvent
from sojourn.event_sender import EventSender
from sojourn.event_transport import SojournEventTransport
from sojourn.http_transport import HttpResponse
from sojourn.stats import Counters
from sojourn.wire_codec import MAX_BATCH_BYTES
from sojourn.wire_events import Heartbeat, ProgramStart, ToolStart
from waiting import wait_until

UNREADABLE = HttpResponse(200, b"<html>\xff")


@pytest.fixture
def senders():
    made = []

    def make(transport, **settings):
        sender = EventSender(transport, Counters(), **settings)
        made.append(sender)
        return sender

    yield make
    for sender in made:
        sender.close(0.1)


def fill(sender, source, count):
    for n in range(count):
        sender.put(source, ToolStart, call_id=f"c{n}", tool="bash")


@pytest.mark.parametrize("seed", range(10))
def test_each_event_of_many_threads_is_sent_taken_or_dropped_once(senders, seed):
    random = Random(seed)
    answers = random.choices([200, 500, OSError(), UNREADABLE], (6, 1, 1, 1), k=8)
    script = Script(*answers)
    sender = senders(script, queue_events=random.choice((20, 10_000)), linger_s=0.0)
    sources = [Source(f"p{n}") for n in range(4)]
    taken, stop, returns = [], threading.Event(), random.random() < 0.7

    def put(source):
        for n in range(300):
            # What cannot be encoded costs only itself.
            tool = random.choice(("bash", "bash", "bash", object(), "\ud800"))
            sender.put(source, ToolStart, call_id=f"c{n}", tool=tool)
            if n % 50 == 0:
                time.sleep(0.001)

    def take():
        while not stop.is_set():
            for source in sources:
                found = sender.take(source.id, max_events=8)
                if returns and random.random() < 0.5:
                    sender.put_back(sender.id, found)
                    continue
                sender.put_back("that of the process before a fork", found)
                taken.extend(each.seq for each in found)

    threads = [threading.Thread(target=put, args=(source,)) for source in sources]
    taker = threading.Thread(target=take)
    for thread in (*threads, taker):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    taker.join()
    sender.flush(30)
    sent = script.events()
    seqs = [event.seq for event in sent]
    assert len({*taken, *seqs}) == len(taken) + len(seqs)
    of_each = [[event.seq for event in sent if event.program_id == source.id] for source in sources]
    assert returns or all(own == sorted(own) for own in of_each)  # a failed batch goes back by program
    assert all(0 <= event.age_s < 60 for event in sent)
    assert all(len(batch.events) <= 256 and batch.emitter == sender.id for batch in script.batches())
    counts = sender.counters
    assert counts["answer_unreadable"] == answers[: len(answers) - len(script.answers)].count(UNREADABLE)
    dropped = sum(counts[name] for name in ("dropped_full", "encode_error", "internal_error"))
    assert len(taken) + len(seqs) + dropped + sender.pending == 1200


def test_a_full_queue_drops_and_counts_the_newest(senders):
    script = Script()
    script.hold.clear()
    sender = senders(script, queue_events=10, batch_events=4)
    source = Source()
    assert sender.put(source, Heartbeat)
    assert script.entered.wait(30)  # the sender is now stuck with the first
    results = [sender.put(source, Heartbeat) for _ in range(15)]
    assert results == [True] * 10 + [False] * 5
    assert sender.counters["dropped_full"] == 5
    assert sender.take("another program", max_events=1) == []  # which looks through all of them
    assert sender.put(source, Heartbeat) is False
    script.hold.set()
    assert sender.flush(30)
    assert [e.seq for e in script.events()] == list(range(11))
    assert script.batches()[-1].dropped == 6


def test_a_failed_batch_is_dropped_and_the_next_one_waits(senders):
    script = Script(500, OSError("gone"), 200)
    sender = senders(script, linger_s=0.0)
    source = Source()
    for _ in range(3):
        sender.put(source, Heartbeat)
        wait_until(lambda: not sender.pending)
    assert [e.seq for e in script.events()] == [0, 1, 2]  # each was tried once
    assert sender.counters["dropped_send"] == 2
    assert sender.counters["http_500"] == sender.counters["net_OSError"] == 1
    first_s, second_s = script.times[1] - script.times[0], script.times[2] - script.times[1]
    assert first_s >= 0.09
    assert second_s >= 0.19


def test_flush_cuts_the_backoff_short_and_reports_loss(senders):
    script = Script(500)
    script.hold.clear()  # until somebody waits: what was lost before a flush is not its loss
    sender = senders(script, linger_s=0.0)
    sender.put(Source(), Heartbeat)
    threading.Timer(0.2, script.hold.set).start()
    assert sender.flush(30) is False  # drained, but lost
    sender.put(Source(), Heartbeat)
    assert sender.flush(30) is True


class Server(ServerDialect):
    """A server that takes events again when ``answers`` says so."""

    def __init__(self, transport, answers=(), was_sojourn=True):
        super().__init__(transport, Counters())
        self.answers, self.was_sojourn, self.asked, self.refusals = list(answers), was_sojourn, 0, 0
        self.known = True
        self.learn("sojourn" if was_sojourn else "vllm")

    def event_transport(self):
        return SojournEventTransport(self._transport, Counters())

    def refused(self):
        self.refusals += 1

    def recover(self):
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_the_endpoint_is_asked_once(senders, status):
    script = Script(status)
    server = Server(script)
    sender = senders(script, server=server)
    source = Source()
    sender.put(source, Heartbeat)
    assert sender.flush(30)
    assert sender.put(source, Heartbeat) is False
    assert len(script.bodies) == 1
    assert server.refusals == 1
    assert sender.counters["dropped_unsupported"] == 1  # the batch counts in the server's own counters
    assert sender.pending == 0


@pytest.mark.parametrize(
    ("was_sojourn", "growing_s"),
    [
        (True, [1, 2, 4, 8, 16, 32, 60, 60]),
        (False, [30, 60, 120, 240, 300, 300]),  # stock vLLM gets few requests
    ],
)
def test_a_server_that_refused_events_is_asked_again_after_growing_pauses(senders, was_sojourn, growing_s):
    """Without a thread: the clock is moved to the end of each pause."""
    now = [0.0]
    server = Server(Script(), was_sojourn=was_sojourn)
    sender = senders(Script(), server=server, clock=lambda: now[0])

    def pauses(count):
        for _ in range(count):
            pause_s = sender._recover()
            assert sender._recover() == pause_s  # not asked before the pause is over
            now[0] += pause_s
            yield pause_s

    sender.set_event_transport(None)
    assert list(pauses(len(growing_s))) == growing_s
    assert server.asked == len(growing_s) - 1
    server.answers = [SojournEventTransport(Script(404), Counters())]
    assert sender._recover() == 0.0  # the heartbeats are looked at next
    pending = [PendingEvent("p", Heartbeat, 0, 0.0, {})]
    assert sender._send(pending)
    assert list(pauses(1)) == growing_s[-1:]  # refused again at once, so the pause does not shrink
    server.answers = [SojournEventTransport(Script(200, 404), Counters())]
    assert sender._recover() == 0.0
    assert sender._send(pending)
    server.was_sojourn = was_sojourn  # the answer has confirmed nothing
    assert sender._send(pending)
    assert list(pauses(1)) == growing_s[:1]


def test_a_sender_whose_question_fails_asks_again(senders, monkeypatch):
    monkeypatch.setattr(event_sender_module, "FIRST_RECOVERY_PAUSE_S", 0.001)
    monkeypatch.setattr(event_sender_module, "MAX_BEATING_BACKOFF_S", 0.001)
    script = Script(404)
    server = Server(script, [OSError(), None, SojournEventTransport(script, Counters())])
    sender = senders(script, server=server)
    assert sender.put(Source(), Heartbeat)
    assert sender.flush(30)
    wait_until(lambda: sender.put(Source(), Heartbeat))
    assert sender.flush(30)
    assert len(script.events()) == 2
    assert sender.counters["internal_error"] == 1


def test_batches_respect_the_wires_size(senders):
    script = Script()
    script.hold.clear()
    sender = senders(script)
    source = Source("p" * 256)
    sender.put(source, Heartbeat)
    assert script.entered.wait(30)
    for n in range(256):
        sender.put(source, ProgramStart, name="é" * 128, agent_type="x" * 256, parent_program_id=f"{n:0256}",
                    root_program_id="r" * 256, call_id="c" * 256)  # fmt: skip
    script.hold.set()
    assert sender.flush(30)
    assert all(len(body) <= MAX_BATCH_BYTES for body in script.bodies)
    assert [e.seq for e in script.events()] == list(range(257))
    assert len(script.bodies) == 3


def test_close_is_bounded_final_and_repeatable(senders):
    script = Script()
    script.hold.clear()
    sender = senders(script)
    sender.put(Source(), Heartbeat)
    started = time.monotonic()
    sender.close(0.2)
    sender.close(0.0)
    assert time.monotonic() - started < 30
    assert sender.put(Source(), Heartbeat) is False
    assert sender.counters["dropped_closed"] == 1
    script.hold.set()


class Beats:
    """Heartbeats whose answers a function gives."""

    def __init__(self, take_due, promised=False):
        self.take_due, self.promised = take_due, promised


def test_no_beat_follows_the_end(senders):
    script = Script()
    source = Source()
    source.is_open = False
    looks = []

    def take_due(now):
        looks.append(now)
        return [source], 0.01

    sender = senders(script, heartbeats=Beats(take_due))
    sender.start()
    wait_until(lambda: len(looks) >= 3)
    assert script.events() == []
    source.is_open = True
    wait_until(script.events)
    assert isinstance(script.events()[0], Heartbeat)


def test_one_failed_start_of_the_thread_is_not_the_end(senders, monkeypatch):
    now = [0.0]
    sender = senders(Script(), clock=lambda: now[0])
    start = threading.Thread.start
    tries = []

    def refuse(self):
        tries.append(self)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(100):
        assert sender.put(Source(), Heartbeat)
    assert sender.counters["thread_start_failed"] == len(tries) == 1  # not tried again with every event
    now[0] += 2
    sender.put(Source(), Heartbeat)
    assert sender.counters["thread_start_failed"] == 2
    monkeypatch.setattr(threading.Thread, "start", start)
    now[0] += 2
    sender.put(Source(), Heartbeat)
    assert sender.flush(60)
    assert sender.counters["events_sent"] == 102


def test_a_promised_heartbeat_bounds_the_backoff(senders, monkeypatch):
    assert event_sender_module.MAX_BEATING_BACKOFF_S <= 5.0
    monkeypatch.setattr(event_sender_module, "FIRST_BACKOFF_S", 30.0)
    monkeypatch.setattr(event_sender_module, "MAX_BEATING_BACKOFF_S", 0.2)
    scripts = {}
    for promised in (False, True):
        scripts[promised] = Script(OSError())
        beats = Beats(lambda now: ((), None), promised)
        sender = senders(scripts[promised], linger_s=0.0, heartbeats=beats)
        sender.put(Source(), Heartbeat)
        wait_until(lambda sender=sender: sender.counters["dropped_send"])
        sender.put(Source(), Heartbeat)
    wait_until(lambda: len(scripts[True].bodies) == 2)
    assert len(scripts[False].bodies) == 1
