"""Triton's attention, with the whole window in decode steps.

SGLang leaves out the oldest key there (its pull request 32087), unlike in prefills and in its other
backends.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend


class TritonAttention(TritonAttnBackend):  # type: ignore[misc]
    """Triton's attention. `sliding_window_size` is the number of keys that windows keep: in decode
    steps with the current token, else of those before the new tokens."""

    sliding_window_size: int | None

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        self._tokens_before = self.sliding_window_size or 0

    def _set_window(self, *, with_current: bool) -> None:
        if self._tokens_before > 0:
            self.sliding_window_size = self._tokens_before + with_current

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._set_window(with_current=forward_batch.forward_mode.is_decode_or_idle())
        super().init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> None:
        self._set_window(with_current=True)
        super().init_cuda_graph_state(*args, **kwargs)

    def _init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool) -> Any:
        self._set_window(with_current=forward_batch.forward_mode.is_decode_or_idle())
        return super()._init_forward_metadata_out_graph(forward_batch, in_capture)
