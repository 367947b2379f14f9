"""The logits processor against hand-made batches; the engine itself is in tests/engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sojourn_server.vllm.forced_tokens import ForcedTokens
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

pytestmark = pytest.mark.slow

VOCABULARY = 20


def params(ids=None):
    return SimpleNamespace(extra_args=None if ids is None else {"replay_ids": ids})


class Batch:
    """The persistent batch as model runner V1 keeps it: rows, and one update a step."""

    def __init__(self, processor) -> None:
        self.processor = processor
        self.outputs: dict[int, list[int]] = {}

    def update(self, *, removed=(), added=(), moved=()):
        entries = []
        for row, ids in added:
            output: list[int] = []
            self.outputs[row] = output
            entries.append((row, params(ids), [], output))
        self.processor.update_state(BatchUpdate(batch_size=4, removed=removed, added=entries, moved=moved))

    def step(self, rows=4):
        logits = torch.arange(rows * VOCABULARY, dtype=torch.float32).reshape(rows, VOCABULARY)
        return self.processor.apply(logits).argmax(dim=1).tolist()


FREE = VOCABULARY - 1  # what the logits above choose by themselves


@pytest.fixture
def batch():
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
    return Batch(ForcedTokens(config, torch.device("cpu"), False))


def test_each_row_follows_its_own_ids_then_goes_free(batch):
    batch.update(added=[(0, [3, 4]), (2, [5]), (3, None)])
    assert batch.step() == [3, FREE, 5, FREE]
    batch.outputs[0].append(3)
    batch.outputs[2].append(5)
    batch.processor.update_state(None)
    assert batch.step() == [4, FREE, FREE, FREE]
    assert not batch.processor.is_argmax_invariant()


def test_rows_are_removed_reused_moved_and_swapped(batch):
    batch.update(added=[(0, [1]), (1, [2]), (2, [3])])
    batch.update(moved=[(0, 1, MoveDirectionality.SWAP)])
    assert batch.step() == [2, 1, 3, FREE]
    batch.update(removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert batch.step() == [3, 1, FREE, FREE]
    batch.update(added=[(1, None)])
    assert batch.step() == [3, FREE, FREE, FREE]
    batch.update(moved=[(3, 0, MoveDirectionality.UNIDIRECTIONAL)])  # a free row replaces a forced one
    assert batch.step() == [FREE] * 4


def test_a_resumed_request_goes_on_where_it_was_and_an_id_beyond_the_vocabulary_ends_the_forcing(batch):
    batch.update(added=[(0, [3, VOCABULARY, 4]), (1, [3, 4, 5])])
    batch.outputs[1].extend([3, 4])
    assert batch.step()[:2] == [3, 5]
    batch.outputs[0].append(3)
    assert batch.step()[0] == FREE


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ("1,2", "is a str"),
        ([], "at least one"),
        ([1, True], r"\[1\] is True"),
        ([1.0], r"\[0\] is 1.0"),
        ([0, -1], r"\[1\] is -1"),
    ],
)
def test_bad_ids_are_refused_with_the_reason(ids, said):
    with pytest.raises(ValueError, match=said):
        ForcedTokens.validate_params(params(ids))
