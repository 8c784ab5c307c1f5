"""SGLang's scheduler in-process, without sockets, pickle and threads.

Every override below replaces a construction method that SGLang calls from its `__init__`, or a
per-step method. tests/sglang/test_contract.py pins each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
    ScheduleBatch,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.utils.common import DynamicGradMode
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang.srt.utils.watchdog import Watchdog

from kvcached.engines.sglang.retraction import retract_chunked_request
from prism.engines.sglang.grammars.grammar_manager import Grammars
from prism.engines.sglang.scheduling import token_logprobs
from prism.engines.sglang.scheduling.pausing import PausedRequests
from prism.engines.sglang.scheduling.penalties import count_earlier_output
from prism.messages.requests import Logprobs

# Replaces the tokenizer that SGLang reads if `min_tokens` is set; requests have their stop tokens.
_NO_TOKENIZER = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)


@dataclass(frozen=True, slots=True)
class Emission:
    """New tokens of a request."""

    rid: str
    token_ids: list[int]
    finish: str | None  # "stop" | "length" | "abort"; None: the request continues
    message: str = ""
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    embedding: bytes = b""  # float32
    refused: bool = False  # the request is invalid: every engine would reject it


class Outbox(list[Emission]):
    """Replacement of SGLang's senders that stores emissions for the next `take`."""

    def send_output(self, output: Any, recv_obj: object = None) -> None:
        """Stores the abort of a request that never ran, and drops everything else."""
        if isinstance(output, AbortReq):
            reason = output.finished_reason or {}
            self.append(Emission(output.rid, [], "abort", str(reason.get("message", ""))))

    def take(self) -> list[Emission]:
        taken = list(self)
        self.clear()
        return taken


class InProcessStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """Streamer that turns each request's new tokens into an emission instead of a pickled batch."""

    def stream_output(
        self, reqs: Sequence[Req], return_logprob: bool, skip_req: Req | None = None
    ) -> None:
        for req in reqs:
            if req is skip_req or (req.finished() and req.finished_output):
                continue
            emission = _emission(req) if self.is_generation else _embedding(req)
            if emission.token_ids or emission.finish:
                self.send_to_detokenizer.append(emission)


def _emission(req: Req) -> Emission:
    if req.finished():
        req.finished_output = True
        if req.finished_len is None:
            req.finished_len = len(req.output_ids)
    output = req.output_ids_through_stop
    start, req.send_token_offset = req.send_token_offset, len(output)
    reason = req.finished_reason
    finish, message = _finish(reason)
    return Emission(
        rid=req.rid,
        token_ids=list(output[start:]),
        finish=finish,
        message=message,
        cached_tokens=int(req.cached_tokens),
        logprobs=token_logprobs.of_output(req, start, len(output)),
        prompt_logprobs=token_logprobs.of_prompt(req),
        refused=_is_refused(reason),
    )


def _embedding(req: Req) -> Emission:
    """Returns the emission of an embedding request, with the vector once the whole prompt is
    computed."""
    finish, message = _finish(req.finished_reason)
    vector = np.asarray(req.embedding or (), "<f4") if finish == "length" else np.empty(0, "<f4")
    if finish == "length":
        sound = vector.size > 0 and bool(np.isfinite(vector).all())
        finish, message = (
            ("stop", "") if sound else ("abort", "the vector has values beyond float32")
        )
    if finish is not None:
        req.finished_output = True
    cached = int(req.cached_tokens)
    refused = _is_refused(req.finished_reason)
    return Emission(req.rid, [], finish, message, cached, None, None, vector.tobytes(), refused)


def _is_refused(reason: Any) -> bool:
    return isinstance(reason, FINISH_ABORT) and reason.status_code == HTTPStatus.BAD_REQUEST


def _finish(reason: Any) -> tuple[str | None, str]:
    """Returns the finish and a message. A matched string means broken logits, since requests to
    SGLang have no stop strings."""
    match reason:
        case None:
            return None, ""
        case FINISH_LENGTH():
            return "length", ""
        case FINISH_MATCHED_TOKEN():
            return "stop", ""
        case FINISH_ABORT():
            return "abort", str(reason.message)
        case _:
            return "abort", str(reason.to_json())


