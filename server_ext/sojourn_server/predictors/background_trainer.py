"""Trains and runs the length network in a thread of its own, with a limited share of one core."""

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

from .length_network import load_weights, save_weights
from .length_trainer import LengthTrainer

logger = logging.getLogger("vllm.sojourn")

CPU_SHARE = 0.01
"""Share of one core that predicting and training may use together."""
BURST_S = 0.25
"""Maximum processor seconds that the thread may save up for later. The thread may overdraw its share by the
same maximum."""
CREDIT_S = 0.05
"""The thread still predicts if it has overdrawn its share by at most this many processor seconds. Hidden
states come in bursts."""
MAX_QUEUED_MESSAGES = 64
"""Maximum number of queued messages. If the thread is slow, new messages are dropped, to bound the memory."""
NICENESS = 10
SAVE_INTERVAL_S = 300.0
STOP_TIMEOUT_S = 2.0


class LengthPrediction(NamedTuple):
    """Prediction of how many output tokens a request will still generate. ``remaining``: equally likely
    numbers of further tokens, ascending. ``at_tokens``: number of tokens generated before the prediction."""

    at_tokens: int
    remaining: tuple[float, ...]


class _HiddenStatesObserved(NamedTuple):
    requests: Sequence[tuple[str, int]]
    states: torch.Tensor


class _OutputEnded(NamedTuple):
    request_id: str
    tokens: int | None
    """Final length of the output; ``None``: the output was aborted."""


class BackgroundTrainer:
    """Runs the length trainer of one engine in a thread.

    The engine sends messages to the thread with ``queue_hidden_states`` and ``ended``, and fetches
    predictions with ``take_predictions``. Only ``stop`` waits for the thread's work. After an error the
    thread ends and there are no more predictions, but the engine goes on.

    ``points`` is the number of values in a prediction. The weights are loaded from ``file`` and saved to it;
    ``None``: neither loaded nor saved. ``share`` is the thread's share of one core. Raises ``WeightsError``
    if ``file`` cannot be read, has another format, or has weights of a model other than ``model``.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        model: str,
        points: int,
        file: Path | None = None,
        share: float = CPU_SHARE,
    ) -> None:
        network = load_weights(file, model=model, hidden_size=hidden_size) if file is not None else None
        self._trainer = LengthTrainer(hidden_size, network=network)
        self._model = model
        self._points = points
        self._file = file
        self._share = share
        self._messages: queue.Queue[_HiddenStatesObserved | _OutputEnded | None] = queue.Queue(
            MAX_QUEUED_MESSAGES
        )
        self._predictions: dict[str, LengthPrediction] = {}
        self._lock = threading.Lock()
        """Guards ``_predictions``. It is held only while predictions are added or taken."""
        self.missed = 0
        """Number of messages dropped because the queue was full or the processor time was used up."""
        self.spent_s = 0.0
        """Processor seconds that the thread has used so far."""
        self.loss: float | None = None
        self._saved_examples = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="sojourn-lengths", daemon=True)
        self._thread.start()

    # -- the engine's side ----------------------------------------------------------

    def queue_hidden_states(self, requests: Sequence[tuple[str, int]], states: torch.Tensor) -> None:
        """Queue hidden states for the thread: one row of ``states`` for each of ``requests``.

        ``requests`` are pairs of a request id and the number of tokens generated so far."""
        self._enqueue(_HiddenStatesObserved(requests, states))

    def ended(self, request_id: str, tokens: int | None) -> None:
        """Queue the end of an output for the thread. ``tokens``: final length of the output; ``None``: the
        output was aborted."""
        self._enqueue(_OutputEnded(request_id, tokens))

    def take_predictions(self) -> dict[str, LengthPrediction]:
        """Return the new predictions since the last call: the latest of each request, by request id."""
        if not self._predictions:
            return {}
        with self._lock:
            taken, self._predictions = self._predictions, {}
        return taken

    def state(self) -> dict[str, float | None]:
        """Return the counters, the used processor seconds and the training loss, by name.

        The loss is a moving average; ``None`` before training."""
        trainer = self._trainer
        return {
            "examples": float(trainer.examples),
            "batches": float(trainer.batches),
            "loss": self.loss,
            "skipped_states": float(trainer.skipped),
            "missed_notes": float(self.missed),
            "seconds": self.spent_s,
        }

    def stop(self) -> None:
        """End the thread, which first saves the weights. Waits for at most ``STOP_TIMEOUT_S``."""
        self._stopping = True
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _enqueue(self, message: _HiddenStatesObserved | _OutputEnded) -> None:
        if self._stopping:
            return
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self.missed += 1

    # -- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # on Linux niceness is per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        # Limits torch to one core in this thread, and in threads that first use torch later.
        torch.set_num_threads(1)
        try:
            self._work()
        except Exception as error:
            logger.error(
                "sojourn: the output-length network failed (%s); predictions continue without it",
                error,
                exc_info=error,
            )
            self._stopping = True

    def _work(self) -> None:
        trainer = self._trainer
        woke_s = saved_s = time.monotonic()
        allowed_s = 0.0
        trained = True
        """Whether the thread has trained since its last prediction. If time is short, predicting and training
        alternate."""
        while not self._stopping:
            trains = trainer.due and allowed_s > 0.0
            message = None
            with contextlib.suppress(queue.Empty):
                message = self._messages.get(timeout=0.0 if trains else 0.05 if trainer.due else 1.0)
            now_s, used_s = time.monotonic(), time.thread_time()
            allowed_s = min(allowed_s + self._share * (now_s - woke_s), BURST_S)
            woke_s = now_s
            if isinstance(message, _OutputEnded):
                trainer.ended(*message)
            elif isinstance(message, _HiddenStatesObserved):
                if allowed_s < -CREDIT_S or (trainer.due and not trained):
                    self.missed += 1
                else:
                    self._predict(message)
                    trained = False
            if trainer.due and allowed_s - (time.thread_time() - used_s) > 0.0:
                loss = trainer.train()
                trained = True
                if loss is not None:
                    self.loss = loss if self.loss is None else self.loss + 0.02 * (loss - self.loss)
            # Processor time is charged, not wall time, since other threads may have run meanwhile.
            used_s = time.thread_time() - used_s
            self.spent_s += used_s
            allowed_s = max(allowed_s - used_s, -BURST_S)
            if now_s - saved_s >= SAVE_INTERVAL_S:
                saved_s = now_s
                self._save()
        self._save()

    def _predict(self, message: _HiddenStatesObserved) -> None:
        predicted = self._trainer.observe_and_predict(message.requests, message.states, self._points)
        written = dict(message.requests)
        new = {name: LengthPrediction(written[name], left) for name, left in predicted.items()}
        with self._lock:
            self._predictions.update(new)

    def _save(self) -> None:
        if self._file is None or self._trainer.examples == self._saved_examples:
            return
        try:
            save_weights(
                self._file, self._trainer.network, model=self._model, examples=self._trainer.examples
            )
        except OSError as error:
            logger.warning("sojourn: %s not saved: %s", self._file, error)
        self._saved_examples = self._trainer.examples
