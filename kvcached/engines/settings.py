"""Settings of an engine on a device, from environment variables (docs/kvcached-adapters.md)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import kvcached._core as _core
from kvcached.checks import namespace_name, text
from kvcached.device import Device
from kvcached.errors import DeviceMismatchError, InvalidArgumentError, UnknownDeviceError
from kvcached.tools.sizes import parse_size

_PREFIX = "KVCACHED_"
_SIZES = ("CAPACITY", "PAGE", "LIMIT", "MINIMUM", "STATIC")
_TEXTS = ("DEVICE", "NAMESPACE", "NAME")
# Libraries that kvcached loads instead of the driver's.
_LIBRARIES = ("LIBCUDA", "LIBNVML")
# Prefix of the settings of the tests' CUDA double.
_DOUBLES = "TEST_CUDA_"


@dataclass(frozen=True)
class Settings:
    """Settings of one engine. None: not set."""

    device: str
    namespace: str = "default"
    name: str | None = None
    """Name of the client, for `kvctl`. Default: the engine's model."""
    capacity_bytes: int | None = None
    """Capacity of the device, for creating its ledger. Equal for all engines."""
    page_bytes: int | None = None
    limit_bytes: int | None = None
    """Limit of the engine's KV."""
    min_bytes: int | None = None
    """KV that no other engine can take. Default: the KV of one request of full length."""
    static_bytes: int | None = None
    """The engine's memory other than KV: weights, activations. Default: the measured weights."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Reads the variables KVCACHED_*.

        REQUIRES: KVCACHED_DEVICE is set. Raises InvalidArgumentError or UnknownDeviceError with the
        variable's name.
        """
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

    def of_device(self, offset: int) -> Settings:
        """Returns the settings of a rank whose device is `offset` after that of rank 0."""
        kind, _, ordinal = self.device.partition(":")
        return replace(self, device=f"{kind}:{int(ordinal) + offset}")

    def open_device(self) -> Device:
        """Opens the device. Raises the errors of Device.open.

        For a missing ledger, and one of another size, the message names the variables to set.
        """
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
            raise UnknownDeviceError(f"{error}; or set KVCACHED_CAPACITY to create it") from error
        except DeviceMismatchError as error:
            raise DeviceMismatchError(
                f"{error}: set KVCACHED_CAPACITY and KVCACHED_PAGE to the same values for all "
                "engines, or unset them"
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
    known = (*_SIZES, *_TEXTS, *_LIBRARIES)
    for name in said:
        if name not in known and not name.startswith(_DOUBLES):
            near = difflib.get_close_matches(name, known, 1) or known
            hint = ", ".join(_PREFIX + one for one in near)
            raise InvalidArgumentError(f"{_PREFIX}{name} is not a known variable; known: {hint}")


def _size(name: str, value: str) -> int:
    try:
        size_bytes = parse_size(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{_PREFIX}{name}: {error}") from error
    if size_bytes == 0:
        raise InvalidArgumentError(f"{_PREFIX}{name} is 0; unset it, or give a size")
    return size_bytes
