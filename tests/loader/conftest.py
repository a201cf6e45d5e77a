"""The suite of ``headrace.Loader`` has a command of its own, ``make test-loader``, while the Loader is not finished."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("loader")


@pytest.fixture
def keep_generators() -> Iterator[None]:
    """What a test draws from the global generators, no other test misses."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
