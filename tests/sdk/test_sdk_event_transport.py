"""Events to servers without the sojourn plugin."""

from __future__ import annotations

import json

import pytest
import sojourn
from json_handler import HandlerServer, JsonHandler
from scripted_transport import Script
from sojourn import event_sender, runtime
from sojourn.dialects import DIALECTS
from sojourn.event_queue import PendingEvent
from sojourn.event_transport import MAX_PROGRAMS, DeliveryResult, EndNotifier, PendingBatch
from sojourn.stats import Counters
from sojourn.wire_events import ProgramEnd, ProgramStart
from waiting import wait_until


class JsonServer(HandlerServer):
    """A server that is not sojourn. It answers POST with ``status``; ``posts`` has path, body and
    ``Authorization`` of each."""

    def __init__(self):
        self.status, self.posts = 200, []
        outer = self

        class Handler(JsonHandler):
            def do_GET(self):
                self.answer({}, 404)

            def do_POST(self):
                outer.posts.append((self.path, self.read_json(), self.headers.get("authorization")))
                self.answer({}, outer.status)

        super().__init__(Handler)

    @property
    def bodies(self):
        return [body for _, body, _ in self.posts]


ENDS = {name: dialect.end for name, dialect in DIALECTS.items() if dialect.end is not None}


@pytest.mark.parametrize("name", ENDS)
def test_only_the_end_of_a_program_is_sent_at_the_latest_by_the_close_or_a_second_init(name):
    path, field = ENDS[name]
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect=name, api_key="key")
        with sojourn.program(id="left open"):
            with sojourn.program(id="прог"), sojourn.tool_call("bash"):
                pass
            assert sojourn.flush(60)
            assert peer.posts == [(path, {field: "прог"}, "Bearer key")]
            stats = sojourn.stats()
            assert stats["events_sent"] == 1
            assert stats["dropped_unsupported"] == 4  # starts, which are only remembered, and the tool's
            sojourn.init(peer.url, dialect=name, hosts=["10.0.0.9:8000"])
            assert peer.bodies[1:] == [{field: "left open"}]
            sojourn.shutdown()
            assert peer.bodies[2:] == [{field: "left open"}], "it went on in the second session"


def ended(script):
    """The ids that a transport was told, in order."""
    return [json.loads(body)["id"] for body in script.bodies]


def batch(*events):
    pendings = [PendingEvent(id, kind, seq, 0.0, {}) for seq, (id, kind) in enumerate(events)]
    return PendingBatch("e", pendings, 1.0)


def test_an_end_that_failed_is_tried_again_with_the_next():
    script, counters = Script(500, 500), Counters()
    ends = EndNotifier(script, counters, "/x", "id")
    assert ends.deliver(batch(("a", ProgramEnd), ("b", ProgramEnd))) is DeliveryResult.FAILED
    assert counters["dropped_send"] == 2
    assert counters["http_500"] == 1  # a server that fails is not asked twice in a row
    assert ends.deliver(batch(("c", ProgramStart))) is DeliveryResult.FAILED
    assert ends.deliver(batch(("c", ProgramEnd))) is DeliveryResult.ACCEPTED
    assert sorted(ended(script)[2:]) == ["a", "b", "c"]
    assert counters["events_sent"] == 1
    assert counters["dropped_unsupported"] == 1


def test_the_close_stops_at_the_first_failure_and_what_is_remembered_is_bounded():
    script = Script(OSError("gone"))
    ends = EndNotifier(script, Counters(), "/x", "id")
    ends.deliver(batch(*((f"p{n}", ProgramStart) for n in range(MAX_PROGRAMS + 50))))
    ends.close()
    assert ended(script) == ["p50"]
    ends.close()
    assert len(ended(script)) == 1 + MAX_PROGRAMS


@pytest.mark.parametrize("name", [*ENDS, "sojourn"])
def test_a_server_whose_endpoint_is_missing_for_a_moment_gets_events_again(name, monkeypatch):
    monkeypatch.setattr(event_sender, "FIRST_RECOVERY_PAUSE_S", 0.001)
    with JsonServer() as peer:
        peer.status = 404
        sojourn.init(peer.url, dialect=name)
        with sojourn.program():
            pass
        sojourn.flush(60)
        assert len(peer.posts) == 1, "no further event before the pause"
        peer.status = 200
        wait_until(lambda: runtime.session().event_sender.supported)
        with sojourn.program(id="later"):
            pass
        assert sojourn.flush(60)
        assert len(peer.posts) >= 2
        assert "later" in str(peer.bodies[-1])
