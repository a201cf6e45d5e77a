"""The suite of ``headrace.Loader`` has a command of its own, ``make test-loader``, while the Loader is not finished."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("loader")
