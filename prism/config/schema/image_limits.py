"""Images in prompts, in the YAML."""

from __future__ import annotations

from prism.config.schema.machines import Strict
from prism.config.schema.units import Bytes, Seconds


class ImagesConfig(
    Strict,
    frozen=True,
    rename={"file_bytes": "file_max", "request_bytes": "request_max", "timeout_s": "timeout"},
):
    """Images that requests to a frontend may have."""

    # The most images of a request.
    count_max: int = 16
    # The most bytes of an image's file.
    file_bytes: Bytes = Bytes("20MiB")
    # The most pixels of an image, before the model's processor makes it smaller.
    pixels_max: int = 32_000_000
    # The most bytes of a request's images as the model takes them.
    request_bytes: Bytes = Bytes("64MiB")
    # The time to fetch an image, and to prepare one.
    timeout_s: Seconds = Seconds("20s")
    # Whether requests may have http:// and https:// addresses of images, which the frontend
    # fetches. Otherwise they have the images as data: URLs.
    urls: bool = False
    # Hosts that may have addresses of a private network or of this machine.
    private_hosts: list[str] = []
