"""The dashboard in a real headless Chromium: contents, updates, and the content policy."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from playwright.async_api import Page, async_playwright, expect

from prism.config.schema.access import ApiKey, hashed
from prism.frontend.api.admin import dashboard
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, make_config, stack_of
from tests.frontend.pages import HOSTILE, busy, external
from tests.frontend.scripted_agent import answering

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path() -> str:
    """Returns the path of an installed browser."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed; one of {', '.join(BROWSERS)} must be in PATH")
    return found


@asynccontextmanager
async def open_page(url: str, password: str = "") -> AsyncIterator[tuple[Page, list[str]]]:
    """Yields the dashboard and its browser's complaints: errors and violations of the policy."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox"]
        )
        page = await browser.new_page(
            color_scheme="light",
            http_credentials={"username": "root", "password": password} if password else None,
        )
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"{url}/dashboard")
        yield page, complaints
        await browser.close()


async def test_the_page_in_a_browser(stack: Stack) -> None:
    """Runs all checks in one browser, which is slow to start."""
    stack.agent.script = answering([7, 8, 0])
    await stack.state.queue.publish_status(busy())
    await stack.client.post("/v1/completions", json={"model": "base", "prompt": [9, 9]})
    async with open_page(stack.url) as (page, complaints):
        await expect(page.locator(".device")).to_have_count(2)
        await shows_names_as_text(page)
        await shows_models_and_decisions(page)
        await follows_the_memory(page, stack)
        await goes_by_keyboard(page)
        await has_two_themes(page)
        await says_what_is_drained(page, stack)
        await says_what_is_refused(page, stack)
        await shows_external_servers(page, stack)
        await counts_what_it_saw_grow(page)
        assert complaints == []


async def shows_names_as_text(page: Page) -> None:
    """Asserts that HTML in a model's name is shown as text."""
    await expect(page.locator("#models .model", has_text=HOSTILE)).to_be_visible()
    await expect(page.locator("#decisions .reason").nth(1)).to_contain_text(HOSTILE)
    assert await page.locator("main img, main script").count() == 0
    assert await page.title() == "Prism"


async def shows_models_and_decisions(page: Page) -> None:
    served = page.get_by_role("row", name=re.compile("^base"))
    await expect(served).to_contain_text("100 %")
    refused = page.get_by_role("row", name=re.compile("^deepseek-v3"))
    await expect(refused).to_contain_text("waiting for placement")
    await expect(refused).to_contain_text("larger than any device")
    newest = page.locator("#decisions tbody tr").first
    await expect(newest).to_contain_text("2 requests wait for it")
    await expect(newest).to_contain_text("in progress")
    await expect(page.locator("#health")).to_have_text("degraded")
    await expect(page.locator("#troubles")).to_contain_text("engine e2 was replaced")


async def follows_the_memory(page: Page, stack: Stack) -> None:
    """Asserts that a bar's segments are proportional to their bytes and follow changes."""
    used = page.locator(".device").first.locator(".part").first.locator(".used")
    await expect(used).to_have_attribute("aria-label", re.compile(r"KV in use 12\.0 GiB \(15"))
    await stack.state.queue.publish_status(busy(llama_used_gib=24.0))
    await expect(used).to_have_attribute("aria-label", re.compile(r"KV in use 24\.0 GiB \(30"))
    bar = page.locator(".device").first.locator(".bar")
    share = "async (node) => { await new Promise((ok) => setTimeout(ok, 500));"
    share += " return node.getBoundingClientRect().width; }"
    assert await used.evaluate(share) / await bar.evaluate(share) == pytest.approx(0.3, abs=0.02)


async def goes_by_keyboard(page: Page) -> None:
    bar = page.locator(".device").first.locator(".bar")
    await bar.locator("[tabindex='0']").focus()
    await page.keyboard.press("ArrowRight")
    await expect(bar.locator(".used").first).to_be_focused()
    await expect(page.locator(".detail").first).to_contain_text("KV in use 24.0 GiB")
    await page.keyboard.press("/")
    await page.keyboard.type("LLAMA")
    await expect(page.locator("#models tbody tr")).to_have_count(1)
    await page.keyboard.press("Escape")
    await page.keyboard.press("p")
    await expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    await expect(page.locator("#age")).to_have_text("paused")
    await page.keyboard.press("p")
    await page.get_by_role("searchbox").fill("")
    await page.get_by_role("button", name="Running").press("Enter")
    await expect(page.locator("#models tbody tr").first).to_contain_text("llama-3.1-8b")


