"""Speeds and faults of the fake engine, from the environment."""

from __future__ import annotations

import os

import msgspec

from prism.engines import faults
from prism.errors import ConfigError

VARIABLE = "PRISM_FAKE"


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speeds: decode_step_ms per step and prefill_tokens_per_s for every token that it computes (0:
    no delay), activation_s.

    vocabulary: output tokens lie in [first, second). load_weights: load the model's files through
    the weight store, as a real engine does. cpu_reads_gpu: serve on cuda devices too, whose memory
    the CPU can read and write, as that of the test libcuda.
    Faults: die_at_token (SIGKILL to itself when it has produced that many tokens), raise_at_token
    (an exception in step), fail_activation (names of models, or ["*"]), die_in_activation (names
    of models, with their memory reserved), fail_reuse (names of models that fail their self-check
    on an engine that has served another one). once_file: the first fault creates this file, and no
    fault happens while it exists.
    """

    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    activation_s: float = 0.0
    vocabulary: tuple[int, int] = (32, 96)
    load_weights: bool = False
    cpu_reads_gpu: bool = False
    die_at_token: int | None = None
    raise_at_token: int | None = None
    fail_activation: tuple[str, ...] = ()
    die_in_activation: tuple[str, ...] = ()
    fail_reuse: tuple[str, ...] = ()
    once_file: str | None = None

    @classmethod
    def from_environment(cls) -> FakeOptions:
        """Raises ConfigError that names the wrong field."""
        text = os.environ.get(VARIABLE, "{}")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from error

    def claim_fault(self) -> bool:
        """Whether a fault may happen now."""
        return faults.claim(self.once_file)
