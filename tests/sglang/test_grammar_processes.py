"""Processes that match grammars, without an engine. A call that takes too long ends its process and
one request. The engine's thread never waits longer than its limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest
import torch
from tokenizers import Tokenizer

from prism.engines.sglang.grammars import grammar_client, grammar_process, vocabulary
from prism.engines.sglang.grammars.grammar_client import GrammarProcesses, Slot
from prism.engines.sglang.grammars.grammar_process import (
    FAILED,
    LOST,
    NOTHING_MATCHES,
    OK,
    REJECTED,
)
from prism.errors import EngineError
from prism.messages.requests import Grammar
from tests.sglang.models import LLAMA, path_of
from tests.sglang.slow_grammars import SLOW

pytestmark = pytest.mark.sglang

WORD = ("regex", "a{3}b")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def server(preloaded: None) -> Iterator[socket]:
    """Starts a server, forked from a process that handles the signal which ends a call."""
    before = signal.signal(signal.SIGPROF, lambda *_: None)
    link = grammar_process.start()
    signal.signal(signal.SIGPROF, before)
    yield link
    link.close()


@pytest.fixture
def processes(server: socket) -> Iterator[GrammarProcesses]:
    made = processes_of(server)
    yield made
    made.close()


def processes_of(server: socket) -> GrammarProcesses:
    size = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json")).get_vocab_size()
    return GrammarProcesses(server, str(path_of(LLAMA)), size)


def ids(text: str) -> list[int]:
    """Tokens of one character each."""
    tokenizer = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json"))
    return [int(tokenizer.token_to_id(character)) for character in text]


def opened(processes: GrammarProcesses, key: tuple[str, str], output: str = "") -> Slot:
    deadline_s = time.monotonic() + WAIT_S
    while (process := processes.get(key)) is None or not (slot := process.open(ids(output))):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    processes.wait([slot], WAIT_S)
    return slot


def key_of(grammar: Grammar) -> tuple[str, str]:
    return grammar.kind, grammar.text


def follows(slot: Slot) -> set[int]:
    """Tokens that the slot's mask allows."""
    words = slot.mask.numpy().astype("uint32")
    return {i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1}


def test_masks_are_those_of_the_library(processes: GrammarProcesses) -> None:
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    tokenizer, ends = vocabulary.load(path_of(LLAMA))
    compiler, info = vocabulary.compiler(tokenizer, len(tokenizer), ends)
    matcher = GrammarMatcher(compiler.compile_regex(WORD[1]))
    expected = allocate_token_bitmask(1, info.vocab_size)
    slot = opened(processes, WORD)
    for token in [*ids("aaab"), None]:
        matcher.fill_next_token_bitmask(expected)
        processes.wait([slot], WAIT_S)
        assert torch.equal(slot.mask, expected[0])
        if token is not None:
            matcher.accept_token(token)
            slot.feed([token])
    assert slot.process.compiled is not None
    assert follows(slot) == set(ends) == set(slot.process.compiled.stop_ids)


def test_statuses(processes: GrammarProcesses) -> None:
    assert opened(processes, WORD, "aa").status == OK
    assert opened(processes, WORD, "ac").status == REJECTED
    endless = ("ebnf", 'root ::= "a" x\nx ::= x "b"')
    assert opened(processes, endless, "a").status == NOTHING_MATCHES
    wrong = opened(processes, ("regex", "(a"))
    assert wrong.process.compiled is not None
    assert wrong.process.compiled.error


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_too_long_ends_one_output(processes: GrammarProcesses, name: str) -> None:
    """Outputs of the same grammar restart; outputs of another grammar are not affected."""
    key = key_of(SLOW[name])
    other = opened(processes, WORD)
    slot, beside, resting = (opened(processes, key) for _ in range(3))
    [token] = ids("a")
    for _ in range(1000):
        slot.feed([token])
        processes.wait([slot], WAIT_S)
        if slot.status != OK:
            break
    beside.feed([token])
    assert slot.status == FAILED
    assert beside.status == LOST
    assert resting.status == OK  # until it is fed again
    other.feed([token])
    processes.wait([other], WAIT_S)
    assert other.status == OK
    assert opened(processes, key).process is not slot.process


def test_a_slow_process_is_ended_in_time(processes: GrammarProcesses) -> None:
    """Ends a process that takes no CPU time, too: its output is not at fault."""
    slot = opened(processes, WORD)
    pid = only_process()
    os.kill(pid, signal.SIGSTOP)
    slot.feed(ids("a"))
    processes.wait([slot], 0.05)
    assert slot.status == LOST
    assert slot.process.has_ended
    os.kill(pid, signal.SIGCONT)
    deadline_s = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def only_process() -> int:
    """Returns the only process of the servers, once those of earlier tests have ended."""
    deadline_s = time.monotonic() + WAIT_S
    while len(found := grammar_processes()) != 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found[0]


