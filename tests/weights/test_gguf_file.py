"""Headers of GGUF files: the reference's are read, and errors on damaged ones name the file."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from kvcached import Checkpoint, TensorSpec, WeightStore, errors
from kvcached.weights.gguf_file import TYPES, read_header

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(1)
    writer.add_context_length(512)
    writer.add_token_list(["a", "bé", ""])
    writer.add_token_types([1, 1, 3])
    writer.add_bool("llama.flag", True)
    for name, form in (("a", Type.Q4_0), ("b", Type.F16), ("c", Type.BF16), ("d", Type.F32)):
        values = rng.normal(size=(6, 64)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_types_are_those_of_the_reference() -> None:
    assert {(int(k), k.name, *v) for k, v in gguf.GGML_QUANT_SIZES.items()} == {
        (number, *type_) for number, type_ in TYPES.items()
    }


def test_tensors_are_those_of_the_reference(file: Path) -> None:
    checkpoint = Checkpoint.open(file.parent)
    assert checkpoint.files == (file,)
    assert checkpoint.specs == {
        "a": TensorSpec("uint8", (6, 36)),
        "b": TensorSpec("float16", (6, 64)),
        "c": TensorSpec("bfloat16", (6, 64)),
        "d": TensorSpec("float32", (6, 64)),
    }
    reference = gguf.GGUFReader(file)
    content = file.read_bytes()
    for each in reference.tensors:
        tensor = checkpoint.tensors[each.name]
        assert (tensor.ggml_type, tensor.shape) == (each.tensor_type.name, (6, 64))
        end = tensor.offset_bytes + tensor.spec.size_bytes
        assert content[tensor.offset_bytes : end] == each.data.tobytes()
    header = read_header(file)
    assert header.metadata["llama.context_length"] == 512
    assert header.metadata["llama.flag"] is True
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.size_bytes == reference.data_offset


def test_the_store_has_a_files_tensors(file: Path, tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path / "store", max_bytes=1 << 20)
    with store.get_checkpoint(file.parent) as stored:
        assert stored.specs == Checkpoint.open(file).specs
        quantized = next(each for each in gguf.GGUFReader(file).tensors if each.name == "a")
        assert bytes(stored.buffer("a")) == quantized.data.tobytes()


def test_which_file_of_a_folder(file: Path) -> None:
    (file.parent / "mmproj-m.gguf").write_bytes(b"")
    assert Checkpoint.open(file.parent).files == (file,)
    (file.parent / "n.gguf").write_bytes(b"")
    with pytest.raises(errors.WeightFileError, match=r"has m.gguf and 1 more \*.gguf; give"):
        Checkpoint.open(file.parent)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(errors.WeightFileError, match="is one of 3 parts of a model; merge them"):
        read_header(path)


@pytest.mark.parametrize(
    ("at", "content", "why"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "its version is 0x1, and 2 and 3"),
        (4, struct.pack(">I", 3), "its version is 0x3000000, and 2 and 3"),
        (8, struct.pack("<Q", 1 << 60), "is damaged"),
        (16, struct.pack("<Q", 1 << 60), "is damaged"),
        (24, struct.pack("<Q", 1 << 60), "its header does not fit into the file"),
    ],
)
def test_headers_that_lie(file: Path, at: int, content: bytes, why: str) -> None:
    whole = bytearray(file.read_bytes())
    whole[at : at + len(content)] = content
    file.write_bytes(whole)
    with pytest.raises(errors.WeightFileError, match=rf"m.gguf is damaged.*{why}|m.gguf {why}"):
        Checkpoint.open(file)


def test_a_file_that_is_cut_or_empty(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(errors.WeightFileError, match=r"tensor \w is beyond its end"):
        Checkpoint.open(file)
    file.write_bytes(b"")
    with pytest.raises(errors.WeightFileError, match=r"m.gguf is damaged"):
        Checkpoint.open(file)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_is_an_error_or_another_header(file: Path, seed: int) -> None:
    rng, whole = random.Random(seed), file.read_bytes()
    end = read_header(file).size_bytes
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(end)] = rng.randrange(256)
        file.write_bytes(damaged)
        with contextlib.suppress(errors.KvcachedError):
            Checkpoint.open(file)
