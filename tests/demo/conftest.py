"""Restores the environment after each test, because the demo sets variables of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield
