"""SGLang's grammar manager with grammars that are matched in separate processes
(`grammar_process`).

A request waits in SGLang's queue of grammars until its first mask is known. After that, the process
computes the next mask while the model computes the next logits. A step waits for masks at most
`STEP_S_MAX`. Rank 0 of a tensor-parallel engine matches for all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from http import HTTPStatus
from socket import socket
from typing import Any, NamedTuple

import torch
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    GrammarRow,
)
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from prism.engines.sglang.grammars import grammar_process
from prism.engines.sglang.grammars.grammar_client import GrammarProcesses, Slot
from prism.engines.sglang.grammars.grammar_process import (
    FAILED,
    LOST,
    NOTHING_MATCHES,
    OK,
    REJECTED,
)

# Limit for a machine without free CPU time. Otherwise `MATCH_CPU_S` ends the wait earlier.
STEP_S_MAX = 0.5
# Time for which SGLang polls for ready grammars in each step.
_POLL_S = 0.001
_TIMED_OUT = "Grammar preprocessing timed out"
_MATCH_MS = 1000 * grammar_process.MATCH_CPU_S


class Fault(NamedTuple):
    """Error that ends a request because of its grammar."""

    text: str
    code: HTTPStatus


_FAULTS = {
    REJECTED: Fault("the output does not match the grammar", HTTPStatus.INTERNAL_SERVER_ERROR),
    NOTHING_MATCHES: Fault(
        "no token of the model can follow the output in its grammar", HTTPStatus.BAD_REQUEST
    ),
    FAILED: Fault(
        f"its grammar takes more than {_MATCH_MS:g} ms of CPU time, or too much memory, to match"
        " one token of this output; simplify the grammar",
        HTTPStatus.BAD_REQUEST,
    ),
    LOST: Fault("the process of its grammar has ended", HTTPStatus.SERVICE_UNAVAILABLE),
}


class Grammars(GrammarManager):  # type: ignore[misc]
    """Grammar manager of one scheduler. Thread rule: the engine's thread."""

    SGLANG_GRAMMAR_POLL_INTERVAL: float  # s
    SGLANG_GRAMMAR_MAX_POLL_ITERATIONS: int

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        # SGLang gives up on a grammar after a number of polls. The total time is unchanged.
        wait_s = self.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS * self.SGLANG_GRAMMAR_POLL_INTERVAL
        self.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = round(wait_s / _POLL_S)
        self.SGLANG_GRAMMAR_POLL_INTERVAL = _POLL_S
        self.grammar_backend = _Backend(self)
        self.processes: GrammarProcesses | None = None

    def serve_from(self, server: socket) -> None:
        """Sets the server of grammar processes (`grammar_process.start`), on rank 0."""
        if self.is_grammar_sync_entry:
            model = self.scheduler.model_config
            path, vocab_size = str(model.model_path), int(model.vocab_size)
            self.processes = GrammarProcesses(server, path, vocab_size)

    def get_ready_grammar_requests(self) -> list[Req]:
        ready: list[Req] = super().get_ready_grammar_requests()
        outcomes = self._shared([_outcome(req.grammar) for req in ready])
        for req, (fault, stop_ids) in zip(ready, outcomes, strict=True):
            _mark_timeout_retryable(req)
            if not isinstance(req.grammar, ProcessGrammar):
                continue
            if fault is not None:
                req.set_finish_with_abort(*fault)
            else:
                req.grammar.begin(req, stop_ids)
        return ready

    def flush(self) -> None:
        """Sends the tokens of this step, so that the next masks are computed during the next
        step."""
        if self.processes is not None:
            self.processes.flush()

    def fill(self, rows: Sequence[GrammarRow], masks: torch.Tensor) -> None:
        """Fills the masks of a step. A request whose mask is not available ends with this step."""
        statuses = torch.zeros(len(rows), dtype=torch.int32)
        if self.processes is not None:
            slots = [row.grammar.slot for row in rows]
            self.processes.wait(slots, STEP_S_MAX)
            statuses = torch.tensor([slot.status for slot in slots], dtype=torch.int32)
            for row, slot in zip(rows, slots, strict=True):
                if slot.status == OK:
                    masks[row.row].copy_(slot.mask)
        if self.grammar_sync_size > 1:
            for shared in (statuses, masks):
                torch.distributed.broadcast(
                    shared, self.grammar_sync_entry, group=self.grammar_sync_group
                )
        for row, status in zip(rows, statuses.tolist(), strict=True):
            if status != OK:
                row.grammar.end(_FAULTS[status])

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()

    def _shared(self, outcomes: list[Any]) -> list[Any]:
        """Returns rank 0's list on every rank."""
        if self.grammar_sync_size > 1 and outcomes:
            torch.distributed.broadcast_object_list(
                outcomes, self.grammar_sync_entry, group=self.grammar_sync_group
            )
        return outcomes


