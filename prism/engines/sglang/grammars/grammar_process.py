"""Processes that compile grammars and match outputs against them, separate from the engine.

XGrammar may take unbounded time and memory for a token, and its calls cannot be interrupted. Each
grammar is compiled and matched in a separate process, which the kernel ends when a call exceeds its
CPU time. A server forks these processes. The engine forks the server while the engine is small, so
that both have already imported SGLang's modules.

The server receives three descriptors for each process: a socket, the memory for the masks, and a
file with an `Order`. The process first sends its stop tokens, or the error of the compilation. It
then reads entries (`entry`) and answers each with (slot, status).
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import resource
import signal
import socket
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
from xgrammar import GrammarMatcher

from prism.engines.sglang.grammars import vocabulary
from prism.engines.sglang.grammars.parsers import WHITESPACE_MAX
from prism.process import die_with_parent, fork_child, set_process_name

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend

COMPILE_CPU_S = 10.0
MATCH_CPU_S = 0.1  # to accept one token, or to fill one mask
ENTRY_TOKENS_MAX = 16
MEMORY_BYTES_MAX = 2 << 30  # beyond what the server holds
SLOTS = 1024  # outputs that a process matches at once
HEADER_BYTES = 4096  # start of the masks' memory: the slot that is being matched, as int32
MESSAGE_BYTES_MAX = 64 << 10
_ERROR_CHARS = 2000

# Statuses of an entry. The engine sets LOST for a process that is gone.
OK, REJECTED, NOTHING_MATCHES, FAILED, LOST = range(5)
NO_SLOT = -1

log = logging.getLogger("prism.engine")


class Order(msgspec.Struct, frozen=True):
    """Grammar to compile in a process, and the model whose tokens are matched."""

    directory: str
    vocab_size: int
    kind: str
    text: str


class Compiled(msgspec.Struct, frozen=True):
    """First answer of a process."""

    stop_ids: tuple[int, ...] = ()
    error: str = ""
    may_pass: bool = False  # True if the error is the machine's, so that a retry may succeed


def entry(slot: int, tokens: array[int], *, opens: bool) -> array[int]:
    """Returns the entry that matches `tokens` in a slot; `opens` starts a new output there."""
    return array("i", (slot, opens, len(tokens))) + tokens


def mask_words(vocab_size: int) -> int:
    """Returns the number of int32 words in a mask."""
    return -(-vocab_size // 32)


def start() -> socket.socket:
    """Forks the server. Returns the socket for orders to it; the server ends when that is closed.

    Raises OSError if no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    run = partial(_run_server, theirs)
    fork_child("prism-grammars", run, log, "the server of grammar processes")
    theirs.close()
    return ours


def _run_server(link: socket.socket) -> int:
    """Runs the server in the child. Returns the exit code."""
    warnings.simplefilter("ignore")  # SGLang's use of XGrammar
    signal.set_wakeup_fd(-1)
    # SIGTERM may go to all processes of a service. The engine must end or finish first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # `cpu_limit`: a handler would not end a call
    os.dup2(link.detach(), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    _serve(socket.socket(fileno=3))
    return 0


def _serve(link: socket.socket) -> None:
    gc.freeze()
    server_pid = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 1, 3)
        if not data:
            return
        with open(descriptors[2], "rb") as file:
            order = msgspec.json.decode(file.read(), type=Order)
        with suppress(Exception):  # raised and reported again in the forked process
            _backend(order.directory, order.vocab_size)
        try:
            if os.fork() == 0:
                link.close()
                _run_process(order, descriptors, server_pid)
        except OSError as error:
            log.error("cannot start a process for a grammar: %s", error)
            with suppress(OSError), socket.socket(fileno=os.dup(descriptors[0])) as engine:
                engine.send(msgspec.json.encode(Compiled(error=str(error), may_pass=True)))
        for descriptor in descriptors[:2]:
            os.close(descriptor)


