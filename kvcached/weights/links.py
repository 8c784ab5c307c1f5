"""Ways from host memory into a device: pinned buffers and streams, or just threads."""

from __future__ import annotations

from collections.abc import Sequence

from kvcached import _core
from kvcached.checks import positive
from kvcached.errors import ClosedError

STAGING_BYTES = 32 << 20  # of each link, as in Prism §5.2


class WeightLinks:
    """Made by `Client.open_weight_links`; kept from load to load, so that memory is pinned once.

    One load at a time uses them. Thread rule: any thread.
    """

    def __init__(
        self,
        client: _core.Client,
        others: Sequence[_core.Client] = (),
        *,
        threads: int = 4,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._core: _core.WeightLinks | None = _core.WeightLinks.open(
            client,
            list(others),
            positive("threads", threads),
            positive("staging_bytes", staging_bytes),
        )

    @property
    def core(self) -> _core.WeightLinks:
        """For kvcached's own use."""
        if self._core is None:
            raise ClosedError("the links are closed; open others")
        return self._core

    def close(self) -> None:
        """Gives buffers and leases back, once the load that uses them is done."""
        self._core = None
