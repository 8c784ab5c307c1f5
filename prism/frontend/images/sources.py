"""Data of images: from data: URLs, and from http: and https: addresses."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from prism.config.schema.image_limits import ImagesConfig

REDIRECTS_MAX = 3
ADDRESS_CHARS_MAX = 4096
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_DATA = re.compile(r"data:image/(png|jpe?g|webp|gif);base64,", re.IGNORECASE)
_INLINE_CHARS_MAX = 64 << 10
_IPV6_INTERNET = ipaddress.IPv6Network("2000::/3")
# Networks among them whose addresses lead to an IPv4 address.
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("2001::/32", "2002::/16")))


def is_inline(url: str) -> bool:
    return url[:5].lower() == "data:"


async def image_data(url: str, config: ImagesConfig) -> bytes:
    """Returns the file of an image. Raises ValueError with what is wrong with `url`."""
    if is_inline(url):
        long = len(url) > _INLINE_CHARS_MAX
        data = await asyncio.to_thread(_decoded, url) if long else _decoded(url)
    else:
        data = await _fetched(url, config)
    if not data:
        raise ValueError("is empty")
    if len(data) > config.file_bytes:
        raise _too_large(config)
    return data


def _decoded(url: str) -> bytes:
    match = _DATA.match(url)
    if match is None:
        raise ValueError("is not data:image/png;base64,... (or jpeg, webp, gif)")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("is not valid base64") from error


def _too_large(config: ImagesConfig) -> ValueError:
    return ValueError(
        f"has more than {config.file_bytes} bytes (frontend.images.file_max); send a smaller file"
    )


async def _fetched(url: str, config: ImagesConfig) -> bytes:
    if not config.urls:
        raise ValueError(
            "is not a data: URL; this server does not fetch addresses (frontend.images.urls)"
        )
    try:
        async with asyncio.timeout(config.timeout_s):
            return await _followed(url, config)
    except TimeoutError as error:
        limit = f"{config.timeout_s:g} s (frontend.images.timeout)"
        raise ValueError(f"was not received within {limit}") from error
    except UnicodeError as error:  # of a label that is empty or too long
        raise ValueError("has a host name that is not valid") from error
    except (httpcore.ConnectError, httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise ValueError("cannot be fetched: the connection failed") from error


async def _followed(url: str, config: ImagesConfig) -> bytes:
    for _ in range(REDIRECTS_MAX + 1):
        _check(url)
        backend = PublicBackend(config.private_hosts)
        async with (
            httpcore.AsyncConnectionPool(_ssl_context(), network_backend=backend) as pool,
            pool.stream("GET", url, headers=[("accept", "image/*")]) as response,
        ):
            if response.status in _REDIRECTS:
                location = dict(response.headers).get(b"location", b"").decode("latin-1")
                url = urljoin(url, location)
                continue
            if response.status != 200:
                raise ValueError(f"cannot be fetched: its server answers with {response.status}")
            data = bytearray()
            async for part in response.aiter_stream():
                data += part
                if len(data) > config.file_bytes:
                    raise _too_large(config)
            return bytes(data)
    raise ValueError(f"is redirected more than {REDIRECTS_MAX} times")


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in _PORTS and bool(parts.hostname)
        port = parts.port
    except ValueError as error:
        raise ValueError("is not a valid address") from error
    if not known or port == 0 or not url.isascii() or len(url) > ADDRESS_CHARS_MAX:
        raise ValueError("is not a data:, http: or https: URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError("has a user name; remove it")


@lru_cache
def _ssl_context() -> ssl.SSLContext:
    return ssl.create_default_context()


class PublicBackend(httpcore.AsyncNetworkBackend):
    """Network on which only public addresses can be reached, besides those of `private_hosts`.

    The address that is checked is the one that is connected to: another resolution of the name
    between the two could give another one.
    """

    def __init__(self, private_hosts: Iterable[str]) -> None:
        self._private_hosts = frozenset(private_hosts)
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        if host not in self._private_hosts and not all(map(is_public, addresses)):
            raise ValueError("leads to a private address, which this server does not fetch from")
        return await self._network.connect_tcp(addresses[0], port, timeout, local_address)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.AsyncNetworkStream:
        raise ValueError("is not a network address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def is_public(address: str) -> bool:
    """Returns whether an IP address is one of the internet, and not of a private network, this
    machine, a link, or a translation to such an address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip not in _IPV6_INTERNET or any(ip in network for network in _TRANSLATED):
            return False
    return ip.is_global and not ip.is_multicast
