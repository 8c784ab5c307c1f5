"""The store: whole entries only, shared tensors once, the least recently used one goes first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcached import (
    Checkpoint,
    LoadOptions,
    StoredWeights,
    TensorSpec,
    WeightBuilder,
    WeightKey,
    WeightStore,
    errors,
)

from .models import Tensors, assert_same, files_below, save_model, stored_arrays, tensors

MB = 1 << 20


def key(content: str, **more: int) -> WeightKey:
    return WeightKey(content, "engine-1", "float32", **more)


def put_all(made: Tensors) -> Callable[[WeightBuilder], None]:
    def produce(builder: WeightBuilder) -> None:
        for name, array in made.items():
            builder.put(name, array)

    return produce


def megabytes(count: int, seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {f"t{index}": rng.integers(0, 256, MB, dtype=np.uint8) for index in range(count)}


def never(builder: WeightBuilder) -> None:
    raise AssertionError("the entry is there: nothing should be made")


def test_a_checkpoint_is_read_once(store: WeightStore, model: Path) -> None:
    made = tensors()
    with store.get_checkpoint(model) as weights:
        assert_same(stored_arrays(weights), made)
        assert weights.size_bytes == sum(array.nbytes for array in made.values())
    first = store.counters()
    files_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert first.disk_bytes == files_bytes + weights.size_bytes
    with store.get_checkpoint(model) as again:
        assert_same(stored_arrays(again), made)
    assert store.counters().disk_bytes == first.disk_bytes
    assert (store.counters().made_entries, store.counters().found_entries) == (1, 1)


def test_another_process_finds_what_is_there(store: WeightStore, model: Path) -> None:
    store.get_checkpoint(model).close()
    other = WeightStore.open(store.directory)
    with other.get_checkpoint(model) as weights:
        assert_same(stored_arrays(weights), tensors())
    assert other.counters().disk_bytes == 0


def test_an_engines_own_form_is_made_once(store: WeightStore) -> None:
    made = {"qkv": np.arange(12, dtype=np.float32).reshape(3, 4), "s": np.array(2, np.int8)}
    keys = [key("c", rank=rank, ranks=2) for rank in range(2)] + [key("d")]
    for each in keys:
        with store.get(each, put_all(made)) as weights:
            assert weights.key == each
            assert_same(stored_arrays(weights), made)
    for each in keys:
        store.get(each, never).close()
    assert store.find(key("e")) is None
    other = WeightStore.open(store.directory).find(keys[1])
    assert other is not None
    assert_same(stored_arrays(other), made)


def test_torch_tensors_of_every_type(store: WeightStore) -> None:
    torch = pytest.importorskip("torch")
    made = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "h": torch.ones(4, dtype=torch.float16),
        "scalar": torch.tensor(3.5),
    }
    with store.get(key("c"), put_all(made)) as weights:
        assert weights.specs["b"] == TensorSpec("bfloat16", (2, 3))
        for name, tensor in made.items():
            found = torch.frombuffer(weights.buffer(name), dtype=tensor.dtype)
            assert torch.equal(found.reshape(tensor.shape), tensor)


def test_types_that_only_the_caller_knows(store: WeightStore) -> None:
    def produce(builder: WeightBuilder) -> None:
        builder.put("packed", np.zeros(8, np.uint8), dtype="float8_e4m3fn")
        with pytest.raises(errors.InvalidArgumentError, match="elements of 8 bits, not float32"):
            builder.put("x", np.zeros(8, np.uint8), dtype="float32")
        with pytest.raises(errors.InvalidArgumentError, match="pass dtype"):
            builder.put("x", np.zeros(8, np.complex64))
        with pytest.raises(errors.InvalidArgumentError, match="contiguous array in CPU or CUDA"):
            builder.put("x", np.zeros((4, 4))[:, 1:3])
        with pytest.raises(errors.InvalidArgumentError, match="contiguous array in CPU or CUDA"):
            builder.put("x", "text")
        with pytest.raises(errors.InvalidArgumentError, match="was already put"):
            builder.put("packed", np.zeros(1))

    with store.get(key("c"), produce) as weights:
        assert weights.specs == {"packed": TensorSpec("float8_e4m3fn", (8,))}


def test_tensors_of_fine_tunes_are_stored_once(store: WeightStore, tmp_path: Path) -> None:
    base = megabytes(8, seed=1)
    tuned = {**base, "t7": base["t7"] + 1}
    with store.get_checkpoint(save_model(tmp_path / "base", base)):
        before = store.used_bytes()
        with store.get_checkpoint(save_model(tmp_path / "tuned", tuned)) as weights:
            assert before == 8 * MB
            assert store.used_bytes() == 9 * MB
            assert store.counters().shared_bytes == 7 * MB
            assert weights.size_bytes == 8 * MB
    assert store.discard(
        WeightKey(store.content_of(Checkpoint.open(tmp_path / "base")), "checkpoint", "as-stored")
    )
    assert store.used_bytes() == 8 * MB
    with store.get_checkpoint(tmp_path / "tuned") as weights:
        assert_same(stored_arrays(weights), tuned)


def test_the_least_recently_used_goes_first_and_never_one_in_use(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path / "store", max_bytes=10 * MB)
    models = {name: megabytes(3, seed) for seed, name in enumerate("abcd")}
    for name in "abc":
        store.get(key(name), put_all(models[name])).close()
    in_use = store.find(key("a"))
    assert in_use is not None
    store.get(key("d"), put_all(models["d"])).close()
    assert store.find(key("b")) is None
    for name in "cd":
        store.get(key(name), never).close()
    assert store.used_bytes() == 9 * MB
    in_use.close()
    store.get(key("b"), put_all(models["b"])).close()
    assert store.find(key("c")) is None  # a was used until a moment ago
    store.get(key("a"), never).close()


def test_a_full_store_says_what_is_missing_and_changes_nothing(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path / "store", max_bytes=4 * MB)
    with store.get(key("a"), put_all(megabytes(3, 1))):
        with pytest.raises(errors.StoreFullError, match="all of its entries are in use") as refused:
            store.get(key("b"), put_all(megabytes(2, 2)))
        assert refused.value.missing_bytes == MB
        assert store.used_bytes() == 3 * MB
    store.get(key("b"), put_all(megabytes(2, 2))).close()
    assert store.find(key("a")) is None
    with pytest.raises(errors.StoreFullError):
        store.get(key("c"), put_all(megabytes(5, 3)))
    assert store.used_bytes() <= 4 * MB
    assert not files_below(store.directory / "partial")


def test_a_disk_that_fills_is_named_and_nothing_stays(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.StoreFullError, match="No space left on device"):
        store.get(key("a"), put_all(megabytes(1, 1)))
    monkeypatch.undo()
    assert store.used_bytes() == 0
    store.get(key("a"), put_all(megabytes(1, 1))).close()


def test_a_producer_that_raises_leaves_nothing(store: WeightStore) -> None:
    def produce(builder: WeightBuilder) -> None:
        builder.put("x", np.zeros(MB, np.uint8))
        raise KeyError("bug in an engine")

    with pytest.raises(KeyError):
        store.get(key("a"), produce)
    assert store.used_bytes() == 0
    with pytest.raises(errors.InvalidArgumentError, match="nothing was put"):
        store.get(key("a"), lambda builder: None)


def damage_size(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [Path.unlink, damage_size])
def test_a_damaged_entry_is_refused_by_name_and_made_anew(
    store: WeightStore, damage: Callable[[Path], None]
) -> None:
    made = megabytes(2, 1)
    with store.get(key("a"), put_all(made)) as weights:
        victim = weights.path("t1")
        damage(victim)
        with pytest.raises(errors.WeightFileError, match=str(victim)):
            store.find(key("a"))
        with pytest.raises(errors.WeightFileError, match=str(victim)):
            store.get(key("a"), never)  # still in use
    with store.get(key("a"), put_all(made)) as weights:
        assert_same(stored_arrays(weights), made)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key": 1, "check": 2}', None])
def test_a_damaged_manifest_is_refused_by_name(store: WeightStore, content: bytes | None) -> None:
    store.get(key("a"), put_all({"x": np.zeros(4)})).close()
    manifest = next(store.directory.glob("entries/*/manifest.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b"x", b"y") if content is None else content)
    with pytest.raises(errors.WeightFileError, match=f"{manifest} is damaged"):
        store.find(key("a"))
    store.get(key("a"), put_all({"x": np.ones(4)})).close()
    store.get(key("a"), never).close()


def test_a_checkpoint_that_is_cut_while_it_is_read(
    store: WeightStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(model)
    store.content_of(checkpoint)
    cut = model / "a.safetensors"
    os.truncate(cut, 3000)
    with pytest.raises(errors.WeightFileError, match=f"{cut} is damaged or not complete"):
        store.get_checkpoint(model)
    with pytest.raises(errors.WeightFileError, match=f"{cut} ends at byte"):
        store.get_checkpoint(checkpoint)
    assert store.used_bytes() == 0


def test_a_changed_file_is_another_content(store: WeightStore, tmp_path: Path) -> None:
    first = save_model(tmp_path / "m", {"x": np.zeros(4), "y": np.zeros(4)})
    store.get_checkpoint(first).close()
    second = save_model(tmp_path / "n", {"x": np.ones(4), "y": np.zeros(4)})
    for path in second.glob("*.safetensors"):
        os.replace(path, first / path.name)
    with store.get_checkpoint(first) as weights:
        assert_same(stored_arrays(weights), {"x": np.ones(4), "y": np.zeros(4)})


def test_expected_tensors_are_compared(store: WeightStore, model: Path) -> None:
    expected = Checkpoint.open(model).specs
    store.get_checkpoint(model, expected=expected).close()
    with pytest.raises(errors.WeightMismatchError, match="extra is missing"):
        store.get_checkpoint(model, expected={**expected, "extra": TensorSpec("int8", (1,))})
    assert store.discard(
        WeightKey(store.content_of(Checkpoint.open(model)), "checkpoint", "as-stored")
    )  # is not in use


def test_closed_weights_say_so(store: WeightStore) -> None:
    weights = store.get(key("a"), put_all({"x": np.zeros(4)}))
    with pytest.raises(errors.InvalidArgumentError, match="tensor 'y' is not among"):
        weights.path("y")
    weights.close()
    weights.close()
    with pytest.raises(errors.ClosedError):
        weights.path("x")


def test_a_view_outlives_eviction(store: WeightStore) -> None:
    with store.get(key("a"), put_all({"x": np.arange(1000)})) as weights:
        found = stored_arrays(weights)["x"]
    assert store.discard(key("a"))
    assert (found == np.arange(1000)).all()
    found[:] = 1  # private to this process


def test_eight_threads_make_one_entry(store: WeightStore) -> None:
    made, results = [], []

    def produce(builder: WeightBuilder) -> None:
        made.append(1)
        put_all({"x": np.arange(1000)})(builder)

    def run() -> None:
        results.append(store.get(key("a"), produce))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert [isinstance(weights, StoredWeights) for weights in results] == [True] * 8
    assert not store.discard(key("a"))
    for weights in results:
        weights.close()
    assert store.discard(key("a"))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"content": ""}, "must not be empty"),
        ({"rank": 2, "ranks": 2}, "rank 2 must be below ranks"),
        ({"rank": -1}, "rank is -1"),
    ],
)
def test_keys_are_checked(bad: dict[str, Any], why: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=why):
        WeightKey(**{"content": "c", "engine": "e", "dtype": "d", **bad})


def test_directories_are_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.InvalidArgumentError, match="cannot hold a weight store"):
        WeightStore.open(tmp_path / "file")
    with pytest.raises(errors.InvalidArgumentError, match="contains other files, such as file"):
        WeightStore.open(tmp_path)
    assert files_below(tmp_path) == {"file"}
    with pytest.raises(errors.InvalidArgumentError, match="namespace"):
        WeightStore.open(namespace="a/b")
    store = WeightStore.open(tmp_path / "store")
    assert store.max_bytes > 0
    (store.directory / "version").write_text("prism-weights 99\n")
    with pytest.raises(errors.WeightFileError, match="another version"):
        WeightStore.open(tmp_path / "store")


def test_a_put_that_failed_leaves_nothing_in_the_entry(store: WeightStore) -> None:
    def produce(builder: WeightBuilder) -> None:
        builder.put("first", np.arange(3))
        with pytest.raises(errors.InvalidArgumentError, match="takes 8 bytes, not 2"):
            builder.put_bytes("second", TensorSpec("int64", (1,)), [b"ab"])
        builder.put("third", np.arange(5))
        builder.put("second", np.arange(4))

    with store.get(key("x"), produce) as weights:
        assert_same(
            stored_arrays(weights),
            {"first": np.arange(3), "third": np.arange(5), "second": np.arange(4)},
        )


@pytest.mark.parametrize("threads", [0, 1024, 2**31])
def test_a_number_of_threads_has_a_bound(store: WeightStore, threads: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"from 1 to 2\^10 - 1"):
        WeightStore.open(store.directory, threads=threads)
    with pytest.raises(errors.InvalidArgumentError, match=r"from 1 to 2\^10 - 1"):
        LoadOptions(threads=threads)
