"""Speeds and faults of the fake engine, from the environment."""

from __future__ import annotations

import os

import msgspec

from prism.config.checks.memory_needs import GpuNeeds
from prism.config.schema.machines import is_gpu
from prism.engines.timeline import claim_fault
from prism.errors import ConfigError

VARIABLE = "PRISM_FAKE"


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options in PRISM_FAKE. With `once_file` only one fault happens."""

    # Rate at which tokens of prefill and decode are computed; 0: no delay.
    prefill_tokens_per_s: float = 0.0
    # Time of a step in addition to its tokens.
    decode_step_ms: float = 0.0
    # Each rank above 0 makes steps faster by this part of the speed of one rank.
    rank_speedup: float = 0.0
    # Time of an activation's "weights" stage.
    activation_s: float = 0.0
    # Output tokens are in [first, second).
    vocabulary: tuple[int, int] = (32, 96)
    # True to load the model's files through the weight store like a real engine.
    load_weights: bool = False
    # True to serve also on cuda devices, whose memory the CPU accesses through the test libcuda.
    cpu_reads_gpu: bool = False
    # Planned size of a CUDA context.
    context_bytes: int = 0
    # Number of output tokens after which the engine kills itself with SIGKILL.
    die_at_token: int | None = None
    # Number of output tokens after which `step` raises an exception.
    raise_at_token: int | None = None
    # The engine kills itself when it produces a token for a prompt that has this token.
    die_on_prompt_token: int | None = None
    # Models whose activation fails; "*" means all.
    fail_activation: tuple[str, ...] = ()
    # Models whose activation kills the engine after their memory is reserved.
    die_in_activation: tuple[str, ...] = ()
    # Models that fail their self-check on an engine that has served another model.
    fail_reuse: tuple[str, ...] = ()
    # Device memory that an activation takes outside of every lease.
    leak_bytes: int = 0
    # Device memory that the engine takes outside of every lease at its start.
    leak_idle_bytes: int = 0
    # File that the first fault creates. No fault happens while it exists.
    once_file: str | None = None

    @classmethod
    def from_environment(cls) -> FakeOptions:
        """Parses PRISM_FAKE. Raises ConfigError that names the wrong field."""
        text = os.environ.get(VARIABLE, "{}")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from error

    def claim_fault(self) -> bool:
        """Returns whether a fault may happen now; see `timeline.claim_fault`."""
        return claim_fault(self.once_file)


def needs(device: str) -> GpuNeeds:
    """Returns the context size that a test plans; the engine has neither torch nor kernels."""
    return GpuNeeds(FakeOptions.from_environment().context_bytes if is_gpu(device) else 0)