def _run_process(order: Order, descriptors: list[int], server_pid: int) -> NoReturn:
    """Runs a grammar's process in the child until the engine closes the socket; never returns."""
    try:
        die_with_parent(server_pid)
        set_process_name("prism-grammar")
        gc.disable()
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # killed first
        _limit_memory()
        link = socket.socket(fileno=descriptors[0])
        memory = mmap.mmap(descriptors[1], 0)
        grammar = _compiled(order)
        if isinstance(grammar, str):
            link.send(msgspec.json.encode(Compiled(error=grammar)))
        else:
            _match(link, memory, grammar, mask_words(order.vocab_size))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine has closed the socket
    finally:
        os._exit(0)


def _limit_memory() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES_MAX, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Makes the kernel end this process with SIGPROF if the context takes more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compiled(order: Order) -> XGrammarGrammar | str:
    """Returns the grammar, or what is wrong with it."""
    with cpu_limit(COMPILE_CPU_S):
        try:
            backend = _backend(order.directory, order.vocab_size)
            made = backend._init_value_dispatch((order.kind, order.text), False)
        except Exception as error:  # noqa: BLE001 bad grammars and files cause errors of every kind
            return str(error) or type(error).__name__
    return str(made.error_message)[:_ERROR_CHARS] if hasattr(made, "error_message") else made


@lru_cache(maxsize=1)
def _backend(directory: str, vocab_size: int) -> XGrammarGrammarBackend:
    """Returns XGrammar's backend for a model. Raises ValueError if the model's files name no token
    that ends an output."""
    # Already imported by the engine that forked the server.
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    tokenizer, ends = vocabulary.load(Path(directory))
    backend = XGrammarGrammarBackend(tokenizer, vocab_size, ends, max_whitespace_cnt=WHITESPACE_MAX)
    backend.grammar_compiler, _ = vocabulary.compiler(tokenizer, vocab_size, ends)
    return backend


def _match(link: socket.socket, memory: mmap.mmap, grammar: XGrammarGrammar, words: int) -> None:
    current = memoryview(memory)[:4].cast("i")
    masks = torch.frombuffer(memory, dtype=torch.int32, offset=HEADER_BYTES).view(SLOTS, words)
    matchers: dict[int, GrammarMatcher] = {}
    stop_ids = _matcher(grammar).stop_token_ids
    link.send(msgspec.json.encode(Compiled(tuple(stop_ids))))
    while data := link.recv(MESSAGE_BYTES_MAX):
        for slot, opens, tokens in _entries(array("i", data)):
            current[0] = slot
            if opens:
                matchers[slot] = _matcher(grammar)
            status = _advance(matchers[slot], tokens, masks, slot)
            current[0] = NO_SLOT
            link.send(array("i", (slot, status)))


def _matcher(grammar: XGrammarGrammar) -> GrammarMatcher:
    return GrammarMatcher(grammar.ctx, override_stop_tokens=grammar.override_stop_tokens)


def _entries(message: array[int]) -> Iterator[tuple[int, bool, array[int]]]:
    at = 0
    while at < len(message):
        slot, opens, count = message[at : at + 3]
        at += 3
        yield slot, bool(opens), message[at : at + count]
        at += count


def _advance(matcher: GrammarMatcher, tokens: array[int], masks: Any, slot: int) -> int:
    """Matches an entry and returns its status. If it is OK, the mask after its tokens is in
    `masks`."""
    try:
        for token in tokens:
            with cpu_limit(MATCH_CPU_S):
                accepts = matcher.accept_token(token)
            if not accepts:
                return REJECTED
        masks[slot] = -1
        with cpu_limit(MATCH_CPU_S):
            is_partial = matcher.fill_next_token_bitmask(masks, slot)
        if is_partial and not masks[slot].any():
            return NOTHING_MATCHES
    except (RuntimeError, MemoryError):
        return FAILED
    return OK
