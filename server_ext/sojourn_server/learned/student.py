"""What learns: hidden states of requests under way, their lengths once they have ended, a network between.

No thread and no clock: ``background`` has them.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .bins import bin_of, quantiles
from .network import LengthNetwork

STATES_A_REQUEST = 16
"""Hidden states kept of one output, however long: a sample of all of them."""

MAX_REQUESTS = 4096
UNDER_WAY_BYTES = 256 << 20
"""Outputs under way that are remembered, and their size; of more those not seen for longest are forgotten."""

MAX_EXAMPLES = 8192
EXAMPLES_BYTES = 64 << 20
"""Examples kept, and their size: the newest. A load that changes is learned anew within as many."""

BATCH = 64
USES = 24
"""Times an example is trained on, on average: of more it is learned by heart."""

LEAST_EXAMPLES = 2 * BATCH
"""Below, nothing is guessed: a network that has seen nothing guesses nonsense."""

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2


@dataclass(slots=True)
class _Output:
    """One that is being written: states, and how much was written at each."""

    seen: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


class Student:
    """Learns one model's output lengths. ``network`` None: a new one. Not safe for several threads."""

    def __init__(self, hidden_size: int, *, network: LengthNetwork | None = None, seed: int = 0) -> None:
        self.hidden_size = hidden_size
        self.network = network if network is not None else LengthNetwork(hidden_size, seed=seed)
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self._under_way: OrderedDict[str, _Output] = OrderedDict()
        self._most_under_way = min(
            MAX_REQUESTS, max(1, UNDER_WAY_BYTES // (4 * hidden_size * STATES_A_REQUEST))
        )
        most = max(BATCH, min(MAX_EXAMPLES, EXAMPLES_BYTES // (4 * hidden_size)))
        # Not touched, and so not in memory, before they are written.
        self._states = torch.empty(most, hidden_size)
        self._written = torch.empty(most, dtype=torch.long)
        self._bins = torch.empty(most, dtype=torch.long)
        self.examples = 0
        """Taken in so far; the newest are kept."""
        self.guesses_soon = network is not None
        """A network that was loaded has learned already."""
        self.batches = 0
        self.skipped = 0
        """Hidden states that were not finite."""
        self._due = 0.0
        """Batches that are yet to be trained."""

    @property
    def kept(self) -> int:
        """Examples that it trains on."""
        return min(self.examples, len(self._states))

    @property
    def due(self) -> bool:
        """Whether there is anything new to be trained on."""
        return self._due >= 1.0 and self.kept >= LEAST_EXAMPLES

    def see(
        self, requests: Sequence[tuple[str, int]], states: torch.Tensor, points: int
    ) -> dict[str, tuple[float, ...]]:
        """Take in a hidden state of each of ``requests``, named with the tokens it had written; returns what
        each will yet write, as ``points`` equally likely numbers. Who has none that is finite is left out.

        Raises ``ValueError`` unless ``states`` is of one row a request, of the model's hidden size.
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
        if not rows or not (self.guesses_soon or self.batches * BATCH >= LEAST_EXAMPLES):
            return {}
        written = torch.tensor([requests[row][1] for row in rows])
        with torch.inference_mode():
            likely = torch.softmax(self.network(states[rows], written), dim=1)
            guessed = quantiles(likely, points)
        if not bool(torch.isfinite(guessed).all()):
            self._start_again()
            return {}
        return {requests[row][0]: tuple(lengths) for row, lengths in zip(rows, guessed.tolist(), strict=True)}

    def ended(self, request_id: str, tokens: int) -> None:
        """The output has come to its end, of ``tokens`` tokens."""
        output = self._under_way.pop(request_id, None)
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
        self._due = min(self._due + len(before) * USES / BATCH, USES * len(self._states) / BATCH)

    def gone(self, request_id: str) -> None:
        """The output was broken off: how long it would have been is not known."""
        self._under_way.pop(request_id, None)

    def train(self) -> float | None:
        """One batch, if any is due: its loss, in nats. ``None``: nothing to do, or all in vain."""
        if not self.due:
            return None
        self._due -= 1.0
        rows = torch.randint(self.kept, (BATCH,), generator=self._generator)
        scores = self.network(self._states[rows], self._written[rows])
        loss = torch.nn.functional.cross_entropy(scores, self._bins[rows])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.batches += 1
        if not bool(torch.isfinite(loss)):
            self._start_again()
            return None
        return float(loss.detach())

    def _keep(self, request_id: str, written: int, state: torch.Tensor) -> None:
        output = self._under_way.get(request_id)
        if output is None:
            output = self._under_way[request_id] = _Output()
            if len(self._under_way) > self._most_under_way:
                self._under_way.popitem(last=False)
        else:
            self._under_way.move_to_end(request_id)
        output.seen += 1
        if len(output.states) < STATES_A_REQUEST:
            output.states.append(state.clone())
            output.written.append(written)
            return
        # A sample of all so far: each of the states seen is as likely to be among those kept.
        place = self._random.randrange(output.seen)
        if place < STATES_A_REQUEST:
            output.states[place], output.written[place] = state.clone(), written

    def _start_again(self) -> None:
        """Weights that are not finite never heal."""
        self.network = LengthNetwork(self.hidden_size, seed=self._seed)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self.guesses_soon, self.batches = False, 0
        self._due = self.kept * USES / BATCH
