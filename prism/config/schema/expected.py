"""Section of the YAML for the traffic that is expected of a model."""

from __future__ import annotations

from prism.config.schema.machines import Strict
from prism.errors import ConfigError


class ExpectedYaml(Strict, frozen=True):
    """The traffic that is expected of a model."""

    # Requests per second.
    rate: float
    # The mean number of tokens of a prompt.
    prompt_tokens: float
    # The mean number of tokens of an answer.
    output_tokens: float

    def check(self, key: str) -> None:
        """Raises ConfigError for a value that is not a rate or a length."""
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"{key}.rate: {self.rate} must be 0 or more requests per second")
        for name in ("prompt_tokens", "output_tokens"):
            tokens = getattr(self, name)
            if not 1 <= tokens < float("inf"):
                raise ConfigError(f"{key}.{name}: {tokens} must be at least 1")
