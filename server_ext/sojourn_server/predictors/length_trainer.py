"""The length trainer: learns output lengths from hidden states. It uses no thread and no clock."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .length_network import LengthNetwork, bin_of, quantiles_of_bins

MAX_STATES_PER_REQUEST = 16
"""Maximum number of hidden states kept per output. The kept states are a random sample."""

MAX_REQUESTS = 4096
MAX_RUNNING_STATES_BYTES = 256 << 20
"""Maximum size in bytes of the hidden states of running outputs (``MAX_REQUESTS`` limits their number). The
least recently seen outputs are dropped."""

MAX_EXAMPLES = 8192
MAX_EXAMPLES_BYTES = 64 << 20
"""Maximum size in bytes of the training examples (``MAX_EXAMPLES`` limits their number). The newest are kept,
which are enough to adapt after a change of load."""

BATCH_SIZE = 64
MEAN_EXAMPLE_USES = 24
"""Mean number of times that an example is used in training. A higher number would overfit."""

MIN_EXAMPLES = 2 * BATCH_SIZE
"""Minimum number of kept examples for training. Predictions begin after training on as many examples."""

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2


@dataclass(slots=True)
class _RunningOutput:
    """A running output: its kept hidden states, and the number of tokens generated at each."""

    seen: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


class LengthTrainer:
    """Learns and predicts the output lengths of one model. Not thread-safe.

    ``network``: a trained network to start with; ``None``: a new network."""

    def __init__(self, hidden_size: int, *, network: LengthNetwork | None = None, seed: int = 0) -> None:
        self.hidden_size = hidden_size
        self.network = network if network is not None else LengthNetwork(hidden_size, seed=seed)
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self._running: OrderedDict[str, _RunningOutput] = OrderedDict()
        self._max_running_outputs = min(
            MAX_REQUESTS, max(1, MAX_RUNNING_STATES_BYTES // (4 * hidden_size * MAX_STATES_PER_REQUEST))
        )
        most = max(BATCH_SIZE, min(MAX_EXAMPLES, MAX_EXAMPLES_BYTES // (4 * hidden_size)))
        # The operating system allocates these pages only when they are written.
        self._states = torch.empty(most, hidden_size)
        self._written = torch.empty(most, dtype=torch.long)
        self._bins = torch.empty(most, dtype=torch.long)
        self.examples = 0
        """Number of examples received so far; the newest are kept."""
        self.is_pretrained = network is not None
        """Whether predictions are made before any training, because a trained network was loaded."""
        self.batches = 0
        self.skipped = 0
        """Number of hidden states left out because they were not finite."""
        self._due = 0.0
        """Number of batches still to be trained, possibly fractional, since an example adds part of a
        batch."""

    @property
    def kept(self) -> int:
        """Number of examples kept for training."""
        return min(self.examples, len(self._states))

    @property
    def due(self) -> bool:
        """Whether enough examples are kept, and training has not caught up with the new ones."""
        return self._due >= 1.0 and self.kept >= MIN_EXAMPLES

    def observe_and_predict(
        self, requests: Sequence[tuple[str, int]], states: torch.Tensor, points: int
    ) -> dict[str, tuple[float, ...]]:
        """Record one hidden state per request, and predict how many tokens each request will still generate.

        ``requests`` are pairs of an id and the number of tokens generated so far. Returns ``points`` equally
        likely numbers of remaining tokens per id. Before enough training the result is empty. A request whose
        hidden state is not finite is left out. Raises ``ValueError`` unless ``states`` has one row per
        request, of the model's hidden size.
        """
        if states.shape != (len(requests), self.hidden_size):
            raise ValueError(
                f"hidden states of shape {tuple(states.shape)}; expected {(len(requests), self.hidden_size)}"
            )
        states = states.float()
        finite = torch.isfinite(states).all(dim=1)
        rows = [row for row, good in enumerate(finite.tolist()) if good]
        self.skipped += len(requests) - len(rows)
        for row in rows:
            self._keep(*requests[row], states[row])
        if not rows or not (self.is_pretrained or self.batches * BATCH_SIZE >= MIN_EXAMPLES):
            return {}
        written = torch.tensor([requests[row][1] for row in rows])
        with torch.inference_mode():
            probabilities = torch.softmax(self.network(states[rows], written), dim=1)
            predicted = quantiles_of_bins(probabilities, points)
        if not bool(torch.isfinite(predicted).all()):
            self._reset_network()
            return {}
        return {
            requests[row][0]: tuple(lengths) for row, lengths in zip(rows, predicted.tolist(), strict=True)
        }

    def ended(self, request_id: str, tokens: int) -> None:
        """Learn from an output that has ended with ``tokens`` tokens."""
        output = self._running.pop(request_id, None)
        if output is None:
            return
        before = [place for place, written in enumerate(output.written) if written < tokens]
        if not before:
            return
        written = torch.tensor([output.written[place] for place in before])
        places = (torch.arange(len(before)) + self.examples) % len(self._states)
        self._states[places] = torch.stack([output.states[place] for place in before])
        self._written[places] = written
        self._bins[places] = bin_of(tokens - written)
        self.examples += len(before)
        self._due = min(
            self._due + len(before) * MEAN_EXAMPLE_USES / BATCH_SIZE,
            MEAN_EXAMPLE_USES * len(self._states) / BATCH_SIZE,
        )

    def output_aborted(self, request_id: str) -> None:
        """Drop the states of an output that was aborted, since its length is unknown."""
        self._running.pop(request_id, None)

    def train(self) -> float | None:
        """Train one batch if one is due. Returns its loss in nats; ``None`` if no batch was due, or if the
        loss is not finite. In the latter case the network starts again with new weights."""
        if not self.due:
            return None
        self._due -= 1.0
        rows = torch.randint(self.kept, (BATCH_SIZE,), generator=self._generator)
        scores = self.network(self._states[rows], self._written[rows])
        loss = torch.nn.functional.cross_entropy(scores, self._bins[rows])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.batches += 1
        if not bool(torch.isfinite(loss)):
            self._reset_network()
            return None
        return float(loss.detach())

    def _keep(self, request_id: str, written: int, state: torch.Tensor) -> None:
        output = self._running.get(request_id)
        if output is None:
            output = self._running[request_id] = _RunningOutput()
            if len(self._running) > self._max_running_outputs:
                self._running.popitem(last=False)
        else:
            self._running.move_to_end(request_id)
        output.seen += 1
        if len(output.states) < MAX_STATES_PER_REQUEST:
            output.states.append(state.clone())
            output.written.append(written)
            return
        # Reservoir sampling: each state seen is equally likely to be kept.
        place = self._random.randrange(output.seen)
        if place < MAX_STATES_PER_REQUEST:
            output.states[place], output.written[place] = state.clone(), written

    def _reset_network(self) -> None:
        """Start again with new weights, since weights that are not finite never recover."""
        self.network = LengthNetwork(self.hidden_size, seed=self._seed)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self.is_pretrained, self.batches = False, 0
        self._due = self.kept * MEAN_EXAMPLE_USES / BATCH_SIZE
