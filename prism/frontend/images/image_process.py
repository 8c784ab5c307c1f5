"""Process that prepares images, so that neither a slow nor a malicious one can stall a frontend:
python -m prism.frontend.images.image_process.

A message is its length in four bytes, big-endian, and MessagePack: `Ask` on stdin, `Answer` on
stdout. One that takes longer than its client waits is killed.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
import warnings
from typing import BinaryIO

import msgspec

from prism.frontend.images.preparation import PreparedImage, Preparer
from prism.process import die_with_parent

HEADER = struct.Struct(">I")
# More than a decoder needs for the largest picture, with the imported libraries.
_MEMORY_BYTES_MAX = 16 << 30


class Ask(msgspec.Struct, frozen=True):
    """Image to prepare. Without data, the model's processor is loaded."""

    folder: str  # of the model
    dtype: str
    data: bytes = b""  # the file
    pixels_max: int = 0


class Answer(msgspec.Struct, frozen=True):
    """Prepared image, or what is wrong with it."""

    image: PreparedImage | None = None
    error: str = ""


def main() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    _serve(sys.stdin.buffer, answers)


def _serve(asks: BinaryIO, answers: BinaryIO) -> None:
    preparer = Preparer()
    while header := asks.read(HEADER.size):
        asked = msgspec.msgpack.decode(asks.read(HEADER.unpack(header)[0]), type=Ask)
        packed = msgspec.msgpack.encode(_answer(preparer, asked))
        answers.write(HEADER.pack(len(packed)) + packed)
        answers.flush()


def _answer(preparer: Preparer, asked: Ask) -> Answer:
    try:
        if not asked.data:
            preparer.load(asked.folder)
            return Answer()
        return Answer(preparer.prepare(asked.folder, asked.dtype, asked.data, asked.pixels_max))
    except MemoryError:
        return Answer(error="takes too much memory")
    except Exception as error:  # noqa: BLE001 - processors of models raise errors of every kind
        return Answer(error=" ".join(str(error).split()) or type(error).__name__)


if __name__ == "__main__":
    main()
