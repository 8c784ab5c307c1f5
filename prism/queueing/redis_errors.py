"""Errors of Redis and of the connection to it, translated into those of the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from prism.errors import LeaseLostError, QueueUnavailableError

# A full disk, missing replicas, a failover (two codes), a foreign script, a lack of rights.
_OUTAGES = ("MISCONF", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN", "BUSY", "NOPERM")


@contextmanager
def queue_errors() -> Iterator[None]:
    """Raises QueueUnavailableError or LeaseLostError for what these mean in Redis's answer."""
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise QueueUnavailableError(f"Redis does not answer: {error}") from error
    except (
        exceptions.OutOfMemoryError,
        exceptions.ReadOnlyError,
        exceptions.NoPermissionError,
    ) as error:
        raise QueueUnavailableError(f"Redis takes no writes: {error}") from error
    except exceptions.ResponseError as error:
        if str(error).startswith("LEASELOST"):
            raise LeaseLostError(str(error).removeprefix("LEASELOST ")) from error
        if str(error).startswith(_OUTAGES):
            raise QueueUnavailableError(f"Redis takes no writes: {error}") from error
        raise
