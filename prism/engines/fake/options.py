"""Speeds and faults of the fake engine, from the environment."""

from __future__ import annotations

import os

import msgspec

from prism.config.machines import is_gpu
from prism.config.memory import GpuNeeds
from prism.engines.timeline import claim_fault
from prism.errors import ConfigError

VARIABLE = "PRISM_FAKE"


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault happens once where `once_file` is given."""

    # For every token that it computes; 0: no delay.
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    activation_s: float = 0.0
    # Output tokens lie in [first, second).
    vocabulary: tuple[int, int] = (32, 96)
    # Load the model's files through the weight store, as a real engine does.
    load_weights: bool = False
    # Serve on cuda devices, too, whose memory the CPU reaches through the test libcuda.
    cpu_reads_gpu: bool = False
    # What is planned for a CUDA context.
    context_bytes: int = 0
    # SIGKILL to itself, or an exception in step, when it has produced that many tokens.
    die_at_token: int | None = None
    raise_at_token: int | None = None
    # SIGKILL to itself when it produces a token of a request whose prompt has this one.
    die_on_prompt_token: int | None = None
    # Models whose activation fails ("*": all), or kills the engine with their memory reserved.
    fail_activation: tuple[str, ...] = ()
    die_in_activation: tuple[str, ...] = ()
    # Models that fail their self-check on an engine that has served another one.
    fail_reuse: tuple[str, ...] = ()
    # Device memory that is taken outside of every lease: at an activation, at the engine's start.
    leak_bytes: int = 0
    leak_idle_bytes: int = 0
    # The first fault creates this file, and no fault happens while it exists.
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
        return claim_fault(self.once_file)


def needs(device: str) -> GpuNeeds:
    """What a test plans for a context; it has no torch and no kernels."""
    return GpuNeeds(FakeOptions.from_environment().context_bytes if is_gpu(device) else 0)
