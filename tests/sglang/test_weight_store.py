"""Activations out of the machine's weight store: a copy, the same model, and never a wrong one."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcached
from kvcached import StoreCounters, WeightStore
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.core import EngineContext
from prism.errors import SelfCheckError
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from tests.sglang.conftest import DEVICE, PAGE_BYTES, STATIC_BYTES, config_of
from tests.sglang.models import GPT2, LLAMA, MLA, MOE, QWEN3, path_of, spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]
CAPACITY_BYTES = 256 << 20


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ClusterConfig]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), CAPACITY_BYTES)
        engine = msgspec.structs.replace(config.engine, weight_store=str(tmp_path / "store"))
        yield msgspec.structs.replace(config, engine=engine)
        kvcached.Device.unlink(config.namespace, DEVICE)


@pytest.fixture
def core(config: ClusterConfig) -> Iterator[Any]:
    yield from cores(config)


def cores(config: ClusterConfig) -> Iterator[Any]:
    from prism.engines.sglang import create

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core: Any = create(EngineContext("e0", DEVICE, config))
        yield core
        core.close()


def turn(core: Any, spec: ModelSpec) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Activates and deactivates; returns the fingerprint and a copy of every tensor that loading
    left: parameters, and tensors that are derived from them."""
    from prism.engines.weights import tensor_slots as slots
    from prism.engines.weights.loaded_state import whole

    fingerprint = core.activate(ActivateEngine(spec)).fingerprint
    model = core._active.scheduler.tp_worker.model_runner.model
    pages = core._active.memory.weights.pages
    found = {slot.full_name: tensor for slot, tensor in slots.tensors(whole(model))}
    tensors = {name: tensor.clone() for name, tensor in found.items() if pages.holds(tensor)}
    del model, found, pages
    core.deactivate()
    assert core._device.usage().reserved_bytes == 0
    return fingerprint, tensors


def counters(core: Any) -> StoreCounters:
    found: StoreCounters = core._access.store.counters()
    return found


@pytest.mark.parametrize("name", [LLAMA, QWEN3, GPT2, MLA.name])
def test_the_second_activation_is_a_copy_of_the_first(core: Any, name: str) -> None:
    """Copies up-projections of latents too, which SGLang derives from weights."""
    import torch

    first, loaded = turn(core, spec_of(name))
    assert (name == MLA.name) == any(each.endswith("w_kc") for each in loaded)
    read_bytes = counters(core).disk_bytes
    assert counters(core).made_entries == 1
    second, copied = turn(core, spec_of(name))
    assert counters(core).made_entries == counters(core).found_entries == 1
    assert counters(core).disk_bytes == read_bytes
    assert second == first
    assert copied.keys() == loaded.keys()
    assert all(torch.equal(copied[n], loaded[n]) for n in loaded)


def test_an_activation_says_what_came_out_of_the_store(core: Any) -> None:
    order = ActivateEngine(spec_of(LLAMA))
    assert core.activate(order).link_bytes == {}  # from its files
    core.deactivate()
    activated = core.activate(order)
    assert list(activated.link_bytes) == ["host"]
    weights_bytes = activated.static_bytes - STATIC_BYTES  # in whole pages
    assert 0 <= weights_bytes - activated.link_bytes["host"] < 2 * PAGE_BYTES
    core.deactivate()


def test_a_new_process_finds_what_another_one_stored(config: ClusterConfig) -> None:
    [(first, _)] = [turn(core, spec_of(LLAMA)) for core in cores(config)]
    for core in cores(config):
        assert turn(core, spec_of(LLAMA))[0] == first
        assert counters(core).made_entries == 0


