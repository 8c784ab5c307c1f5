"""Requests that resume at another engine, with their KV: the same output, no token twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcached
from prism.engines.kv_moves import kv_file
from prism.engines.kv_moves.moves import KVMoves
from prism.engines.ranks.group import RankGroup
from prism.messages.engine import Deactivate, Deactivated, Export, Exported, Submit
from prism.messages.requests import Request, Resume
from tests.engines.harness import DEVICE, DeviceUnderTest, request
from tests.engines.subjects import Subject

WAYS = {"direct": (1, False), "file": (0, True)}  # offers, and whether there is a file


def start(
    subject: Subject, device: DeviceUnderTest, engine: str, count: int, tokens: int
) -> list[Request]:
    """Requests of model a that have put out a few tokens of many."""
    name = subject.models[0].name
    prompts = subject.prompts(count, seed=11, length=(20, 60))
    items = [request(f"{engine}/{i}", name, p, tokens) for i, p in enumerate(prompts)]
    device.send(Submit(items), engine)
    device.wait_until(lambda: all(len(device.stream(i.id).token_ids) > 4 for i in items))
    return items


def export(
    device: DeviceUnderTest, engine: str, targets: tuple[str, ...] | None = ()
) -> list[Request]:
    device.send(Export(targets), engine)
    return device.wait_for(Exported, engine).requests


def check(subject: Subject, device: DeviceUnderTest, engine: str, items: list[Request]) -> None:
    """Checks that each stream is contiguous over both engines and the model's own."""
    streams = device.finish(*(item.id for item in items))
    outputs = [stream.token_ids for stream in streams]
    subject.learn(device, engine, items)
    assert outputs == [subject.expected(item) for item in items]


@pytest.mark.parametrize("way", ["direct", "file"])
def test_requests_go_on_with_their_kv(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str, way: str
) -> None:
    """Moves KV from device to device without a file, or through one. Outputs are the same, and the
    first engine's memory is freed after the fetch."""
    if not subject.moves_kv:
        pytest.skip("these engines hand over no KV")
    for name in (engine, second_engine):
        device.activate(subject.models[0], name)
    items = start(subject, device, engine, 3, 60)
    moved = export(device, engine, (DEVICE,) if way == "direct" else ())
    for item in moved:
        assert item.resume is not None
        assert (len(item.resume.kv_offers), bool(item.resume.kv_path)) == WAYS[way]
        assert len(item.resume.output_ids) == len(device.stream(item.id).token_ids)
        assert item.resume.kv_tokens >= len(item.prompt_ids)
    assert {item.id for item in moved} <= {item.id for item in items}
    if way == "direct":
        assert not Path(device.config.moves_dir).exists() or not files(device)
    device.send(Deactivate(), engine)
    device.send(Submit(moved), second_engine)
    assert device.wait_for(Deactivated, engine).model == subject.models[0].name
    check(subject, device, second_engine, items)
    assert (usage := device.client_usage(engine)) is None or usage.committed_bytes == 0
    status = device.settled_status(lambda s: s.imported_tokens_total, second_engine)
    came = sum(item.resume.kv_tokens for item in moved if item.resume)
    assert came - 16 * len(moved) <= status.imported_tokens_total <= came
    assert status.prompt_tokens_total >= 0
    assert not files(device)
    assert device.settled_status(lambda s: s.running == 0, engine).waiting == 0


def files(device: DeviceUnderTest) -> list[Path]:
    folder = Path(device.config.moves_dir)
    return list(folder.iterdir()) if folder.exists() else []


def test_requests_go_on_after_their_first_engine_is_killed(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str
) -> None:
    """Kills it before the KV is fetched: KV is computed again, the output is the same, and the
    ledger is as before."""
    for name in (engine, second_engine):
        device.activate(subject.models[0], name)
    items = start(subject, device, engine, 2, 60)
    moved = export(device, engine, (DEVICE,))
    os.kill(device.pids[engine], signal.SIGKILL)
    device.exited(engine)
    device.send(Submit(moved), second_engine)
    check(subject, device, second_engine, items)
    assert device.fresh_status(second_engine).imported_tokens_total == 0
    assert (usage := device.client_usage(engine)) is None or usage.committed_bytes == 0


