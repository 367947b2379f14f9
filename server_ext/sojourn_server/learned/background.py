"""The student in a thread of its own, with a bounded share of one core: the engine only leaves it notes."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .student import Student
from .weights_file import load_weights, save_weights

logger = logging.getLogger("vllm.sojourn")

SHARE = 0.01
"""Of one core, for all of it: guessing and training."""
BURST_S = 0.25
"""Of its share, what it may save up while there is nothing to do, and the most that it owes."""
CREDIT_S = 0.05
"""What it may owe and yet guess: hidden states come in bursts."""
WAITING_NOTES = 64
"""More are not kept: a student that falls behind misses something rather than hold memory."""
NICENESS = 10
SAVE_EVERY_S = 300.0
STOP_WITHIN_S = 2.0


class Guess(NamedTuple):
    """What a request was expected to write yet when it had written ``at_tokens``."""

    at_tokens: int
    remaining: tuple[float, ...]


class _Seen(NamedTuple):
    requests: Sequence[tuple[str, int]]
    states: torch.Tensor


class _Ended(NamedTuple):
    request_id: str
    tokens: int | None
    """``None``: broken off."""


class Background:
    """One engine's. No method waits for the thread, but for ``stop``; what fails in it ends guesses, and
    nothing else. Raises ``WeightsError`` for a ``file`` that is not of ``model``."""

    def __init__(
        self,
        hidden_size: int,
        *,
        model: str,
        points: int,
        file: Path | None = None,
        share: float = SHARE,
    ) -> None:
        network = load_weights(file, model=model, hidden_size=hidden_size) if file is not None else None
        self._student = Student(hidden_size, network=network)
        self._model = model
        self._points = points
        self._file = file
        self._share = share
        self._notes: queue.Queue[_Seen | _Ended | None] = queue.Queue(WAITING_NOTES)
        self._guesses: dict[str, Guess] = {}
        self._lock = threading.Lock()
        """Of guesses: held for as long as it takes to put one dictionary into another."""
        self.missed = 0
        """Notes that found no place, or no time."""
        self.spent_s = 0.0
        """Of processor time."""
        self.loss: float | None = None
        self._saved_examples = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="sojourn-lengths", daemon=True)
        self._thread.start()

    # -- the engine's side ----------------------------------------------------------

    def see(self, requests: Sequence[tuple[str, int]], states: torch.Tensor) -> None:
        """A hidden state each of ``requests``, named with the tokens they had written; see ``Student``."""
        self._leave(_Seen(requests, states))

    def ended(self, request_id: str, tokens: int | None) -> None:
        """An output of so many tokens came to its end; ``None``: it was broken off."""
        self._leave(_Ended(request_id, tokens))

    def guesses(self) -> dict[str, Guess]:
        """By request, the newest since the last time."""
        if not self._guesses:
            return {}
        with self._lock:
            taken, self._guesses = self._guesses, {}
        return taken

    def state(self) -> dict[str, float | None]:
        """What it has done so far."""
        student = self._student
        return {
            "examples": float(student.examples),
            "batches": float(student.batches),
            "loss": self.loss,
            "skipped_states": float(student.skipped),
            "missed_notes": float(self.missed),
            "seconds": self.spent_s,
        }

    def stop(self) -> None:
        """Save and end; waits a moment at most."""
        self._stopping = True
        with contextlib.suppress(queue.Full):
            self._notes.put_nowait(None)
        self._thread.join(STOP_WITHIN_S)

    def _leave(self, note: _Seen | _Ended) -> None:
        if self._stopping:
            return
        try:
            self._notes.put_nowait(note)
        except queue.Full:
            self.missed += 1

    # -- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux counts niceness by thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        # Of this thread, and of those that torch is first used in later: one core, not all.
        torch.set_num_threads(1)
        try:
            self._work()
        except Exception as error:
            logger.error(
                "sojourn: what learns output lengths from hidden states has failed (%s); "
                "predictions go on without it",
                error,
                exc_info=error,
            )
            self._stopping = True
        with contextlib.suppress(queue.Empty):
            while True:  # nobody reads them any more
                self._notes.get_nowait()
        with self._lock:
            self._guesses = {}

    def _work(self) -> None:
        student = self._student
        woke_s = saved_s = time.monotonic()
        allowed_s = 0.0
        trained = True
        """Since hidden states were taken in: where time is short the two take turns."""
        while not self._stopping:
            trains = student.due and allowed_s > 0.0
            note = self._next(wait_s=0.0 if trains else 0.05 if student.due else 1.0)
            now_s, used_s = time.monotonic(), time.thread_time()
            allowed_s = min(allowed_s + self._share * (now_s - woke_s), BURST_S)
            woke_s = now_s
            if isinstance(note, _Ended):
                self._learn(note)
            elif isinstance(note, _Seen):
                if allowed_s < -CREDIT_S or (student.due and not trained):
                    self.missed += 1
                else:
                    self._guess(note)
                    trained = False
            if student.due and allowed_s - (time.thread_time() - used_s) > 0.0:
                loss = student.train()
                trained = True
                if loss is not None:
                    self.loss = loss if self.loss is None else self.loss + 0.02 * (loss - self.loss)
            # Of the processor, and not of the wall: others may have had it meanwhile.
            used_s = time.thread_time() - used_s
            self.spent_s += used_s
            allowed_s = max(allowed_s - used_s, -BURST_S)
            if now_s - saved_s >= SAVE_EVERY_S:
                saved_s = now_s
                self._save()
        self._save()

    def _next(self, wait_s: float) -> _Seen | _Ended | None:
        try:
            return self._notes.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _learn(self, note: _Ended) -> None:
        if note.tokens is None:
            self._student.gone(note.request_id)
        else:
            self._student.ended(note.request_id, note.tokens)

    def _guess(self, note: _Seen) -> None:
        likely = self._student.see(note.requests, note.states, self._points)
        written = dict(note.requests)
        new = {request_id: Guess(written[request_id], left) for request_id, left in likely.items()}
        with self._lock:
            self._guesses.update(new)
            while len(self._guesses) > 4096:  # nobody takes them
                self._guesses.pop(next(iter(self._guesses)))

    def _save(self) -> None:
        if self._file is None or self._student.examples == self._saved_examples:
            return
        try:
            save_weights(
                self._file, self._student.network, model=self._model, examples=self._student.examples
            )
        except OSError as error:
            logger.warning("sojourn: %s not saved: %s", self._file, error)
        self._saved_examples = self._student.examples
