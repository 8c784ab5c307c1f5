"""Named failures of the serving system.

PrismError
├── ConfigError          wrong YAML or arguments: names the key and the remedy (exit code 2)
│   ├── TraceError       a trace file cannot be replayed: names file, line and key
│   ├── TooLargeError    a model does not fit on the GPUs that it is given
│   └── NotDownloadedError   files of a hub's model are not on this machine
├── RequestError         one request cannot be served; carries an OpenAI error code and HTTP status
│   ├── UnknownModelError
│   ├── ContextLengthError
│   └── BadRequestError
├── EngineError          an engine process failed
│   ├── EngineDiedError
│   ├── RankLostError
│   └── ActivationError
│       └── SelfCheckError
├── ModelSourceError     a model cannot be prepared or downloaded
├── ActionError          an agent could not execute an action of the cluster scheduler
├── PlacementSearchError a placement search failed
├── QueueUnavailableError    Redis cannot be reached
├── MalformedRequestError    entries of a queue are not valid requests
└── LeaseLostError           another agent has taken over this device's queue
"""


class PrismError(Exception):
    """Base of every error that Prism raises on purpose."""


class ConfigError(PrismError):
    """A setting is wrong; the message names the key and what to change."""


class TraceError(ConfigError):
    """A trace cannot be read; the message names file, line and key."""


class TooLargeError(ConfigError):
    """The GPUs of a cluster are too few or too small for a model or the policy. A sweep records
    this as the outcome of a point."""


class NotDownloadedError(ConfigError):
    """A hub's model is not on this machine, or files of it are missing."""


class RequestError(PrismError):
    """A request that cannot be served."""

    code = "invalid_request_error"  # of OpenAI's error object
    status = 400  # of the HTTP response
    param: str | None = None  # field of the body
    retry_after_s: int | None = None  # the Retry-After header


class BadRequestError(RequestError):
    """Malformed body, wrong type or a value out of range."""


class UnknownModelError(RequestError):
    """The model is not in the configuration; the message lists the names that are."""

    code = "model_not_found"
    status = 404


class ContextLengthError(RequestError):
    """Prompt plus max_tokens exceed the model's context; the message says by how many tokens."""

    code = "context_length_exceeded"


KV_MEMORY_EXCEEDED = "kv_memory_exceeded"
"""Error code of a simulated request whose KV does not fit on the devices of an idle engine."""


class EngineError(PrismError):
    """An engine process failed."""


class EngineDiedError(EngineError):
    """The engine process ended while it held requests."""


class RequestsFailedError(EngineError):
    """The engine ended because of requests that have failed with their own errors. Its other
    requests are not to blame."""


class RankLostError(EngineError):
    """A rank of a tensor-parallel engine ended or is out of step, so all its ranks must end."""


class ActivationError(EngineError):
    """A model could not be activated on an engine; the message says what is missing.

    Args:
        missing_bytes: Device memory that must become free first. 0: memory is not the cause.
    """

    def __init__(self, message: str, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class SelfCheckError(ActivationError):
    """The model was loaded but failed its self-check; a fresh engine may succeed."""


class ModelSourceError(PrismError):
    """A model's source is missing or cannot be reached; the message says what to change."""


class ActionError(PrismError):
    """An agent refused or failed an action, did not answer, or has ended; the message says which.

    Args:
        lasting: The same action would fail again, as that of a model that cannot be loaded.
    """

    def __init__(self, message: str, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class PlacementSearchError(PrismError):
    """The process of a placement search failed."""


class QueueUnavailableError(PrismError):
    """Redis does not answer."""


class MalformedRequestError(PrismError):
    """Entries of a device's queue are not valid requests.

    Args:
        entries: Request id and attempt by entry id.
    """

    def __init__(self, entries: dict[str, tuple[str, int]]) -> None:
        super().__init__(f"{len(entries)} entries of the queue are not valid requests")
        self.entries = entries


class LeaseLostError(PrismError):
    """Another agent has taken over this device's queue."""
