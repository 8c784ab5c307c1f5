"""The tests of packages build wheels and environments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")


@pytest.fixture(scope="package", autouse=True)
def unoptimised() -> Iterator[None]:
    """Compiles kvcached in less time. scripts/install compiles it as it is released."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKBUILD_CMAKE_DEFINE", "CMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG")
        yield
