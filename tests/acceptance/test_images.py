"""Images through the HTTP endpoint: answers are those of transformers' whole model."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import vision_models
from tests.acceptance.harness import HTTP, Cluster, cluster_yaml, model_yaml, serving
from tests.sglang.models import TIE

pytestmark = pytest.mark.sglang

KIND = "qwen2_5_vl"
TOKENS = 24
PICTURES = [vision_models.png(seed, (90, 60)) for seed in range(2)]


class Pictures(BaseHTTPRequestHandler):
    """Server of pictures: /0 and /1, /moved to /0, /away to another host, and /endless."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        places = {"moved": "/0", "away": f"http://localhost:{self.server.server_address[1]}/0"}
        if name in places:
            self.send_response(302)
            self.send_header("location", places[name])
            self.send_header("content-length", "0")
            self.end_headers()
            return
        data = PICTURES[int(name)] if name.isdecimal() else b"x" * (2 << 20)
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def pictures() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.write(KIND, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def cluster(
    folder: Path, tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    images = {
        "urls": True,
        "private_hosts": ["127.0.0.1"],
        "file_max": "1MiB",
        "pixels_max": 90 * 60,
        "count_max": 3,
    }
    config = cluster_yaml(
        [{"name": "vision", "path": str(folder)}, model_yaml(tiny_models[0])],
        [{"name": "host:0", "capacity": "512MiB", "page": "64KiB", "engines": 2}],
        frontend={"images": images},
    )
    with serving(config, tmp_path_factory.mktemp("images")) as made:
        yield made


def data_url(picture: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(picture).decode()}"


def parts(*urls: str) -> list[dict[str, Any]]:
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": "What is"}, *shown, {"type": "text", "text": "this?"}]


def chat(cluster: Cluster, *urls: str, **more: Any) -> httpx.Response:
    body: dict[str, Any] = {
        "model": "vision",
        "messages": [{"role": "user", "content": parts(*urls)}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    return HTTP.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120)


def check(folder: Path, answer: httpx.Response, *files: bytes) -> list[int]:
    """Compares an answer with transformers'. Returns its tokens."""
    assert answer.status_code == 200, answer.text
    made = answer.json()
    text = "<|im_start|>user\nWhat is" + vision_models.placeholder(KIND) * len(files)
    text += "this?<|im_end|>\n<|im_start|>assistant\n"
    output: list[int] = made["choices"][0]["token_ids"]
    ids, chosen, best = vision_models.logprobs(KIND, folder, output, files, text=text)
    assert made["usage"]["prompt_tokens"] == len(ids)
    assert len(output) == TOKENS
    assert max(b - c for b, c in zip(best, chosen, strict=True)) < TIE
    return output


def test_a_picture_in_the_request(cluster: Cluster, folder: Path) -> None:
    first, second = (
        check(folder, chat(cluster, data_url(picture)), picture) for picture in PICTURES
    )
    assert first != second
    check(folder, chat(cluster, *map(data_url, PICTURES)), *PICTURES)


def test_a_picture_at_an_address(cluster: Cluster, folder: Path, pictures: str) -> None:
    check(folder, chat(cluster, f"{pictures}/1"), PICTURES[1])
    check(folder, chat(cluster, f"{pictures}/moved"), PICTURES[0])


def test_choices_and_other_apis(cluster: Cluster, folder: Path) -> None:
    answer = chat(cluster, data_url(PICTURES[0]), n=2)
    check(folder, answer, PICTURES[0])
    choices = answer.json()["choices"]
    assert choices[0]["token_ids"] == choices[1]["token_ids"]
    text = choices[0]["message"]["content"]
    encoded = base64.b64encode(PICTURES[0]).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [*parts()[:1], {"type": "image", "source": source}, *parts()[1:]]
    common = {"model": "vision", "temperature": 0, "ignore_eos": True}
    message = {"messages": [{"role": "user", "content": blocks}], "max_tokens": TOKENS, **common}
    made = HTTP.post(f"{cluster.url}/v1/messages", json=message, timeout=120).json()
    assert made["content"][0]["text"] == text
    counted = {"model": "vision", "messages": message["messages"]}
    count = HTTP.post(f"{cluster.url}/v1/messages/count_tokens", json=counted, timeout=120).json()
    assert count["input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    content = [
        {"type": "input_text", "text": "What is"},
        {"type": "input_image", "image_url": data_url(PICTURES[0])},
        {"type": "input_text", "text": "this?"},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": TOKENS, **common}
    made = HTTP.post(f"{cluster.url}/v1/responses", json=body, timeout=120).json()
    assert made["output"][0]["content"][0]["text"] == text


def test_refusals(cluster: Cluster, folder: Path, pictures: str, tiny_models: Any) -> None:
    small = data_url(PICTURES[0])
    refused = {
        "takes no images": ([small], {"model": tiny_models[0]}, "does not take images"),
        "broken base64": (["data:image/png;base64,x"], {}, "image 0 is not valid base64"),
        "wrong type": ([small.replace("png", "tiff")], {}, "image 0 is not data:image/png"),
        "no image": ([data_url(b"text")], {}, "image 0 is not a readable PNG"),
        "cut": ([small, data_url(PICTURES[1][:200])], {}, "image 1 is not a readable PNG"),
        "large": ([data_url(vision_models.png(0, (90, 61)))], {}, "at most 5400 are allowed"),
        "many": ([small] * 4, {}, "has 4 images; at most 3 are allowed"),
        "scheme": (["file:///etc/passwd"], {}, "image 0 is not a data:, http: or https: URL"),
        "host": ([pictures.replace("127.0.0.1", "localhost")], {}, "leads to a private address"),
        "redirect": ([f"{pictures}/away"], {}, "leads to a private address"),
        "long file": ([f"{pictures}/endless"], {}, "has more than 1048576 bytes"),
        "no server": (["http://127.0.0.1:9/"], {}, "cannot be fetched"),
    }
    for name, (urls, more, expected) in refused.items():
        answer = chat(cluster, *urls, **more)
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert expected in error["message"], name
        assert error["param"] == "messages", name
        assert "\n" not in error["message"], name
    check(folder, chat(cluster, small), PICTURES[0])


@pytest.mark.parametrize("end", ["killed", "evicted"])
def test_an_answer_continues_on_another_engine(cluster: Cluster, end: str) -> None:
    """Ends the engine without a warning, or its model as an operator does."""
    whole = chat(cluster, data_url(PICTURES[0]), max_tokens=200).json()["choices"][0]
    report = cluster.model_report("vision")
    assert report is not None
    before = sum(agent["engine_restarts_total"] for agent in cluster.agents())
    body = {"stream": True, "max_tokens": 200}
    messages = [{"role": "user", "content": parts(data_url(PICTURES[0]))}]
    common = {"model": "vision", "temperature": 0, "ignore_eos": True, "messages": messages}
    texts: list[str] = []
    url = f"{cluster.url}/v1/chat/completions"
    with HTTP.stream("POST", url, json=body | common, timeout=180) as answer:
        for line in answer.iter_lines():
            if '"content"' not in line:
                continue
            texts.append(line)
            if len(texts) == 10 and end == "killed":
                os.kill(int(report["engine_pid"]), signal.SIGKILL)
            elif len(texts) == 10:
                assert cluster.operate("evict", "vision").returncode == 0
    restarts = sum(agent["engine_restarts_total"] for agent in cluster.agents()) - before
    assert restarts == (1 if end == "killed" else 0)
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in texts]
    assert "".join(delta["content"] for delta in deltas) == whole["message"]["content"]


def test_a_client_that_disconnects(cluster: Cluster, folder: Path) -> None:
    """Ends the request on the engine, and serves others with the same image."""
    body = {"model": "vision", "stream": True, "max_tokens": 400, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": parts(data_url(PICTURES[0]))}]
    with HTTP.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as answer:
        assert next(answer.iter_lines())
    cluster.wait_until(
        lambda: (cluster.model_report("vision") or {}).get("running") == 0, "the request's end"
    )
    check(folder, chat(cluster, data_url(PICTURES[0])), PICTURES[0])
