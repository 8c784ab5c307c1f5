"""Named failures of the serving system.

PrismError
├── ConfigError          the user's YAML or arguments: names the key and the remedy (exit code 2)
│   ├── TraceError       a trace file cannot be replayed: names file, line and key
│   └── TooLargeError    a model does not fit on the GPUs that it is given
├── RequestError         one request cannot be served; carries an OpenAI error code and HTTP status
│   ├── UnknownModelError
│   ├── ContextLengthError
│   └── BadRequestError
├── EngineError          an engine process failed
│   ├── EngineDiedError
│   ├── RankLostError
│   └── ActivationError
│       └── SelfCheckError
├── ModelSourceError     a model cannot be prepared: its source is not installed
├── ActionError          an agent could not carry out what the cluster scheduler asked for
├── QueueUnavailableError    Redis cannot be reached
├── MalformedRequestError    entries of a queue are no requests
└── LeaseLostError           another agent holds this device's queue
"""


class PrismError(Exception):
    """Base of every error that Prism raises on purpose."""


class ConfigError(PrismError):
    """A setting is wrong; the message names the key and what to change."""


class TraceError(ConfigError):
    """A trace cannot be read; the message names file, line and key."""


class TooLargeError(ConfigError):
    """A cluster's GPUs are too few or too small for a model or the policy; in a sweep that is the
    outcome of a point."""


class RequestError(PrismError):
    """A request that cannot be served. `code`, `status` and `param` (the body's field) go out in
    OpenAI's error shape."""

    code = "invalid_request_error"
    status = 400
    param: str | None = None
    retry_after_s: int | None = None


class BadRequestError(RequestError):
    """Malformed body, wrong type or a value out of range."""


class UnknownModelError(RequestError):
    """The model is not in the configuration; the message lists the names that are."""

    code = "model_not_found"
    status = 404


class ContextLengthError(RequestError):
    """Prompt plus max_tokens exceed the model's context; the message says by how many tokens."""

    code = "context_length_exceeded"


class EngineError(PrismError):
    """An engine process failed."""


class EngineDiedError(EngineError):
    """The engine process ended while it held requests."""


class RequestsFailedError(EngineError):
    """An engine ends through requests that have failed by name; its others are not to blame."""


class RankLostError(EngineError):
    """A rank of a tensor-parallel engine ended or went out of step; so must the others."""


class ActivationError(EngineError):
    """A model could not be brought up on an engine; the message says what is missing.

    missing_bytes: device memory that would have to become free first (0: memory is not the cause).
    """

    def __init__(self, message: str, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class SelfCheckError(ActivationError):
    """The model came up on an engine but is not right there; a fresh engine may do better."""


class ModelSourceError(PrismError):
    """A model's source is missing; the message says what to install."""


class ActionError(PrismError):
    """An agent refused or failed an action, did not answer, or is gone; the message says which."""


class QueueUnavailableError(PrismError):
    """Redis does not answer."""


class MalformedRequestError(PrismError):
    """Entries of a device's queue are no requests. `entries`: entry id -> request id, attempt."""

    def __init__(self, entries: dict[str, tuple[str, int]]) -> None:
        super().__init__(f"{len(entries)} entries of the queue are no requests")
        self.entries = entries


class LeaseLostError(PrismError):
    """Another agent took over this device's queue."""