async def says_what_is_drained(page: Page, stack: Stack) -> None:
    drained = page.locator(".device .drained")
    await expect(drained.first).to_be_hidden()
    for left, said in (("phi-4-mini", "draining: phi-4-mini"), ("", "drained")):
        status = msgspec.structs.replace(busy(), drained={"cuda:1": left})
        await stack.state.queue.publish_status(status)
        await expect(drained.nth(1)).to_have_text(said)
    await expect(drained.first).to_be_hidden()


async def says_what_is_refused(page: Page, stack: Stack) -> None:
    """Asserts that a model refused for overload is told from one that waits for a device."""
    status = msgspec.structs.replace(busy(), overload=["deepseek-v3"])
    await stack.state.queue.publish_status(status)
    await expect(page.get_by_role("row", name=re.compile("^deepseek-v3"))).to_contain_text(
        "refused"
    )


async def shows_external_servers(page: Page, stack: Stack) -> None:
    section = page.locator("#external-section")
    await expect(section).to_be_hidden()
    status = msgspec.structs.replace(busy(), external=external())
    await stack.state.queue.publish_status(status)
    rows = section.locator("tbody tr")
    await expect(rows).to_have_count(4)
    llama, limited = status.external[0], rows.first
    for text in (llama.model, llama.url, "answers", "gpus/cuda:0, gpus/cuda:1", "12.0 GiB"):
        await expect(limited).to_contain_text(text)
    await expect(limited.locator(".kv")).to_have_text("11.6 GiB2.9 GiB can be given up")
    await expect(limited.locator(".reason")).to_have_text(llama.reason)
    await expect(rows.nth(1).locator(".pill")).to_have_text("problem")
    await expect(rows.nth(1).locator(".reason")).to_have_text(HOSTILE)
    await expect(rows.nth(2).locator(".kv .text")).to_have_text("\N{EN DASH}")
    await expect(rows.nth(2).locator(".reason")).to_have_text("it is on another machine")
    await expect(rows.nth(3).locator(".pill")).to_have_text("asleep")
    await shows_external_models(page, stack)
    await shows_names_as_text(page)


async def shows_external_models(page: Page, stack: Stack) -> None:
    """Asserts the state of a model without, with some, and with only failing servers."""
    sleeping = page.locator("#models tbody tr", has_text="phi-4").filter(has_text="asleep")
    await expect(sleeping).to_have_count(1)
    row = page.locator("#models tbody tr", has_text="Llama-3.3-70B")
    await expect(row.locator(".pill")).to_have_text("degraded")
    await expect(row.locator(".why")).to_have_text(f"http://127.0.0.1:30002: {HOSTILE}")
    cells = ["gpus/cuda:0, gpus/cuda:1, gpus/cuda:2", "14", "0"]
    for column, text in enumerate(cells, 2):
        await expect(row.locator("td").nth(column)).to_have_text(text)
    await expect(row.locator("td").nth(9)).to_have_text("48.0 GiB")
    await expect(row.locator("td").nth(10)).to_have_text("12.6 GiB")
    other = page.locator("#models tbody tr", has_text="qwen3-coder")
    await expect(other.locator(".pill")).to_have_text("external")
    for server in external()[1:2], external()[2:]:
        broken = msgspec.structs.replace(server[0], problem="refused")
        status = msgspec.structs.replace(busy(), external=[broken])
        await stack.state.queue.publish_status(status)
        down = page.locator("#models tbody tr", has_text=broken.model)
        await expect(down.locator(".pill")).to_have_text("down")
        await expect(down.locator(".why")).to_have_text("refused")


async def has_two_themes(page: Page) -> None:
    """Asserts that the theme is the system's until one is chosen."""
    colour = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(colour)
    await page.emulate_media(color_scheme="dark")
    dark = await page.evaluate(colour)
    assert dark != light
    await page.locator("h1").click()
    await page.keyboard.press("t")
    assert await page.evaluate(colour) == light
    await page.keyboard.press("t")
    assert await page.evaluate(colour) == dark


