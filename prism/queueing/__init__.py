"""Request queues in Redis, and the bundled server that holds them."""

from prism.queueing.request_queue import UNPLACED, RequestQueue
from prism.queueing.server import BundledRedis

__all__ = ["UNPLACED", "BundledRedis", "RequestQueue"]
