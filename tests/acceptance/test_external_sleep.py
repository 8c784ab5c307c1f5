"""A stock SGLang server that sleeps while it is idle, and is woken by a request."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.acceptance.test_external_servers import complete, external, url_of
from tests.engines.sharing import PAGE, opened_pair
from tests.engines.stock import SGLangServer, until
from tests.serve.conftest import serving
from tests.sglang.models import LLAMA, prompts, spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CAPACITY = -(-(spec_of(LLAMA).weight_bytes + (13 << 20)) // PAGE) * PAGE


def test_it_is_woken_by_requests_and_answers_as_before(tmp_path: Path, short_dir: Path) -> None:
    """Leaves a request that does not pass Prism waiting in the sleeping server."""
    [prompt] = prompts(LLAMA, 1, (200, 230), seed=5)
    with opened_pair({LLAMA: SGLangServer}, CAPACITY) as pair:
        url = url_of(pair, LLAMA)
        before = complete(url, LLAMA, prompt, 60)
        held_bytes = pair.of(LLAMA).committed_bytes
        model = {**external("roof", url), "sleep_after": "1s"}
        with serving(tmp_path, short_dir, devices=[], models=[model]) as cluster:

            def sleeps() -> bool:
                rows = httpx.get(f"{cluster.url}/status").json()["external"]
                return any(row.get("asleep") for row in rows)

            for _ in range(2):
                until(sleeps)
                until(lambda: pair.of(LLAMA).committed_bytes < held_bytes)
                body = {"model": "x", "prompt": prompt, "max_tokens": 1}
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{url}/v1/completions", json=body, timeout=1)
                assert complete(cluster.url, "roof", prompt, 60) == before
            until(sleeps)
            cluster.stop()
            assert complete(url, LLAMA, prompt, 60) == before
