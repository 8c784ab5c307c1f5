"""Safetensors headers: the reference's are read, and errors on damaged ones name the file."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcached import Checkpoint, TensorSpec, errors

from .models import tensors


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def write(path: Path, header: object, rest: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_of_a_model_are_found(model: Path) -> None:
    made, checkpoint = tensors(), Checkpoint.open(model)
    assert [path.name for path in checkpoint.files] == ["a.safetensors", "b.safetensors"]
    assert checkpoint.specs == {
        name: TensorSpec(array.dtype.name, array.shape) for name, array in made.items()
    }
    assert checkpoint.size_bytes == sum(array.nbytes for array in made.values())
    for name, tensor in checkpoint.tensors.items():
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset_bytes)
            assert file.read(tensor.spec.size_bytes) == made[name].tobytes()


def test_every_type_of_the_format(tmp_path: Path) -> None:
    floats = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
    integers = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1}
    names = {**floats, **integers, "BOOL": 1}
    header, end = {}, 0
    for name, size in names.items():
        header[name] = entry(name, [3], end, end + 3 * size)
        end += 3 * size
    checkpoint = Checkpoint.open(write(tmp_path / "types.safetensors", header, bytes(end)))
    assert len({spec.dtype for spec in checkpoint.specs.values()}) == len(names)


def test_without_an_index_all_files_count(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({name: np.zeros(2)}, str(tmp_path / f"{name}.safetensors"))
    assert set(Checkpoint.open(tmp_path).specs) == {"x", "y"}
    assert set(Checkpoint.open(tmp_path / "y.safetensors").specs) == {"y"}
    save_file({"x": np.zeros(2)}, str(tmp_path / "z.safetensors"))
    with pytest.raises(errors.WeightFileError, match=r"z.safetensors: tensor x is in .*x.safeten"):
        Checkpoint.open(tmp_path)


WRONG = {
    "empty": (b"", "does not fit into the file"),
    "short length": (b"\x08\0\0", "does not fit into the file"),
    "huge length": (struct.pack("<Q", 1 << 62) + b"{}", "does not fit into the file"),
    "no JSON": (struct.pack("<Q", 3) + b"{x}", "is not valid JSON"),
    "no text": (struct.pack("<Q", 2) + b"\xff\xfe", "is not valid JSON"),
    "a list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_headers_that_are_none(tmp_path: Path, case: str) -> None:
    content, why = WRONG[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(errors.WeightFileError, match=f"bad.safetensors is damaged.*{why}"):
        Checkpoint.open(tmp_path)


ODD = {
    "unknown type": ({"t": entry("F7", [1], 0, 1)}, 1, "tensor t: 'F7'"),
    "no offsets": ({"t": {"dtype": "F32", "shape": [1]}}, 4, "tensor t: 'data_offsets'"),
    "negative extent": ({"t": entry("F32", [-1], 0, 4)}, 4, "tensor t: shape"),
    "wrong size": ({"t": entry("F32", [2], 0, 4)}, 4, "takes 4 bytes"),
    "beyond the end": ({"t": entry("F32", [2], 0, 8)}, 4, "its header describes"),
    "a hole": ({"t": entry("U8", [1], 1, 2)}, 2, "does not begin where"),
    "overlap": (
        {"t": entry("U8", [2], 0, 2), "u": entry("U8", [2], 1, 3)},
        3,
        "does not begin where",
    ),
    "bytes left": ({"t": entry("U8", [1], 0, 1)}, 2, "its header describes"),
    "no entry": ({"t": 3}, 0, "tensor t"),
}


@pytest.mark.parametrize("case", ODD)
def test_headers_that_lie(tmp_path: Path, case: str) -> None:
    header, rest, why = ODD[case]
    write(tmp_path / "bad.safetensors", header, bytes(rest))
    with pytest.raises(errors.WeightFileError, match=f"bad.safetensors is damaged.*{why}"):
        Checkpoint.open(tmp_path)


def test_missing_files_are_named(tmp_path: Path, model: Path) -> None:
    (model / "b.safetensors").unlink()
    with pytest.raises(errors.WeightFileError, match=r"b.safetensors: No such file"):
        Checkpoint.open(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(errors.WeightFileError, match=r"index.json is damaged"):
        Checkpoint.open(model)
    (tmp_path / "none").mkdir()
    with pytest.raises(errors.WeightFileError, match=r"does not have \*.safetensors"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(errors.InvalidArgumentError, match="neither a file nor a directory"):
        Checkpoint.open(tmp_path / "nowhere")


def open_or_error(path: Path) -> tuple[Checkpoint | None, str]:
    try:
        return Checkpoint.open(path), ""
    except errors.WeightFileError as error:
        return None, str(error)


@pytest.mark.parametrize("seed", range(3))
def test_a_file_cut_or_flipped_anywhere_is_refused_or_means_the_same(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "m.safetensors"
    save_file({"x": np.arange(6.0), "y": np.arange(3, dtype=np.int8)}, str(path))
    whole = path.read_bytes()
    header_bytes = len(whole) - 6 * 8 - 3
    for _ in range(150):
        content = bytearray(whole)
        if rng.random() < 0.5:
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(header_bytes)] = rng.randrange(256)
        path.write_bytes(content)
        found, why = open_or_error(path)
        if found is None:
            assert str(path) in why
        else:
            assert found.size_bytes <= len(whole)
            assert all(tensor.offset_bytes <= len(content) for tensor in found.tensors.values())


def test_expected_tensors_are_compared(model: Path) -> None:
    expected = Checkpoint.open(model).specs
    Checkpoint.open(model, expected=expected)
    expected["embed"] = TensorSpec("float32", (1000, 64))
    expected["head"] = expected.pop("scale")
    with pytest.raises(errors.WeightMismatchError) as refused:
        Checkpoint.open(model, expected=expected)
    for words in (str(model), "head is missing", "scale is not expected", "not float32[1000, 64]"):
        assert words in str(refused.value)


def test_a_path_that_the_os_refuses_is_named() -> None:
    with pytest.raises(errors.WeightFileError, match="File name too long"):
        Checkpoint.open("x" * 5000)
