"""Images of requests: where they may come from, their preparation, and their way to an agent."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.image_limits import ImagesConfig
from prism.config.schema.units import Seconds
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.dispatch.request_log import Mailbox, OpenRequest
from prism.frontend.http import calls
from prism.frontend.http.calls import Call
from prism.frontend.http.error_bodies import OverloadedError
from prism.frontend.images import sources
from prism.frontend.images.client import ImageClient
from prism.frontend.images.preparation import PreparedImage
from prism.frontend.images.sources import image_data, is_public
from prism.frontend.protocol.chat_types import ChatBody
from prism.frontend.requests import prompt_images
from prism.frontend.requests.prompt_images import (
    CLIENT_FETCHES_MAX,
    FETCHES_MAX,
    Prompt,
    PromptImages,
)
from prism.messages.image_tensors import PromptImage, Tensor
from prism.messages.model_spec import ImageSpec, ModelSpec
from prism.messages.requests import Failure
from prism.queueing import request_queue
from prism.queueing.request_queue import IMAGES_KEPT_S, RequestQueue
from prism.queueing.server import BundledRedis
from tests import vision_models
from tests.families import VOCAB_SIZE
from tests.frontend.conftest import make_config, make_spec, stack_of
from tests.frontend.scripted_agent import answering
from tests.queueing.requests import request

PIXELS_MAX = 1 << 20
ADDRESSES = {
    "8.8.8.8": True,
    "2606:4700::1": True,
    "127.0.0.1": False,
    "0.0.0.0": False,
    "10.1.2.3": False,
    "100.64.0.1": False,
    "169.254.169.254": False,
    "192.168.0.1": False,
    "224.0.0.1": False,
    "::1": False,
    "::ffff:10.0.0.1": False,
    "::ffff:0:127.0.0.1": False,
    "64:ff9b:1::a00:1": False,
    "fec0::1": False,
    "64:ff9b::a00:1": False,
    "2002:7f00:1::": False,
    "fd00::1": False,
    "fe80::1%eth0": False,
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_public_addresses(address: str) -> None:
    assert is_public(address) is ADDRESSES[address]


@asynccontextmanager
async def server(answer: bytes, delay_s: float = 0.0) -> AsyncIterator[str]:
    """Serves the same answer to every request on 127.0.0.1."""
    replies: list[asyncio.Task[Any]] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        replies.append(task)
        parts = [answer[i : i + 1] for i in range(len(answer))] if delay_s else [answer]
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(delay_s)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    listener = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        await asyncio.gather(*replies)


def whole(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


OPEN = ImagesConfig(urls=True, private_hosts=["127.0.0.1"], timeout_s=Seconds("5s"))


async def test_an_address_is_fetched() -> None:
    async with server(whole(b"picture")) as url:
        assert await image_data(url, OPEN) == b"picture"
        with pytest.raises(ValueError, match="does not fetch addresses"):
            await image_data(url, structs.replace(OPEN, urls=False))
        with pytest.raises(ValueError, match="leads to a private address"):
            await image_data(url, structs.replace(OPEN, private_hosts=[]))
        with pytest.raises(ValueError, match="has a user name"):
            await image_data(url.replace("127", "me@127"), OPEN)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (whole(b"", "404 Not Found"), "its server answers with 404"),
        (whole(b"", "302 Found", "location: /\r\n"), "is redirected more than 3 times"),
        (whole(b"", "302 Found", "location: file:///etc/passwd\r\n"), "is not a data:, http:"),
        (whole(b"", "302 Found", "location: http://[::1]/\r\n"), "leads to a private address"),
        (whole(b"x" * 101), "has more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, "has more than 100 bytes"),
        (whole(b""), "is empty"),
        (b"nonsense", "the connection failed"),
    ],
)
async def test_answers_that_are_refused(answer: bytes, problem: str) -> None:
    async with server(answer) as url:
        with pytest.raises(ValueError, match=problem):
            await image_data(url, structs.replace(OPEN, file_bytes=100))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:image/png;base64,", "is empty"),
        (f"http://{'a' * 64}.example/", "has a host name that is not valid"),
        ("http://a..example/", "has a host name that is not valid"),
    ],
)
async def test_urls_that_are_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}$"):
        await image_data(url, OPEN)


async def test_a_slow_server_has_a_deadline() -> None:
    async with server(whole(b"x" * 50), delay_s=0.05) as url:
        with pytest.raises(ValueError, match=r"not received within 0.5 s"):
            await image_data(url, structs.replace(OPEN, timeout_s=Seconds("500ms")))


async def test_a_name_with_a_private_address_among_others_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks the addresses that are connected to: a second resolution does not happen."""
    asked = []

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(0, 0, 0, "", (address, port)) for address in ("8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(ValueError, match="leads to a private address"):
        await image_data("http://pictures.example/1.png", OPEN)
    assert asked == ["pictures.example"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.write("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


@pytest.mark.slow
async def test_the_process_is_started_again(folder: Path) -> None:
    model, picture = make_spec("vision", folder), vision_models.png(1)
    client = ImageClient()
    try:
        made = await client.prepare(model, picture, PIXELS_MAX, 20)
        assert made.token_ids.count(VOCAB_SIZE) == 6
        with pytest.raises(ValueError, match=r"takes longer than 0.0001 s"):
            await client.prepare(model, picture, PIXELS_MAX, 0.0001)
        together = [client.prepare(model, picture, PIXELS_MAX, 20) for _ in range(3)]
        assert await asyncio.gather(*together) == [made] * 3
        other = await client.prepare(model, vision_models.png(2), PIXELS_MAX, 20)
        assert other.digest != made.digest
        assert client._process is not None
        client._process.kill()
        await client._process.wait()
        for kind in ("JPEG", "WEBP", "GIF"):
            file = vision_models.png(1, kind=kind)
            other = await client.prepare(model, file, PIXELS_MAX, 20)
            assert other.token_ids == made.token_ids
            assert (other == made) is (kind == "GIF")  # which loses nothing here
    finally:
        await client.close()


@pytest.mark.slow
async def test_the_queue_has_an_image_once(
    redis_server: BundledRedis, namespace: str, short_dir: Path, folder: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    vision = structs.replace(make_spec("vision", folder), images=ImageSpec(VOCAB_SIZE))
    config = structs.replace(config, models=[*config.models, vision])
    url = f"data:image/png;base64,{base64.b64encode(vision_models.png(1)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    queue = RequestQueue.connect(redis_server.url, namespace)
    async with stack_of(config) as stack:
        stack.agent.script = answering([20, 21])
        body = {"model": "vision", "n": 2, "messages": [{"role": "user", "content": [image] * 2}]}
        answer = await stack.client.post("/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        first, second = stack.agent.seen
        assert first.images == second.images
        assert [image.tensors for image in first.images] == [{}, {}]
        assert [run for image in first.images for run in image.runs] == [(4, 9), (12, 17)]
        assert all(first.prompt_ids[i] == VOCAB_SIZE for i in (*range(4, 10), *range(12, 18)))
        digests = {image.digest for image in first.images}
        stored = await queue.images([*digests, "unknown"])
        assert set(stored) == digests
        assert stored[first.images[0].digest]["image_grid_thw"].shape == (1, 3)
        text = {"type": "text", "text": "<|image_pad|>"}
        body["messages"] = [{"role": "user", "content": [image, text]}]
        answer = await stack.client.post("/v1/chat/completions", json=body)
        assert "has 2 placeholders for 1 images" in answer.json()["error"]["message"]
    await queue.close()


async def test_a_stored_image_expires(redis_server: BundledRedis, namespace: str) -> None:
    queue = RequestQueue.connect(redis_server.url, namespace)
    image = {"pixel_values": Tensor("float32", (1,), b"1234")}
    for _ in range(2):
        await queue.store_images({"a": image})
        assert 0 < await queue._redis.ttl(f"{namespace}:image:a") <= IMAGES_KEPT_S
    await queue._redis.set(f"{namespace}:image:b", b"junk")
    assert await queue.images(["a", "b", "c"]) == {"a": image}
    await queue.close()


async def test_stored_images_have_a_limit(
    redis_server: BundledRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for all frontends. Images that are not kept make room."""
    monkeypatch.setattr(request_queue, "IMAGES_BYTES_MAX", 2500)
    monkeypatch.setattr(request_queue, "IMAGES_KEPT_S", 1.0)
    queues = [RequestQueue.connect(redis_server.url, namespace) for _ in range(2)]
    images = {name: {"pixel_values": Tensor("uint8", (1000,), b"x" * 1000)} for name in "abc"}
    assert await queues[0].store_images({"a": images["a"]})
    assert await queues[1].store_images({"a": images["a"], "b": images["b"]})
    assert not await queues[1].store_images({"b": images["b"], "c": images["c"]})
    async with asyncio.timeout(30):
        while not await queues[1].store_images({"c": images["c"]}):
            assert await queues[0].keep_images(["a", "z"]) == {"z"}
            await asyncio.sleep(0.1)
    assert set(await queues[0].images("abc")) == {"a", "c"}
    assert 2000 < int(await queues[0]._redis.get(f"{namespace}:images_bytes")) < 2500
    for queue in queues:
        await queue.close()


async def test_a_heartbeat_keeps_images_of_open_requests(
    redis_server: BundledRedis, namespace: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "IMAGES_KEPT_S", 600.0)
    queue = RequestQueue.connect(redis_server.url, namespace)
    async with stack_of(make_config(redis_server.url, namespace, short_dir)) as stack:
        dispatcher: Dispatcher = stack.state.dispatcher
        image = PromptImage("a" * 64, ((0, 0),), {"pixel_values": Tensor("uint8", (1,), b"1")})
        asked = structs.replace(request("r", "chat"), images=(image,))
        await dispatcher.submit([OpenRequest(asked, 0, Mailbox())])
        key = f"{namespace}:image:{image.digest}"
        await queue._redis.pexpire(key, 60_000)
        async with asyncio.timeout(30):
            while await queue._redis.ttl(key) <= 60:
                await asyncio.sleep(0.05)
        # Without room, a new request is refused and a retry of an open one fails.
        monkeypatch.setattr(request_queue, "IMAGES_BYTES_MAX", 1)
        await queue._redis.unlink(key)
        refused = OpenRequest(structs.replace(asked, id="s"), 0, Mailbox())
        with pytest.raises(OverloadedError, match="too many images"):
            await dispatcher.submit([refused])
        assert dispatcher.log.get("s") is None
        entry = dispatcher.log.get("r")
        assert entry is not None
        await dispatcher._restore()
        [(_, failure)] = await entry.mailbox.take(1)
        assert isinstance(failure, Failure)
        assert failure.code == "frontend_full"
    await queue.close()


class Preparation:
    """`ImageClient` whose images are their files."""

    async def prepare(
        self, model: ModelSpec, data: bytes, pixels_max: int, timeout_s: float
    ) -> PreparedImage:
        tensors = {"pixel_values": Tensor("uint8", (len(data),), data)}
        return PreparedImage(blake2b(data).hexdigest(), [VOCAB_SIZE], tensors)

    async def close(self) -> None: ...


@asynccontextmanager
async def prompts_of(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Prompt]]]:
    """Yields a function that prepares the prompt of an HTTP request with images at addresses."""
    takes = ImageSpec(VOCAB_SIZE)
    vision = structs.replace(config.models[0], images=takes)
    monkeypatch.setattr(prompt_images, "ImageClient", Preparation)
    async with stack_of(config) as stack:
        images = PromptImages(stack.state.live, stack.state.dispatcher.log)

        async def prompt(call: Call, *urls: str) -> Prompt:
            calls.current.set(call)
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            messages = [{"role": "user", "content": parts}]
            body = ChatBody.model_validate({"model": "chat", "messages": messages})
            return await images.prompt(vision, takes, body, [VOCAB_SIZE] * len(urls))

        yield lambda *args: asyncio.create_task(prompt(*args))


def inline(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def test_images_in_preparation_count(
    redis_server: BundledRedis, namespace: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts them until their HTTP request ends, and equal ones once."""
    monkeypatch.setattr(prompt_images, "OPEN_BYTES_MAX", 25)
    config = make_config(redis_server.url, namespace, short_dir)
    async with prompts_of(config, monkeypatch) as prompt:
        first, second, third = Call("1"), Call("2"), Call("3")
        _, [a, b] = await prompt(first, inline(b"a" * 10), inline(b"b" * 10))
        _, [again] = await prompt(second, inline(b"a" * 10))
        assert again.tensors is a.tensors
        with pytest.raises(OverloadedError, match="too many images"):
            await prompt(third, inline(b"c" * 10))
        for release in first.at_end:
            release()
        _, [c] = await prompt(third, inline(b"c" * 10))
        assert len({a.digest, b.digest, c.digest}) == 3


async def test_fetches_at_once_have_limits(
    redis_server: BundledRedis, namespace: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps one client's slow servers from stalling others, and images that come inline."""
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    go_on = asyncio.Event()

    async def fetch(url: str, config: ImagesConfig) -> bytes:
        client = url.split("/")[2]
        running.update([client])
        most[client] = max(most[client], running[client])
        most["all"] = max(most["all"], running.total())
        await go_on.wait()
        running.subtract([client])
        return url.encode()

    monkeypatch.setattr(sources, "_fetched", fetch)
    config = make_config(redis_server.url, namespace, short_dir)
    async with prompts_of(config, monkeypatch) as prompt:
        clients = [f"client{number}" for number in range(6)]
        asked = [
            prompt(Call(f"{client}-{number}", client=client), f"http://{client}/{number}")
            for client in clients
            for number in range(6)
        ]
        await prompt(Call("inline", client=clients[0]), inline(b"a"))
        async with asyncio.timeout(30):
            while running.total() < FETCHES_MAX:
                await asyncio.sleep(0)
        assert running[clients[0]] == CLIENT_FETCHES_MAX
        go_on.set()
        await asyncio.gather(*asked)
    assert most["all"] == FETCHES_MAX
    assert max(most[client] for client in clients) == CLIENT_FETCHES_MAX