def grammar_processes() -> list[int]:
    servers = processes_named("prism-grammars", os.getpid())
    return [pid for server in servers for pid in processes_named("prism-grammar", server)]


def processes_named(name: str, parent_pid: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                before, _, after = Path(entry.path, "stat").read_text().rpartition(") ")
                if before.endswith(f"({name}") and int(after.split()[1]) == parent_pid:
                    found.append(int(entry.name))
    return found


def test_what_takes_too_long_to_compile(preloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "COMPILE_CPU_S", 0.2)
    link = grammar_process.start()  # inherits the limit
    processes = processes_of(link)
    many = [f"{'a' * n}b{{0,{n}}}" for n in range(1, 400)]
    schema = {"anyOf": [{"type": "string", "pattern": p} for p in many]}
    slot = opened(processes, ("json", json.dumps(schema)))
    assert slot.process.compiled is not None
    assert "takes more than 0.2 s" in slot.process.compiled.error
    assert processes.get(("json", json.dumps(schema))) is slot.process  # not tried again
    processes.close()
    link.close()


def test_a_long_output_is_caught_up_with_in_parts(processes: GrammarProcesses) -> None:
    """Serves another output of the same grammar in between."""
    key = ("regex", "[ab]*")
    other = opened(processes, key)
    long = other.process.open(ids("ab") * 4000)
    assert long is not None
    waits = 0
    while long.is_waiting:
        other.feed(ids("a"))
        processes.wait([other], WAIT_S)
        long.process.receive()
        assert other.status == OK
        waits += 1
    assert long.status == OK
    assert waits > 100


def test_slots_are_used_again(processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [opened(processes, WORD) for _ in range(5)]
    for slot in slots:
        slot.feed(ids("a"))
        slot.close()
    processes.wait([opened(processes, WORD)], WAIT_S)
    again = [opened(processes, WORD, "aaa") for _ in range(5)]
    assert max(slot.index for slot in again) < 10
    assert all(follows(slot) == set(ids("b")) for slot in again)


def test_an_error_is_answered_any_number_of_times(processes: GrammarProcesses) -> None:
    broken = ("regex", "(a")
    process = opened(processes, broken).process
    for _ in range(2 * grammar_process.SLOTS):
        again = opened(processes, broken)
        assert again.process is process
        assert not again.is_waiting
        again.close()


def test_a_machine_without_processes_refuses_no_grammar(
    preloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = iter([True, False])
    fork = os.fork

    def fork_later() -> int:
        if os.getpid() != test_pid and next(failing):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    test_pid = os.getpid()
    monkeypatch.setattr(os, "fork", fork_later)
    link = grammar_process.start()
    processes = processes_of(link)
    slot = opened(processes, WORD)
    assert slot.status == LOST
    assert slot.process.compiled is not None
    assert slot.process.compiled.may_pass
    assert opened(processes, WORD).status == OK
    processes.close()
    link.close()


def test_what_nothing_waits_for_is_idle(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves a process to other requests when the request ends while its mask is made."""
    monkeypatch.setattr(grammar_client, "PROCESSES_MAX", 1)
    slot = opened(processes, WORD)
    slot.feed(ids("a"))
    processes.flush()
    slot.close()
    assert opened(processes, ("regex", "b")).status == OK


def test_a_signal_to_all_processes_of_a_service_leaves_them_to_the_engine(
    processes: GrammarProcesses,
) -> None:
    slot = opened(processes, WORD)
    for pid in (*processes_named("prism-grammars", os.getpid()), *grammar_processes()):
        os.kill(pid, signal.SIGTERM)
    slot.feed(ids("a"))
    processes.wait([slot], WAIT_S)
    assert slot.status == OK
    assert opened(processes, ("regex", "d")).status == OK


def test_processes_are_few(processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_client, "PROCESSES_MAX", 3)
    monkeypatch.setattr(grammar_client, "IDLE_MAX", 2)
    held = [opened(processes, ("regex", f"a{{{n}}}")) for n in range(1, 4)]
    assert processes.get(WORD) is None
    held[1].close()
    assert opened(processes, WORD).status == OK
    assert held[1].process.has_ended
    assert not held[0].process.has_ended


def test_without_the_server_the_engine_must_end(preloaded: None) -> None:
    link = grammar_process.start()
    processes = processes_of(link)
    slot = opened(processes, WORD)
    pid = max(processes_named("prism-grammars", os.getpid()))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    slot.feed(ids("a"))
    processes.wait([slot], WAIT_S)
    assert slot.status == LOST
    with pytest.raises(EngineError, match="server of grammar processes"):
        processes.get(("regex", "c"))
    link.close()
