"""Load generator of streamed completions for `routers.py`. Prints times as JSON.

    python bench/stream_load.py URL --streams 256 [--over-s 0] [--tokens 32]

Each stream is a separate connection. With `--over-s` streams begin evenly over that time instead of
at once. A loop on epoll only reads, counts events and records times, so it uses little CPU next to
the measured server.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

EVENT = b"data: {"
GIVE_UP_S = 120.0


@dataclass(slots=True)
class Stream:
    """One request. Times are monotonic, in seconds."""

    client: socket.socket
    began_s: float
    sent: bool = False
    head: bytes = b""  # first bytes
    end: bytes = b""  # last bytes, which may be a part of an event
    events: int = 0
    token_s: list[float] = field(default_factory=list)  # times of reads with tokens


def request(number: int, tokens: int) -> bytes:
    asked = {"model": "m", "stream": True, "ignore_eos": True, "max_tokens": tokens}
    body = json.dumps({**asked, "prompt": f"describe {number}"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body


def begin(address: tuple[str, int]) -> Stream:
    client = socket.socket()
    client.setblocking(False)
    began_s = time.monotonic()
    client.connect_ex(address)
    return Stream(client, began_s)


def read(stream: Stream) -> bool:
    """Reads available data. Returns False if the stream has ended."""
    data = stream.client.recv(1 << 16)
    stream.head = stream.head or data[:300]
    come = (stream.end + data).count(EVENT)
    stream.end = (stream.end + data)[-len(EVENT) + 1 :] if data else stream.end
    if come:
        stream.events += come
        stream.token_s.append(time.monotonic())
    return bool(data)


def load(address: tuple[str, int], streams: int, over_s: float, tokens: int) -> list[Stream]:
    poll, open_, done = select.epoll(), dict[int, Stream](), list[Stream]()
    start_s, begun = time.monotonic(), 0
    while len(done) < streams:
        now_s = time.monotonic() - start_s
        if now_s > over_s + GIVE_UP_S:
            sys.exit(f"error: {streams - len(done)} streams did not end")
        while begun < streams and now_s >= over_s * begun / streams:
            stream = begin(address)
            open_[stream.client.fileno()] = stream
            poll.register(stream.client, select.EPOLLOUT)
            begun += 1
        wait_s = over_s * begun / streams - now_s if begun < streams else 1.0
        for number, _ in poll.poll(max(0.0, wait_s)):
            stream = open_[number]
            if not stream.sent:
                asked = request(number, tokens)
                stream.sent = stream.client.send(asked) == len(asked)
                poll.modify(number, select.EPOLLIN)
            elif not read(stream):
                done.append(open_.pop(number))
                poll.unregister(number)
                stream.client.close()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--over-s", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    place = urlsplit(options.url)
    address = (place.hostname or "127.0.0.1", place.port or 80)
    streams = load(address, options.streams, options.over_s, options.tokens)
    for each in streams:
        if b" 200 " not in each.head[:20] or not each.events:
            sys.exit(f"error: {options.url} answered {each.head!r}")
    gaps = [b - a for s in streams for a, b in zip(s.token_s, s.token_s[1:], strict=False)]
    ttft = [each.token_s[0] - each.began_s for each in streams]
    print(json.dumps({"ttft_s": ttft, "gap_s": gaps, "events": sum(s.events for s in streams)}))


if __name__ == "__main__":
    main()
