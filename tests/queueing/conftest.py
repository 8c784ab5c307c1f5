"""A queue on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from prism.queueing import BundledRedis, RequestQueue


@pytest.fixture
async def queue(redis_server: BundledRedis, namespace: str) -> AsyncIterator[RequestQueue]:
    queue = RequestQueue.connect(redis_server.url, namespace)
    yield queue
    await queue.close()
