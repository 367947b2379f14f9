"""Any bytes from outside end in a value or in a documented, short error.

By default some 60 examples of each kind of input are tried, the same in each run of CI. Longer:

    python -m pytest tests/fuzz --hypothesis-profile=long
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from decoder import Decoder, large_inputs, trial_inputs
from engine_decoders import ENGINE_DECODERS
from gateway_decoders import GATEWAY_DECODERS
from hypothesis import HealthCheck, given, settings
from sdk_decoders import SDK_DECODERS

DECODERS: dict[str, Decoder] = {**ENGINE_DECODERS, **GATEWAY_DECODERS, **SDK_DECODERS}
MAX_MESSAGE_CHARS = 1000
"""Longest text of an error. The longest ones list the fields or names that were expected."""
MAX_LARGE_S = 10.0
"""CPU seconds for an input of 64 KiB. The slowest takes a tenth; work in its square would take minutes."""


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return DECODERS[request.param]


class Trial:
    """Decodes in a folder that is emptied each time, and checks what comes of it."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder = decoder
        self.folder = folder / "decoded"

    def __call__(self, data: bytes, *, valid: bool = False) -> Any:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        try:
            return self.decoder.decode(data, self.folder)
        except self.decoder.errors as error:
            if valid:
                raise
            text = str(error)
        assert text.strip(), "an error without a text"
        assert len(text) <= MAX_MESSAGE_CHARS, text[:300]
        return None


def test_valid_input_is_read_and_refused_input_is_not(decoder: Decoder, tmp_path: Path) -> None:
    trial = Trial(decoder, tmp_path)
    for example in decoder.examples:
        data = decoder.wrap(example) if decoder.wrap is not None else example
        value = trial(data, valid=True)
        if decoder.encode is not None:
            assert trial(decoder.encode(value), valid=True) == value
    for data in decoder.refused:
        with pytest.raises(decoder.errors):
            trial(data, valid=True)


def test_any_input_ends_in_a_value_or_a_documented_error(decoder: Decoder, tmp_path: Path) -> None:
    trial = Trial(decoder, tmp_path)

    @settings(suppress_health_check=list(HealthCheck), max_examples=max(1, settings().max_examples * 6 // 10))
    @given(trial_inputs(decoder))
    def run(data: bytes) -> None:
        value = trial(data)
        if value is not None and decoder.encode is not None:
            again = trial(decoder.encode(value))
            assert again == value or repr(again) == repr(value), "NaN differs from itself"

    run()


def test_large_input_takes_bounded_time(decoder: Decoder, tmp_path: Path) -> None:
    trial = Trial(decoder, tmp_path)
    for name, data in large_inputs(decoder.examples[0], decoder.large_bytes).items():
        data = decoder.wrap(data) if decoder.wrap is not None else data
        began = time.process_time()
        trial(data)
        assert time.process_time() - began < MAX_LARGE_S, name