def test_requests_go_on_at_another_machine(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str
) -> None:
    """Writes KV to no file: it is computed again, and the output is the same."""
    for name in (engine, second_engine):
        device.activate(subject.models[0], name)
    items = start(subject, device, engine, 2, 60)
    moved = export(device, engine, None)
    assert [(i.resume.kv_path, i.resume.kv_offers) for i in moved if i.resume] == [("", ())] * 2
    assert not files(device)
    device.send(Submit(moved), second_engine)
    check(subject, device, second_engine, items)


def test_requests_go_on_without_their_kv(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str
) -> None:
    """Damages or removes the files, or has none: KV is computed again, and the output is the
    same."""
    for name in (engine, second_engine):
        device.activate(subject.models[0], name)
    items = start(subject, device, engine, 2, 60)
    moved = export(device, engine)
    paths = [Path(item.resume.kv_path) for item in moved if item.resume and item.resume.kv_path]
    assert bool(paths) is subject.moves_kv
    for path in paths[:1]:
        path.unlink()
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:200])
    device.send(Submit(moved), second_engine)
    check(subject, device, second_engine, items)
    assert device.fresh_status(second_engine).imported_tokens_total == 0


def test_a_request_moves_twice_and_back(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str
) -> None:
    for name in (engine, second_engine):
        device.activate(subject.models[0], name)
    items = start(subject, device, engine, 1, 90)
    places = [engine, second_engine]
    for turn in range(3):
        seen = len(device.stream(items[0].id).token_ids)
        moved = export(device, places[turn % 2], (DEVICE,))
        device.send(Submit(moved), places[(turn + 1) % 2])
        device.wait_until(
            lambda at=seen: len(s := device.stream(items[0].id).token_ids) > at + 3 or len(s) > 80
        )
    check(subject, device, second_engine, items)


def test_a_request_goes_on_where_it_was_handed_back(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    """Resumes in the engine that exported the requests so that another one could run alone."""
    device.activate(subject.models[0], engine)
    items = start(subject, device, engine, 2, 60)
    device.send(Submit(export(device, engine)), engine)
    check(subject, device, engine, items)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_export_of_nothing(device: DeviceUnderTest, engine: str, moment: str, subject: Subject):
    """Exports before a model is active, and after all requests have ended."""
    if moment == "after":
        device.activate(subject.models[0], engine)
    assert export(device, engine) == []


def test_several_ranks_use_no_file() -> None:
    """Reaches no target: one file cannot hold the parts of all ranks."""
    kv: Any = SimpleNamespace(
        layout=kvcached.Layout(num_layers=1, num_kv_heads=1, head_dim=4),
        can_offer_to=lambda device: False,
    )
    unused: Any = None
    moves = KVMoves(kv, RankGroup(0, 2, []), unused, unused, unused)
    assert moves.export([7], 5, [0], ("cuda:0", "cuda:1")) == Resume([7])
    assert moves.importer(Resume([7], "/x/0.npy", 5)) is None


@pytest.mark.parametrize(("ranks", "targets"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_ranks_gets_no_kv(ranks: int, targets: int) -> None:
    """Ranks divide KV in other ways: requests resume with their output and compute it again."""
    unused: Any = None
    kv: Any = SimpleNamespace(
        layout=kvcached.Layout(num_layers=1, num_kv_heads=1, head_dim=4),
        can_offer_to=lambda device: True,
    )
    moves = KVMoves(kv, RankGroup(0, ranks, []), unused, unused, unused)
    names = tuple(f"host:{number}" for number in range(targets))
    assert moves.export([7], 5, [0], names) == Resume([7])


def test_abandoned_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    rows = np.arange(64, dtype=np.uint8).reshape(8, 8)
    old = kv_file.save(str(tmp_path), [rows], 1)
    monkeypatch.setattr(kv_file, "ABANDONED_AFTER_S", -1.0)
    kv_file.remove_abandoned(tmp_path)
    assert not any(tmp_path.iterdir())
    new = kv_file.save(str(tmp_path), [rows, rows], 2)
    assert kv_file.take(old, 1, 8, 8) is None
    taken = kv_file.take(new, 2, 8, 8)
    assert taken is not None
    assert (taken[1] == rows).all()
    assert not any(tmp_path.iterdir())
