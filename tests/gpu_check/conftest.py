"""The tests of `scripts/gpu-check` compile doubles and start engines."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")