GROWTH = """async () => {
  const { History, parseMetrics } = await import("/dashboard/series.js");
  const history = new History();
  const line = (frontend, value) => `prism_requests_total{frontend="${frontend}"} ${value}`;
  const samples = [[["f0", 100]], [["f0", 110], ["f1", 5000]], [["f0", 3], ["f1", 5007]]];
  samples.forEach((of, at) =>
    history.add(at * 1000, parseMetrics(of.map((each) => line(...each)).join("\\n"))));
  return history.growth((name) => name === "prism_requests_total");
}"""


async def counts_what_it_saw_grow(page: Page) -> None:
    """Asserts the growth of two frontends: f0 restarted; f1 missed the first sample."""
    assert await page.evaluate(GROWTH) == {"count": 3 + 7, "seconds": 2}


async def test_an_operator_s_password_shows_it(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    keys = [ApiKey("root", hashed("secret-of-root-12345"), operator=True)]
    config = make_config(redis_server.url, namespace, short_dir)
    async with stack_of(msgspec.structs.replace(config, keys=keys)) as stack:
        await stack.state.queue.publish_status(busy())
        async with open_page(stack.url, "secret-of-root-12345") as (page, _):
            await expect(page.locator(".device")).to_have_count(2)


async def test_a_model_s_colour_is_the_same_after_a_reload(stack: Stack) -> None:
    """Checks a reload after which there is another model, too."""
    status = busy()
    found = []
    for models in (status.models, [*status.models, "another-7b"]):
        await stack.state.queue.publish_status(msgspec.structs.replace(status, models=models))
        async with open_page(stack.url) as (page, _):
            await expect(page.locator("#models tbody tr")).to_have_count(len({*models}))
            hues = "rows => rows.map(r => [r.title, r.querySelector('i').style.cssText])"
            found.append(dict(await page.locator("#models .model").evaluate_all(hues)))
    before, after = found
    assert before == {name: hue for name, hue in after.items() if name in before}
    assert len({*after.values()}) == len(after)


async def test_the_reason_of_a_decision_is_on_a_phone_s_screen(stack: Stack) -> None:
    await stack.state.queue.publish_status(busy())
    async with open_page(stack.url) as (page, _):
        await page.set_viewport_size({"width": 390, "height": 844})
        reason = page.locator("#decisions .reason").first
        await expect(reason).to_be_visible()
        box = await reason.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


@pytest.mark.parametrize("width", [1440, 1024, 768, 390])
async def test_external_servers_fit_any_screen(stack: Stack, width: int) -> None:
    status = msgspec.structs.replace(busy(), agents=[], models=[], external=external())
    await stack.state.queue.publish_status(status)
    async with open_page(stack.url) as (page, complaints):
        await page.set_viewport_size({"width": width, "height": 844})
        section = page.locator("#external-section")
        await expect(section.locator("tbody tr")).to_have_count(4)
        await expect(page.locator("#devices-section")).to_be_hidden()
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await section.locator(".scroll").evaluate("n => n.scrollWidth - n.clientWidth") == 0
        assert complaints == []


async def test_the_start_page_leads_to_it(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, follow_redirects=True) as client:
        assert (await client.get("/")).url.path == "/dashboard/"


async def test_its_files_come_with_a_strict_policy(stack: Stack) -> None:
    """Allows neither inline code nor other origins."""
    client = httpx.AsyncClient(base_url=stack.url, follow_redirects=True)
    async with client:
        page = await client.get("/dashboard")
        assert page.url.path == "/dashboard/"
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        for name in re.findall(r'(?:href|src)="([a-z.]+)"', page.text):
            found = await client.get(f"/dashboard/{name}")
            assert found.status_code == 200
            assert found.headers["content-security-policy"] == policy
        for name in ("../health.py", "..%2fapp.py", "no.js"):
            assert (await client.get(f"/dashboard/{name}")).status_code == 404
    text = b"".join(dashboard._FILES.values()).replace(b"http://www.w3.org/2000/svg", b"")
    assert not re.search(rb"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
