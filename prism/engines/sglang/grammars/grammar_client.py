"""Engine's side of grammar processes. No call blocks for longer than its caller allows."""

from __future__ import annotations

import gc
import mmap
import os
import select
import socket
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec
import torch

from prism.engines.sglang.grammars import grammar_process
from prism.engines.sglang.grammars.grammar_process import (
    ENTRY_TOKENS_MAX,
    FAILED,
    HEADER_BYTES,
    LOST,
    MESSAGE_BYTES_MAX,
    NO_SLOT,
    OK,
    SLOTS,
    Compiled,
    Order,
)
from prism.errors import EngineError

IDLE_MAX = 32  # compiled grammars that no request uses
PROCESSES_MAX = 128
COMPILING_MAX = 2


class GrammarProcess:
    """Process of one grammar, compiled or being compiled, and the outputs matched by it.

    Thread rule: one thread. A slot is one output, from `open` until its `Slot` is closed.
    """

    def __init__(self, server: socket.socket, order: Order) -> None:
        """Starts the process. Raises BlockingIOError while the server has too many orders, and
        EngineError if the server has ended."""
        words = grammar_process.mask_words(order.vocab_size)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory_fd = os.memfd_create("grammar-masks")
        order_fd = os.memfd_create("grammar-order")
        try:
            self._link.setblocking(False)
            os.ftruncate(memory_fd, HEADER_BYTES + SLOTS * words * 4)
            self._memory = mmap.mmap(memory_fd, 0)
            os.pwrite(order_fd, msgspec.json.encode(order), 0)
            descriptors = [theirs.fileno(), memory_fd, order_fd]
            socket.send_fds(server, [b"."], descriptors, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._link.close()
            raise EngineError("the server of grammar processes has ended") from error
        except BlockingIOError:
            self._link.close()
            raise
        finally:
            theirs.close()
            os.close(memory_fd)
            os.close(order_fd)
        memoryview(self._memory)[:4].cast("i")[0] = NO_SLOT
        masks = torch.frombuffer(self._memory, dtype=torch.int32, offset=HEADER_BYTES)
        self.masks = masks.view(SLOTS, words)
        self.compiled: Compiled | None = None
        self.has_ended = False
        self._free = list(reversed(range(SLOTS)))
        self._open: dict[int, Slot] = {}
        self._unsent: deque[array[int]] = deque()

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def is_compiling(self) -> bool:
        return self.compiled is None

    @property
    def is_refused(self) -> bool:
        """True if the grammar is wrong, so that another process would fail too."""
        compiled = self.compiled
        return compiled is not None and bool(compiled.error) and not compiled.may_pass

    @property
    def is_idle(self) -> bool:
        return not self._open and not self.is_compiling

    def open(self, output: Sequence[int] = ()) -> Slot | None:
        """Returns a slot for an output that begins with these tokens, None if all are in use."""
        if not self._free:
            gc.collect()  # frees slots of ended requests in reference cycles
        if not self._free:
            return None
        slot = Slot(self, self._free.pop())
        self._open[slot.index] = slot
        slot.feed(output, opens=True)
        return slot

    def queue(self, entry: array[int]) -> None:
        """Adds an entry for the next `flush`."""
        self._unsent.append(entry)

    def flush(self) -> None:
        """Sends queued entries, as many as the socket accepts."""
        while self._unsent and not self.has_ended:
            message = array("i")
            count = 0
            for entry in self._unsent:
                if (len(message) + len(entry)) * message.itemsize > MESSAGE_BYTES_MAX:
                    break
                message += entry
                count += 1
            try:
                self._link.send(message)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self.receive()
                return
            for _ in range(count):
                self._unsent.popleft()

    def receive(self) -> None:
        """Processes the answers that have arrived."""
        while not self.has_ended:
            try:
                data = self._link.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The process left entries unread. The kernel reports this once, before its answers.
                continue
            if not data:
                self._end(memoryview(self._memory)[:4].cast("i")[0])
            elif self.compiled is None:
                self.compiled = msgspec.json.decode(data, type=Compiled)
            else:
                index, status = array("i", data)
                self._open[index].answered(status)
        self._link.close()

    def free(self, index: int) -> None:
        """Frees a slot whose entries are all answered."""
        del self._open[index]
        self._free.append(index)

    def end(self) -> None:
        """Ends the process. Outputs that wait for it become LOST."""
        self._end(NO_SLOT)
        self._link.close()

    def _end(self, failed_slot: int) -> None:
        """Records the end of the process. Outputs that wait for an answer become LOST, except the
        one in `failed_slot`, whose entry took too much time or memory; it becomes FAILED."""
        self.has_ended = True
        self._unsent.clear()
        if self.compiled is None:
            limit_s = grammar_process.COMPILE_CPU_S
            self.compiled = Compiled(error=f"it takes more than {limit_s:g} s, or too much memory")
        for slot in list(self._open.values()):
            if slot.is_waiting:
                slot.status = FAILED if slot.index == failed_slot else LOST


class Slot:
    """One output in a grammar process."""

    def __init__(self, process: GrammarProcess, index: int) -> None:
        self.process = process
        self.index = index
        self.status = OK
        self._left: deque[array[int]] = deque()  # entries to queue after the next answer
        self._unanswered = 0
        self._is_closed = False

    @property
    def is_waiting(self) -> bool:
        """True if the mask after the last token is not known yet."""
        return self.status == OK and bool(self._unanswered or self._left)

    @property
    def mask(self) -> torch.Tensor:
        return self.process.masks[self.index]

    def feed(self, tokens: Sequence[int], *, opens: bool = False) -> None:
        """Appends tokens to the output."""
        if self.process.has_ended and self.status == OK:
            self.status = LOST
        if self.status != OK:
            return
        for at in range(0, max(len(tokens), 1), ENTRY_TOKENS_MAX):
            part = array("i", tokens[at : at + ENTRY_TOKENS_MAX])
            self._left.append(grammar_process.entry(self.index, part, opens=opens and not at))
        self._queue_next()

    def answered(self, status: int) -> None:
        self._unanswered -= 1
        if self.status == OK:
            self.status = status
        self._queue_next()
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Frees the slot, once its last entry is answered."""
        self._is_closed = True
        self._left.clear()
        if not self._unanswered or self.process.has_ended:
            self.process.free(self.index)

    def _queue_next(self) -> None:
        """Queues one entry at a time, so that a long output does not delay the others."""
        if self._left and not self._unanswered and self.status == OK:
            self._unanswered = 1
            self.process.queue(self._left.popleft())


class GrammarProcesses:
    """Grammar processes of one model. Thread rule: one thread."""

    def __init__(self, server: socket.socket, directory: str, vocab_size: int) -> None:
        self._server, self._directory, self._vocab_size = server, directory, vocab_size
        self._by_key: OrderedDict[tuple[str, str], GrammarProcess] = OrderedDict()

    def get(self, key: tuple[str, str]) -> GrammarProcess | None:
        """Returns the process of the grammar (kind, text), and starts it if necessary. Returns None
        while too many others run. Raises EngineError if the server has ended."""
        process = self._by_key.get(key)
        if process is None or (process.has_ended and not process.is_refused):
            process = self._start(key)
        if process is not None:
            self._by_key[key] = process
            self._by_key.move_to_end(key)
        return process

    def flush(self) -> None:
        for process in self._by_key.values():
            process.flush()

    def wait(self, slots: Collection[Slot], limit_s: float) -> None:
        """Waits for the masks of these slots. Ends processes that do not answer in `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while waiting := {s.process for s in slots if s.is_waiting}:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                for process in waiting:
                    process.end()
                return
            poll = select.poll()
            for process in waiting:
                process.flush()
                if process.has_ended:
                    left_s = 0.0
                else:
                    poll.register(process, select.POLLIN)
            poll.poll(1000 * left_s)
            for process in waiting:
                process.receive()

    def close(self) -> None:
        for process in self._by_key.values():
            process.end()
        self._by_key.clear()

    def _start(self, key: tuple[str, str]) -> GrammarProcess | None:
        for process in self._by_key.values():
            process.receive()  # answers to ended requests are received only here
        ended = [k for k, p in self._by_key.items() if p.has_ended]
        for old in ended[:-IDLE_MAX]:
            del self._by_key[old]
        running = [p for p in self._by_key.values() if not p.has_ended]
        if sum(p.is_compiling for p in running) >= COMPILING_MAX:
            return None
        idle = [k for k, p in self._by_key.items() if p.is_idle and not p.has_ended]
        if len(idle) >= IDLE_MAX or (idle and len(running) >= PROCESSES_MAX):
            self._by_key.pop(idle[0]).end()
        elif len(running) >= PROCESSES_MAX:
            return None
        with suppress(BlockingIOError):
            return GrammarProcess(self._server, Order(self._directory, self._vocab_size, *key))
        return None