def stored_files(config: ClusterConfig) -> list[Path]:
    return [p for p in Path(config.engine.weight_store).rglob("t/*") if p.stat().st_size > 1000]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_copy_is_replaced(core: Any, config: ClusterConfig, damage: Any) -> None:
    first, _ = turn(core, spec_of(LLAMA))
    damage(stored_files(config)[0])
    assert turn(core, spec_of(LLAMA))[0] == first
    assert counters(core).made_entries == 2


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_copy_that_breaks_while_it_is_loaded_is_replaced(
    core: Any, config: ClusterConfig, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damages the copy after its check, before its bytes are copied."""
    from prism.engines.weights.model_weights import ModelWeights

    first, _ = turn(core, spec_of(LLAMA))
    stock, files = ModelWeights.load, stored_files(config)

    def load(weights: ModelWeights, meanwhile: Any) -> None:
        damage(files[-1])
        stock(weights, meanwhile)

    monkeypatch.setattr(ModelWeights, "load", load)
    assert turn(core, spec_of(LLAMA))[0] == first
    assert counters(core).made_entries == 2


@pytest.mark.parametrize("name", [LLAMA, MOE.name])
def test_a_prefetched_model_comes_up_without_its_disk(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Prefetches in another process; then the activation reads only the headers of the files."""
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader

    without = msgspec.structs.replace(config.engine, weight_store="")
    plain = msgspec.structs.replace(config, engine=without)
    [(expected, loaded)] = [turn(core, spec_of(name)) for core in cores(plain)]
    path = tmp_path / "model"
    shutil.copytree(path_of(name), path)
    assert WeightStore.open(config.engine.weight_store).prefetch(path).wait(60)
    forget_pages(path / "model.safetensors")

    def read(*_: object, **__: object) -> None:
        raise AssertionError("SGLang reads the files")

    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", read)
    spec = msgspec.structs.replace(spec_of(name), path=str(path))
    for core in cores(config):
        fingerprint, tensors = turn(core, spec)
        assert counters(core).disk_bytes == 0
        assert resident_share(path / "model.safetensors") < 0.5
        assert fingerprint == expected
        assert all(torch.equal(tensors[n], loaded[n]) for n in loaded)
        # The engine's own form is there now, and the files' form is not kept.
        assert counters(core).made_entries == 1
        assert len(list((tmp_path / "store" / "entries").iterdir())) == 1


def forget_pages(path: Path) -> None:
    """Drops the file from the page cache; skips if the file system keeps it (tmpfs)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_share(path) > 0:
        pytest.skip(f"{path} stays in memory")


def resident_share(path: Path) -> float:
    """Returns the fraction of a file in the page cache (mincore)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        count = -(-len(pages) // mmap.PAGESIZE)
        seen, first = (ctypes.c_ubyte * count)(), ctypes.c_char.from_buffer(pages)
        size, libc = ctypes.c_size_t(len(pages)), ctypes.CDLL(None)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), size, seen) == 0
        del first
    return sum(page & 1 for page in seen) / count


def test_a_copy_with_wrong_bytes_fails_the_self_check_and_is_gone(
    core: Any, config: ClusterConfig
) -> None:
    first, _ = turn(core, spec_of(LLAMA))
    for path in stored_files(config):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(SelfCheckError, match="when loaded from its files"):
        core.activate(ActivateEngine(spec_of(LLAMA)))
    assert core._device.usage().reserved_bytes == 0
    assert turn(core, spec_of(LLAMA))[0] == first


def test_other_files_under_the_same_path_are_another_model(core: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model"
    shutil.copytree(path_of(LLAMA), path)
    spec = msgspec.structs.replace(spec_of(LLAMA), path=str(path))
    _, before = turn(core, spec)
    tensors = {n: t * 0.5 for n, t in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _, after = turn(core, spec)
    assert counters(core).made_entries == 2
    assert all(torch.equal(after[n], before[n] * 0.5) for n in before)


@pytest.mark.parametrize("made", [0, 1])
def test_a_load_that_creates_objects_is_not_copied(
    core: Any, monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """Copies a load that also creates a tensor. An object, which cannot be described, prevents
    that."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    stock = DefaultModelLoader.load_weights_only

    def load(model: Any, weights: Any, device: Any) -> None:
        import torch

        stock(model, weights, device)
        model.model.derived = torch.ones(3) if made else object()
        model.model.norm.weight.data = model.model.norm.weight.data.clone()

    monkeypatch.setattr(DefaultModelLoader, "load_weights_only", staticmethod(load))
    for _ in range(2):
        turn(core, spec_of(LLAMA))
    assert counters(core).made_entries == counters(core).found_entries == made


def test_a_store_without_room_stops_no_model(core: Any, config: ClusterConfig) -> None:
    core.close()
    engine = msgspec.structs.replace(config.engine, weight_store_bytes=1 << 20)
    for small in cores(msgspec.structs.replace(config, engine=engine)):
        first, _ = turn(small, spec_of(LLAMA))
        assert turn(small, spec_of(LLAMA))[0] == first
        assert counters(small).made_entries == 0


def test_a_load_rate_is_kept(core: Any, config: ClusterConfig) -> None:
    """Takes at least as long as the bytes need at 20 MB/s."""
    turn(core, spec_of(LLAMA))
    core.close()
    engine = msgspec.structs.replace(config.engine, load_bytes_per_s=20_000_000)
    for slow in cores(msgspec.structs.replace(config, engine=engine)):
        activated = slow.activate(ActivateEngine(spec_of(LLAMA)))
        # The first chunk of 8 MiB starts at once.
        paid_bytes = spec_of(LLAMA).weight_bytes - (8 << 20)
        assert activated.stages_s["weights"] >= 0.9 * paid_bytes / 20e6


def test_addresses_are_laid_out_again_not_reserved_anew(core: Any) -> None:
    free = []
    for name in (LLAMA, QWEN3, GPT2):
        turn(core, spec_of(name))
        gc.collect()  # this test's own view of the model
        usage = core._client.addresses()
        free.append(usage.free_bytes == usage.size_bytes == usage.largest_free_bytes)
    assert free == [True] * 3