class InProcessScheduler(Scheduler):  # type: ignore[misc]
    """Scheduler of one model. Thread rule: built and stepped by one thread."""

    retractions_total = 0
    running_batch: Any
    last_batch: Any
    chunked_req: Req | None
    _waited: Sequence[Req] = ()  # waiting requests at the start of the step

    # --- construction without sockets and threads -------------------------------------------

    def init_ipc_channels(self, port_args: Any) -> None:
        self.outbox = Outbox()
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=self.outbox,
            send_to_detokenizer=self.outbox,
            send_metrics_from_scheduler=None,
        )
        self.recv_from_tokenizer = None
        self.load_snapshot_writer = None

    def init_idle_sleeper(self) -> None:
        self.idle_sleeper = None

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        # SGLang's watchdog thread never ends and would keep this scheduler and its weights alive.
        self.watchdog = Watchdog.create("Scheduler", None)
        self.memory_saver_adapter = TorchMemorySaverAdapter.create(
            enable=get_exec().features.enable_memory_saver
        )
        self.recv_skipper = None
        self.input_blocker = None

    def init_request_receiver(self) -> None:
        self.request_receiver = None

    def init_grammar_manager(self) -> None:
        self.grammar_manager = Grammars(self)

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return InProcessStreamer

    def _create_generation_req(self, recv_req: Any, *args: Any, **kwargs: Any) -> Req:
        """Creates a request. A request that ignores end-of-sequence still ends at its own stop
        tokens; SGLang would ignore both."""
        params = recv_req.sampling_params
        if params.ignore_eos and params.stop_token_ids:
            params.ignore_eos = False
            kwargs["eos_token_ids"] = None
        return super()._create_generation_req(recv_req, *args, **kwargs)

    # --- one step ---------------------------------------------------------------------------

    def start(self) -> None:
        """Does the steps of SGLang's event loop before its first iteration."""
        # Enables sampling with each request's own seed. As a start-up argument it would also
        # disable the prefix cache, for reproducible logits that seeds do not need.
        get_context().override("prism.seeds", enable_deterministic_inference=True)
        self.tokenizer = _NO_TOKENIZER
        self._war_barrier_enabled = False
        self.schedule_stream.synchronize = lambda: None
        self.metrics_reporter.start_scheduler_time_accounting()
        self.paused = PausedRequests(self)

    @DynamicGradMode()  # type: ignore[untyped-decorator]
    def step(self) -> Any:
        """Runs one iteration of SGLang's normal event loop. Returns the batch that ran, or None."""
        # Memory may have become free on the device since the last step; SGLang itself waits only
        # for the end of one of its requests.
        self.running_batch.batch_is_full = False
        if self.paused:
            self.paused.put_back()
        self.cur_batch_for_debug, self._waited = None, self.waiting_reqs()
        plan = self.get_next_batch_to_run(
            running_batch=self.running_batch, last_batch=self.last_batch
        )
        self.running_batch = plan.running_batch
        batch = plan.batch_to_run
        self.cur_batch_for_debug = batch
        if batch:
            if batch.forward_mode == ForwardMode.EXTEND:
                count_earlier_output(batch)
            self.process_batch_result(batch, self.run_batch(batch))
            self.grammar_manager.flush()
        else:
            if self.waiting_reqs():
                self.paused.retract_last()  # a prompt may wait for its memory or place
            self._sched_idled = True
            self.on_idle()  # SGLang checks that no slot is lost when it is idle
        self.last_batch = batch
        self.token_to_kv_pool_allocator.return_held_blocks()
        return batch

    def update_running_batch(self, batch: Any) -> Any:
        while self.paused and not batch.check_decode_mem() and self.paused.retract_last():
            pass
        retract_chunked_request(self, batch)
        return super().update_running_batch(batch)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.retractions_total += is_retracted
        if not self.paused.keep(req):
            super()._add_request_to_queue(req, is_retracted)

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        """Returns whether no request is open. SGLang then checks that all KV is free."""
        return not self.paused and super().is_fully_idle(for_health_check, ignore_waiting)

    # --- calls of the engine core -----------------------------------------------------------

    def is_idle(self) -> bool:
        """Returns whether there is nothing to compute: all open requests are paused."""
        return not self.paused.any_resumed() and super().is_fully_idle()

    def pause(self, rids: Sequence[str]) -> None:
        """Takes requests out of the next steps. REQUIRES: they are not cancelled."""
        self.paused.pause(rids)

    def resume(self, rids: Sequence[str]) -> None:
        """Lets the next step with places for these requests continue them."""
        self.paused.resume(rids)

    def cancel(self, rid: str) -> None:
        """Cancels a request. A running one frees its pages in its next step."""
        if self.paused.drop(rid):
            self.outbox.append(Emission(rid, [], "abort"))
        else:
            self.abort_request(AbortReq(rid=rid))

    def drop_all(self) -> None:
        """Removes all requests and frees their KV, also after a step that raised an error, without
        emissions. REQUIRES: no grammar is being compiled."""
        reqs = {id(req): req for req in (*self.stepping_reqs(), *self.open_reqs())}
        for req in reqs.values():
            if req.kv.holds_kv or req.kv.holds_mamba:
                release_kv_cache(req, self.tree_cache, checkpoint=False)
        self.waiting_queue.clear()
        self.paused.clear()
        self.chunked_req = self.last_batch = self.cur_batch_for_debug = None
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.token_to_kv_pool_allocator.return_held_blocks()
        self.outbox.clear()

    def find(self, rid: str) -> Req | None:
        """Returns an open request in any state between two steps, None if it has ended."""
        return next((req for req in self.open_reqs() if req.rid == rid), None)

    def open_reqs(self) -> Iterator[Req]:
        """Yields all open requests in any state between two steps, some of them twice."""
        batches = [b.reqs for b in (self.running_batch, self.last_batch) if b is not None]
        for reqs in (*batches, self.waiting_reqs(), self.compiling_reqs(), self.paused):
            yield from (req for req in reqs if not req.finished())

    @staticmethod
    def prefill_left(req: Req) -> int:
        """Returns the number of tokens to compute before the request's next token, without regard
        to tokens that the prefix cache may gain."""
        return len(req.origin_input_ids) + len(req.output_ids) - int(req.prefix_len or 0)

    def stepping_reqs(self) -> list[Req]:
        """Returns the requests of an unfinished step: those of its batch. Planning a batch takes
        memory too; before it is complete these are the requests taken from the queue, or the head
        of the queue."""
        if self.cur_batch_for_debug:
            return list(self.cur_batch_for_debug.reqs)
        taken = [req for req in self._waited if req not in self.waiting_queue]
        return taken or list(self._waited[:1])

    def waiting_reqs(self) -> list[Req]:
        """Returns requests whose prompt is not computed yet, including the one in chunks."""
        chunked = self.chunked_req
        return [*self.waiting_queue, *([] if chunked is None else [chunked])]

    def compiling_reqs(self) -> list[Req]:
        """Returns requests that wait for their grammar."""
        return list(self.grammar_manager.grammar_queue)
