"""A request and its output: frontend to queue to engine, and back."""

from __future__ import annotations

from typing import Literal

from msgspec import structs

from prism.messages import Wire
from prism.messages.kv import KvPart, KvTaken

FinishReason = str  # "stop" | "length" | "cancelled"
# A failure's code: an agent stopped the request because its frontend showed no life.
FRONTEND_SILENT = "frontend_silent"


class Grammar(Wire, frozen=True):
    """What the output must match: a JSON schema, a regular expression, a grammar in EBNF, or a
    structural tag (a JSON object that says where in free text a grammar holds)."""

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
    min_tokens: int = 0  # no stop token comes before
    # None: no log probabilities. Otherwise those of each token and of so many of the likeliest.
    logprobs: int | None = None
    prompt_logprobs: bool = False  # of the prompt's tokens, too
    grammar: Grammar | None = None


class Resume(Wire, frozen=True):
    """Where a request goes on that moved, or is sent again, in the middle of its output.

    The KV of its first `kv_tokens` tokens (prompt, then output) comes with it: in a file, or
    offered by each rank of the source at an address.
    """

    output_ids: list[int]  # its output so far
    kv_path: str = ""
    kv_tokens: int = 0
    kv_offers: tuple[str, ...] = ()
    kv_device: str = ""  # where it is to go on, since its file is on that machine; empty: anywhere


class Request(Wire, frozen=True):
    """A tokenised request, as it waits in a queue and runs in an engine.

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
    priority: int = 0  # waiting requests of a higher one start first
    attempt: int = 1  # grows when the frontend sends the request again after a failure
    resume: Resume | None = None  # set if the request goes on in the middle of its output
    # Output tokens that it had when an engine died that it may have killed.
    suspected_at: int | None = None
    lora: str = ""  # the model's adapter that computes it; empty: none

    @property
    def resumed_tokens(self) -> int:
        """Tokens of the output that came with the request."""
        return len(self.resume.output_ids) if self.resume else 0

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and of the output that came with the request."""
        return len(self.prompt_ids) + self.resumed_tokens

    @property
    def kv_device(self) -> str:
        """See `Resume`."""
        return self.resume.kv_device if self.resume else ""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They come with the first output."""
        return self.sampling.prompt_logprobs and not self.resumed_tokens

    @property
    def is_suspect(self) -> bool:
        """It may have killed an engine, and has come no further since."""
        return self.suspected_at is not None and self.resumed_tokens <= self.suspected_at

    @property
    def prefill_tokens(self) -> int:
        """Known tokens whose KV does not come with the request."""
        return self.known_tokens - (self.resume.kv_tokens if self.resume else 0)

    @property
    def deadline_unix_s(self) -> float:
        return self.arrival_unix_s + self.slo_ttft_s

    def going_on(self, now_unix_s: float) -> Request:
        """The same, in the middle of its output: its next token is due within the TPOT SLO."""
        return structs.replace(self, arrival_unix_s=now_unix_s, slo_ttft_s=self.slo_tpot_s)


class Logprobs(Wire, frozen=True):
    """Log probabilities of tokens in a row: before temperature, behind biases and penalties."""

    values: list[float] = []
    # Of each token: the likeliest ones, the first most, and theirs.
    top_ids: list[list[int]] = []
    top_values: list[list[float]] = []

    def part(self, start: int, end: int | None = None) -> Logprobs:
        cut = slice(start, end)
        return Logprobs(self.values[cut], self.top_ids[cut], self.top_values[cut])

    def extend(self, more: Logprobs) -> None:
        self.values.extend(more.values)
        self.top_ids.extend(more.top_ids)
        self.top_values.extend(more.top_values)


class Chunk(Wire, frozen=True):
    """Tokens of one request from one engine step. A chunk with a `finish_reason` is its last."""

    request_id: str
    attempt: int
    first_index: int  # position of the first token in the request's output
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # behind the prompt's first token
    # The whole answer of an embedding model, beside no tokens: float32, little-endian.
    embedding: bytes = b""


class Failure(Wire, frozen=True):
    """A request ended without finishing."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool = False  # another engine may serve the request again
    # Its engine died: this request may have killed it (when it had output_tokens), or another has.
    blame: Literal["", "suspect", "other"] = ""
    output_tokens: int = 0


class Started(Wire, frozen=True):
    """An agent gave this attempt to an engine of its device. It comes with the first output."""

    request_id: str
    attempt: int
    device: str
    unix_s: float


class EngineOutput(Wire, frozen=True):
    """What one or more engine steps produced. `started`, `agent`: added by the agent."""

    chunks: list[Chunk] = []
    failures: list[Failure] = []
    started: list[Started] = []
    agent: str = ""  # the process


class KeptAnswer(Wire, frozen=True):
    """What a client that sends its Idempotency-Key again gets. fingerprint: of its request."""

    fingerprint: str
    id: str
    created_unix_s: float
    # Of each choice, as its only chunk.
    outputs: list[Chunk]


class Cancel(Wire, frozen=True):
    request_ids: list[str]


class FrontendGone(Wire, frozen=True):
    """The process of this frontend has ended; its id is not used again."""

    frontend_id: str


class MetricsWanted(Wire, frozen=True):
    """Another frontend is scraped, and wants the answer. `names`: of metrics; none: of all."""

    frontend_id: str
    names: tuple[str, ...] = ()


class FrontendMetrics(Wire, frozen=True):
    """The metrics of one frontend, as text for Prometheus."""

    frontend_id: str
    text: str
    names: tuple[str, ...] = ()


ToFrontend = EngineOutput | MetricsWanted | FrontendMetrics  # from an agent | from a frontend
ToAgent = Cancel | FrontendGone | KvPart | KvTaken  # a frontend's | the launcher's | agents'
