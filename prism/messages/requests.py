"""A request and its output: from the frontend through the queue to the engine, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import structs

from prism.messages import Wire
from prism.messages.image_tensors import PromptImage, Tensors
from prism.messages.kv import KvPart, KvTaken

FinishReason = str  # "stop" | "length" | "cancelled"
# Code of a failure: the frontend's heartbeat stopped, so the agent stopped the request.
FRONTEND_SILENT = "frontend_silent"


class Grammar(Wire, frozen=True):
    """Constraint on the output: a JSON schema, a regular expression, a grammar in EBNF, or a
    structural tag (a JSON object that says where in free text a grammar applies)."""

    kind: Literal["json", "regex", "ebnf", "structural_tag"]
    text: str


class Sampling(Wire, frozen=True):
    """Decoding parameters, in OpenAI's terms. `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # tokens before the first stop token
    # Number of most likely tokens with log probabilities, besides the sampled one. None: off.
    logprobs: int | None = None
    prompt_logprobs: bool = False  # also of the prompt's tokens
    grammar: Grammar | None = None


class Resume(Wire, frozen=True):
    """Progress of a request that moved or is sent again in the middle of its output."""

    output_ids: list[int]  # output so far
    # KV of the first `kv_tokens` tokens (prompt, then output): in the file `kv_path`, or offered by
    # each rank of the source at an address.
    kv_path: str = ""
    kv_tokens: int = 0
    kv_offers: tuple[str, ...] = ()
    kv_device: str = ""  # device to resume on, whose machine has the file; empty: any


class Request(Wire, frozen=True):
    """A tokenized request, as it waits in a queue and runs in an engine.

    deadline_unix_s = arrival_unix_s + slo_ttft_s (Prism §6.3).
    """

    id: str
    model: str
    prompt_ids: list[int]
    sampling: Sampling
    arrival_unix_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    frontend_id: str
    priority: int = 0  # waiting requests of higher priority start first
    attempt: int = 1  # incremented when the frontend sends the request again after a failure
    resume: Resume | None = None  # set if the request resumes in the middle of its output
    # Number of output tokens when an engine died that the request may have killed.
    suspected_at: int | None = None
    lora: str = ""  # LoRA adapter of the model; empty: none
    images: tuple[PromptImage, ...] = ()  # in the prompt's order

    @property
    def resumed_tokens(self) -> int:
        """Number of output tokens that came with the request."""
        return len(self.resume.output_ids) if self.resume else 0

    @property
    def known_tokens(self) -> int:
        """Number of tokens of the prompt and of the output that came with the request."""
        return len(self.prompt_ids) + self.resumed_tokens

    @property
    def kv_device(self) -> str:
        """Device on which the request must resume, see `Resume`."""
        return self.resume.kv_device if self.resume else ""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the first output must have log probabilities of the prompt."""
        return self.sampling.prompt_logprobs and not self.resumed_tokens

    @property
    def is_suspect(self) -> bool:
        """True if the request may have killed an engine and has not progressed since."""
        return self.suspected_at is not None and self.resumed_tokens <= self.suspected_at

    @property
    def prefill_tokens(self) -> int:
        """Number of known tokens whose KV did not come with the request."""
        return self.known_tokens - (self.resume.kv_tokens if self.resume else 0)

    def with_tensors(self, known: Mapping[str, Tensors]) -> Request:
        """Returns the request with the tensors of its images. Those not in `known`, by digest, stay
        as they are."""
        full = (
            structs.replace(each, tensors=known.get(each.digest, each.tensors))
            for each in self.images
        )
        return structs.replace(self, images=tuple(full)) if self.images else self

    def without_tensors(self) -> Request:
        """Returns the request as it waits in a queue."""
        bare = (structs.replace(each, tensors={}) for each in self.images)
        return structs.replace(self, images=tuple(bare)) if self.images else self

    @property
    def deadline_unix_s(self) -> float:
        return self.arrival_unix_s + self.slo_ttft_s

    def e2e_deadline_unix_s(self, output_tokens: int) -> float:
        """Returns the time at which the whole output, of this length, is due. If a part came with
        the request, it is the rest that is due from its arrival."""
        rest = output_tokens - self.resumed_tokens
        return self.deadline_unix_s + self.slo_tpot_s * max(0, rest - 1)

    def as_resumed(self, now_unix_s: float) -> Request:
        """Returns the request as resumed in the middle of its output: the next token is due within
        the TPOT SLO."""
        return structs.replace(self, arrival_unix_s=now_unix_s, slo_ttft_s=self.slo_tpot_s)


class Logprobs(Wire, frozen=True):
    """Log probabilities of consecutive tokens, before temperature and after biases and
    penalties."""

    values: list[float] = []
    # For each token: the most likely tokens in descending order, and their values.
    top_ids: list[list[int]] = []
    top_values: list[list[float]] = []

    def part(self, start: int, end: int | None = None) -> Logprobs:
        """Returns those of the tokens from `start` to `end`."""
        cut = slice(start, end)
        return Logprobs(self.values[cut], self.top_ids[cut], self.top_values[cut])

    def extend(self, more: Logprobs) -> None:
        self.values.extend(more.values)
        self.top_ids.extend(more.top_ids)
        self.top_values.extend(more.top_values)


class Chunk(Wire, frozen=True):
    """Tokens of one request from one engine step. The last chunk has a `finish_reason`."""

    request_id: str
    attempt: int
    first_index: int  # position of the first token in the request's output
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of the prompt without its first token
    # Vector of an embedding model, in a chunk without tokens: float32, little-endian.
    embedding: bytes = b""


class Failure(Wire, frozen=True):
    """End of a request that did not finish."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool = False  # the request may be sent again to another engine
    # Set if the engine died: this request may have killed it (after output_tokens), or another did.
    blame: Literal["", "suspect", "other"] = ""
    output_tokens: int = 0


class Started(Wire, frozen=True):
    """Report that an agent gave this attempt to an engine of its device. It comes with the first
    output."""

    request_id: str
    attempt: int
    device: str
    unix_s: float


class EngineOutput(Wire, frozen=True):
    """Output of one or more engine steps."""

    chunks: list[Chunk] = []
    failures: list[Failure] = []
    started: list[Started] = []  # added by the agent
    agent: str = ""  # process of the agent, added by the agent


class KeptAnswer(Wire, frozen=True):
    """Answer for a client that repeats its Idempotency-Key."""

    fingerprint: str  # of the request
    id: str
    created_unix_s: float
    outputs: list[Chunk]  # one chunk for each choice


class Cancel(Wire, frozen=True):
    """Order of a frontend to cancel requests."""

    request_ids: list[str]


class FrontendGone(Wire, frozen=True):
    """Report of the launcher that this frontend's process has ended. The id is not used again."""

    frontend_id: str


class MetricsWanted(Wire, frozen=True):
    """Query of a frontend that is scraped for the metrics of another one."""

    frontend_id: str  # of the scraped one
    names: tuple[str, ...] = ()  # of metrics; empty: all


class FrontendMetrics(Wire, frozen=True):
    """Metrics of one frontend in Prometheus's text format."""

    frontend_id: str
    text: str
    names: tuple[str, ...] = ()


ToFrontend = EngineOutput | MetricsWanted | FrontendMetrics  # first: agents; others: frontends
ToAgent = Cancel | FrontendGone | KvPart | KvTaken  # from a frontend, the launcher, agents