class ProcessGrammar(XGrammarGrammar):  # type: ignore[misc]
    """Grammar of one request. Its slot is None on the ranks above 0."""

    key_string = ""  # SGLang would log it

    def __init__(self, manager: Grammars, slot: Slot | None) -> None:
        BaseGrammarObject.__init__(self)
        self.slot = slot
        self._manager = manager
        self._req: weakref.ref[Req] | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._has_stopped = False
        self._close = weakref.finalize(self, slot.close) if slot is not None else None

    def begin(self, req: Req, stop_ids: Sequence[int]) -> None:
        self._req, self._stop_ids = weakref.ref(req), frozenset(stop_ids)

    def end(self, fault: Fault) -> None:
        """Ends the request with this step, whose token is dropped."""
        req = self._req() if self._req is not None else None
        if req is not None and req.to_finish is None:
            req.to_finish = FINISH_ABORT(fault.text, fault.code)

    def accept_token(self, token: int) -> None:
        """Requests the mask after `token`. A stop token is not sent to the process, since masks
        allow it only where the output may end."""
        if token in self._stop_ids:
            self._has_stopped = True
        elif self.slot is not None:
            self.slot.feed((token,))

    def is_terminated(self) -> bool:
        return self._has_stopped

    def fill_vocab_mask_batched(self, entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        self._manager.fill(entries, vocab_mask)

    def copy(self) -> ProcessGrammar:
        return self

    @property
    def finished(self) -> bool:
        return bool(self._finished)

    @finished.setter
    def finished(self, finished: bool) -> None:
        self._finished = finished
        if finished and self._close is not None:
            self._close()


class PendingGrammar(Future[ProcessGrammar]):
    """Grammar of a request that waits for its first mask. SGLang polls `done`."""

    def __init__(self, manager: Grammars, key: tuple[str, str]) -> None:
        super().__init__()
        self._manager, self._key = manager, key
        self._grammar: ProcessGrammar | None = None
        self.output_ids: Sequence[int] = ()  # output with which the request came to this engine

    def cancel(self) -> bool:
        self._grammar = None
        return super().cancel()

    def done(self) -> bool:
        """Returns whether the first mask is known, or is not needed on this rank. Raises
        EngineError if the server of grammar processes has ended."""
        if not super().done() and self._is_ready():
            self.set_result(self._grammar or ProcessGrammar(self._manager, None))
        return super().done()

    def _is_ready(self) -> bool:
        if not self._manager.is_grammar_sync_entry:
            return True
        processes = self._manager.processes
        assert processes is not None  # `serve_from`
        if self._grammar is None:
            process = processes.get(self._key)
            slot = process.open(self.output_ids) if process is not None else None
            if slot is None:
                return False
            self._grammar = ProcessGrammar(self._manager, slot)
        slot = self._grammar.slot
        assert slot is not None
        slot.process.flush()
        slot.process.receive()
        return not slot.is_waiting


class _Backend(BaseGrammarBackend):  # type: ignore[misc]
    """Backend that creates pending grammars. The processes serve as its cache."""

    def __init__(self, manager: Grammars) -> None:
        super().__init__()
        self._manager = manager

    def get_cached_or_future_value(
        self, key: tuple[str, str], require_reasoning: bool
    ) -> tuple[PendingGrammar, bool]:
        return PendingGrammar(self._manager, key), False

    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        pass


def set_prior_output(req: Req) -> None:
    """Passes the output with which a request came to its grammar, which matches it first."""
    if isinstance(req.grammar, PendingGrammar):
        req.grammar.output_ids = req.output_ids


def _outcome(grammar: Any) -> tuple[Fault | None, tuple[int, ...]]:
    """Returns the error that prevents a request from starting (None if it can start), and the
    tokens that end its output."""
    if not isinstance(grammar, ProcessGrammar) or grammar.slot is None:
        return None, ()
    slot, compiled = grammar.slot, grammar.slot.process.compiled
    if compiled is not None and compiled.error:
        code = HTTPStatus.SERVICE_UNAVAILABLE if compiled.may_pass else HTTPStatus.BAD_REQUEST
        return Fault(f"its grammar: {compiled.error}", code), ()
    if slot.status == REJECTED:
        text = "the output so far does not match the grammar"
        return Fault(text, HTTPStatus.BAD_REQUEST), ()
    return _FAULTS.get(slot.status), compiled.stop_ids if compiled is not None else ()


def _mark_timeout_retryable(req: Req) -> None:
    """Replaces SGLang's error for a grammar that timed out by a retryable one, since other grammars
    may have taken the time."""
    ended = req.to_finish
    if isinstance(ended, FINISH_ABORT) and ended.message.startswith(_TIMED_OUT):
        text = "its grammar could not be compiled in time"
        req.to_finish = FINISH_ABORT(text, HTTPStatus.SERVICE_UNAVAILABLE)
