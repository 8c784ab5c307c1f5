"""Processes that compile grammars and match outputs against them, separate from the engine.

XGrammar needs any amount of time and memory for a token, and its calls cannot be interrupted. Each
grammar is compiled and matched in a process, which the kernel ends when a call takes more CPU time
than it may. A server forks these processes. The engine forks the server while it is small, so that
both have SGLang's modules already.

The server receives three descriptors for each process: a socket, the memory for the masks, and a
file with an `Order`. The process first sends its stop tokens, or the error of the compilation. It
then reads entries, `open_entry` and `feed_entry`, and answers each with (slot, status).
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
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
from xgrammar import GrammarMatcher

from prism.engines.sglang import vocabulary
from prism.engines.sglang.parsers import WHITESPACE_MAX
from prism.process import die_with_parent, flush_log, set_process_name

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend

COMPILE_CPU_S = 10.0
MATCH_CPU_S = 0.1  # to accept one token, or to fill one mask
ENTRY_TOKENS_MAX = 16
MEMORY_BYTES_MAX = 2 << 30  # beyond what the server holds
SLOTS = 1024  # outputs that a process matches at once
HEADER_BYTES = 4096  # of the masks' memory: the slot of the entry that is being matched, as int32
MESSAGE_BYTES_MAX = 64 << 10
_ERROR_CHARS = 2000

# Statuses of an entry. Those from LOST on are set by the engine, the process being gone.
OK, REJECTED, NOTHING_MATCHES, FAILED, LOST = range(5)
NO_SLOT = -1

log = logging.getLogger("prism.engine")


class Order(msgspec.Struct, frozen=True):
    """Grammar of a process, and the model whose tokens it matches."""

    directory: str
    vocab_size: int
    kind: str
    text: str


class Compiled(msgspec.Struct, frozen=True):
    """First answer of a process."""

    stop_ids: tuple[int, ...] = ()
    error: str = ""
    may_pass: bool = False  # the machine's error, not the grammar's


def entry(slot: int, tokens: array[int], *, opens: bool) -> array[int]:
    """Returns the order to match `tokens` in a slot, which begins anew if `opens`."""
    return array("i", (slot, opens, len(tokens))) + tokens


def mask_words(vocab_size: int) -> int:
    """Returns the int32 words of a mask."""
    return -(-vocab_size // 32)


def start() -> socket.socket:
    """Forks the server. Returns the socket for orders to it; the server ends when that is closed.

    Raises OSError if there is no room for a process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    if os.fork() == 0:
        _be_server(theirs, parent_pid)
    theirs.close()
    return ours


def _be_server(link: socket.socket, parent_pid: int) -> NoReturn:
    """Never returns; `os._exit`, as in the fork server's children."""
    try:
        die_with_parent(parent_pid)
        set_process_name("prism-grammars")
        warnings.simplefilter("ignore")  # SGLang's use of XGrammar
        signal.set_wakeup_fd(-1)
        # A signal to all of a service's processes: the engine ends first, or answers what it has.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # `cpu_limit`: a handler would not end a call
        os.dup2(link.detach(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        _serve(socket.socket(fileno=3))
    except BaseException:
        log.exception("the server of grammars ends")
    finally:
        flush_log()
        os._exit(0)


def _serve(link: socket.socket) -> None:
    gc.freeze()
    server_pid = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 1, 3)
        if not data:
            return
        with open(descriptors[2], "rb") as file:
            order = msgspec.json.decode(file.read(), type=Order)
        with suppress(Exception):  # the process raises it again, and says so
            _backend(order.directory, order.vocab_size)
        try:
            if os.fork() == 0:
                link.close()
                _be_process(order, descriptors, server_pid)
        except OSError as error:
            log.error("a process for a grammar cannot be started: %s", error)
            with suppress(OSError), socket.socket(fileno=os.dup(descriptors[0])) as engine:
                engine.send(msgspec.json.encode(Compiled(error=str(error), may_pass=True)))
        for descriptor in descriptors[:2]:
            os.close(descriptor)


def _be_process(order: Order, descriptors: list[int], server_pid: int) -> NoReturn:
    """Never returns. Ends when the engine closes the socket."""
    try:
        die_with_parent(server_pid)
        set_process_name("prism-grammar")
        gc.disable()
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # the first one to go
        _limit_memory()
        link = socket.socket(fileno=descriptors[0])
        memory = mmap.mmap(descriptors[1], 0)
        grammar = _compiled(order)
        if isinstance(grammar, str):
            link.send(msgspec.json.encode(Compiled(error=grammar)))
        else:
            _match(link, memory, grammar, mask_words(order.vocab_size))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine does not need it any more
    finally:
        os._exit(0)


def _limit_memory() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES_MAX, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Has the kernel end this process, with SIGPROF, at so much CPU time from now on."""
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
    """Raises ValueError for a model whose files name no end of an output."""
    # Engines have imported it before they fork the server.
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
    """Returns the entry's status; the mask after its tokens is in `masks` if that is OK."""
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
