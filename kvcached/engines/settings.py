"""What the environment says of an engine's place on a device (docs/kvcached-adapters.md)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import kvcached._core as _core
from kvcached.checks import namespace_name, text
from kvcached.device import Device
from kvcached.errors import DeviceMismatchError, InvalidArgumentError, UnknownDeviceError
from kvcached.tools.sizes import parse_size

_PREFIX = "KVCACHED_"
_SIZES = ("CAPACITY", "PAGE", "LIMIT", "MINIMUM", "STATIC")
_TEXTS = ("DEVICE", "NAMESPACE", "NAME")
# Of the library itself: other files to load in the place of the driver's.
_OTHERS = ("LIBCUDA", "LIBNVML")
# Of the double of CUDA that tests load.
_DOUBLES = "TEST_CUDA_"


@dataclass(frozen=True)
class Settings:
    """One engine's. None: not said."""

    device: str
    namespace: str = "default"
    name: str | None = None
    """The client's, for `kvctl`; the engine's model by default."""
    capacity_bytes: int | None = None
    """Of the device, if its ledger is to be made; every engine says the same."""
    page_bytes: int | None = None
    limit_bytes: int | None = None
    """Bounds the engine's KV."""
    min_bytes: int | None = None
    """KV that no other engine can take; what one request of full length needs by default."""
    static_bytes: int | None = None
    """What the engine takes beside KV: weights, activations. By default the weights, measured."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """REQUIRES: KVCACHED_DEVICE is set. Raises InvalidArgumentError, UnknownDeviceError, which
        name the variable."""
        said = {
            name.removeprefix(_PREFIX): value
            for name, value in environment.items()
            if name.startswith(_PREFIX) and value
        }
        _check_names(said)
        sizes = {name: _size(name, said[name]) for name in _SIZES if name in said}
        settings = cls(
            device=said["DEVICE"],
            namespace=said.get("NAMESPACE", "default"),
            name=said.get("NAME"),
            capacity_bytes=sizes.get("CAPACITY"),
            page_bytes=sizes.get("PAGE"),
            limit_bytes=sizes.get("LIMIT"),
            min_bytes=sizes.get("MINIMUM"),
            static_bytes=sizes.get("STATIC"),
        )
        settings._check()
        return settings

    def open_device(self) -> Device:
        """Raises what Device.open raises; of a missing ledger, and of one that others made with
        another size, with the variables to set."""
        try:
            return Device.open(
                self.device,
                capacity_bytes=self.capacity_bytes,
                page_bytes=self.page_bytes,
                namespace=self.namespace,
            )
        except UnknownDeviceError as error:
            if self.capacity_bytes is not None:
                raise
            raise UnknownDeviceError(f"{error}; or set KVCACHED_CAPACITY, to make it") from error
        except DeviceMismatchError as error:
            raise DeviceMismatchError(
                f"{error}: KVCACHED_CAPACITY and KVCACHED_PAGE are the same for all, or not set"
            ) from error
        except InvalidArgumentError as error:
            raise type(error)(f"{error}: correct KVCACHED_CAPACITY or KVCACHED_PAGE") from error

    def _check(self) -> None:
        _core.check_device_name(self.device)
        namespace_name("namespace", self.namespace)
        if self.name is not None:
            text("KVCACHED_NAME", self.name)
        if self.limit_bytes is not None and (self.min_bytes or 0) > self.limit_bytes:
            raise InvalidArgumentError("KVCACHED_MINIMUM is above KVCACHED_LIMIT; lower it")


def _check_names(said: Mapping[str, str]) -> None:
    known = (*_SIZES, *_TEXTS, *_OTHERS)
    for name in said:
        if name not in known and not name.startswith(_DOUBLES):
            near = difflib.get_close_matches(name, known, 1) or known
            hint = ", ".join(_PREFIX + one for one in near)
            raise InvalidArgumentError(f"{_PREFIX}{name} is not known; there is {hint}")


def _size(name: str, value: str) -> int:
    try:
        size_bytes = parse_size(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{_PREFIX}{name}: {error}") from error
    if size_bytes == 0:
        raise InvalidArgumentError(f"{_PREFIX}{name} is 0; unset it, or give a size")
    return size_bytes
