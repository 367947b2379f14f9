"""A transport for the sender that answers from a list."""

from __future__ import annotations

import threading
import time

from sojourn.http_transport import HttpResponse
from sojourn.wire_codec import OutcomeBatch, decode_batch, decode_event, encode


class Source:
    """An open program, as the sender sees it."""

    is_open = True
    implicit = False

    def __init__(self, id="p"):
        self.id = id


class Script:
    """A transport that answers from a list, then with 200. ``hold`` keeps the sender inside a send."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []
        self.times = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Event()

    def post(self, path, body):
        self.times.append(time.monotonic())
        self.bodies.append(body)
        self.entered.set()
        self.hold.wait(30)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, HttpResponse) else HttpResponse(answer, encode(OutcomeBatch()))

    def get(self, path, timeout_s):
        raise OSError

    def after_fork(self):
        pass

    def close(self):
        pass

    def batches(self):
        return [decode_batch(body) for body in self.bodies]

    def events(self):
        return [decode_event(raw) for batch in self.batches() for raw in batch.events]
