"""The page in headless Chromium: its views by keyboard, no accessibility fault, no foreign request, little weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import KEY, browser, expect, page_daemon, streamed
from cloud_fixture import cloud_server
from homes import home_in
from model_hub import Hub, running, tiny_gguf
from router_fakes import FakeCloud

__all__ = ["cloud_server"]

VIEWS = ("Chat", "Router", "Savings", "Tasks", "Models", "Requests", "Calibration")
EASY, HARD = "What is 3 + 4?", "Write a poem about the sea."


@dataclass
class Watched:
    """A page, and what became of its requests."""

    tab: Any
    url: str
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    weight: int = 0


@pytest.fixture(scope="module")
def daemon(cloud_server: FakeCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPDRAFT_HOME", str(home_in(folder)))
        with page_daemon(cloud_server.url, folder) as url:
            yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as chrome:
        yield chrome


@pytest.fixture(scope="module")
def page(chromium: Any, daemon: str) -> Iterator[Watched]:
    """One tab for all tests: the key is given once, by keyboard."""
    tab = chromium.new_context(reduced_motion="reduce").new_page()
    watched = Watched(tab, daemon)
    tab.on("request", lambda request: watched.requests.append(request.url))
    tab.on("pageerror", lambda error: watched.faults.append(str(error)))
    tab.on("console", lambda said: watched.faults.append(said.text) if said.type in ("error", "warning") else None)
    tab.on("response", lambda answer: weigh(watched, answer))
    tab.goto(daemon)
    tab.get_by_label("Key", exact=True).wait_for()
    tab.keyboard.type(KEY)
    watched.faults.clear()  # Chromium logs the 401 that asks for the key
    tab.keyboard.press("Enter")
    tab.get_by_label("Your message").wait_for()
    yield watched
    tab.context.close()


def weigh(watched: Watched, answer: Any) -> None:
    watched.weight += int(answer.headers.get("content-length", 0))


def open_view(page: Watched, name: str) -> Any:
    """By keyboard: focus the link as Tab does, and press Enter."""
    link = page.tab.get_by_role("link", name=name, exact=True)
    link.focus()
    page.tab.keyboard.press("Enter")
    page.tab.get_by_role("heading", name=name, level=1).wait_for()
    page.tab.locator("#view[aria-busy=false]").wait_for()
    return page.tab


def say(tab: Any, text: str) -> Any:
    """The turn with the answer."""
    before = tab.locator(".turn:has(.badge)").count()
    tab.get_by_label("Your message").focus()
    tab.keyboard.type(text)
    tab.keyboard.press("Enter")
    turn = tab.locator(".turn:has(.badge)").nth(before)
    turn.wait_for()
    return turn


def test_chat_shows_tier_gain_cost_and_reason(page: Watched) -> None:
    tab = open_view(page, "Chat")
    easy = say(tab, EASY)
    expect(easy).to_contain_text("On device")
    expect(easy).to_contain_text("P(gain)")
    easy.locator("summary").focus()
    tab.keyboard.press("Enter")
    expect(easy.locator(".trace")).to_contain_text("Gate 0, rules")
    easy.get_by_role("button", name="Retry in the cloud").focus()
    tab.keyboard.press("Enter")
    expect(tab.locator(".turn:has(.badge.cloud)")).to_contain_text("The cloud says hello.")


def test_an_answer_is_markdown_and_cannot_command_the_page(page: Watched, cloud_server: FakeCloud) -> None:
    injected = "<img src=x onerror=alert(1)> [l](javascript:alert(2)) ![i](https://evil.example/x.png)"
    cloud_server.says = streamed(f"**bold** {injected}\n\n```\nx = 1\n```")
    try:
        tab = open_view(page, "Chat")
        tab.get_by_label("Answered by").select_option("cloud")
        turn = say(tab, HARD)
        turn.locator("strong", has_text="bold").wait_for()
        expect(turn.locator("pre code")).to_have_text("x = 1\n")
        expect(turn.locator("img, script")).to_have_count(0)
        assert [link.get_attribute("href") for link in turn.locator("a").all()] == ["https://evil.example/x.png"]
    finally:
        cloud_server.says = None


def test_stop_ends_an_answer(page: Watched, cloud_server: FakeCloud) -> None:
    cloud_server.mode = "hang"
    try:
        tab = open_view(page, "Chat")
        tab.get_by_label("Answered by").select_option("cloud")
        tab.get_by_label("Your message").focus()
        tab.keyboard.type(HARD)
        tab.keyboard.press("Enter")
        tab.locator(".turn .plain:not(:empty)").last.wait_for()
        stop = tab.get_by_role("button", name="Stop")
        stop.focus()
        tab.keyboard.press("Enter")
        tab.get_by_text("Stopped.", exact=True).first.wait_for()
        expect(stop).to_be_disabled()
    finally:
        cloud_server.mode = "healthy"


def test_requests_are_listed_explained_and_asked_again(page: Watched) -> None:
    tab = open_view(page, "Requests")
    tab.get_by_label("Tier").select_option("local")
    rows = tab.locator("tbody tr")
    expect(rows.locator(".badge", has_text="In cloud")).to_have_count(0)
    assert set(rows.locator(".badge").all_inner_texts()) == {"On device"}
    rows.last.get_by_role("button").focus()
    tab.keyboard.press("Enter")
    detail = tab.get_by_role("region", name="Request", exact=True)
    expect(detail).to_contain_text("Gate 0, rules")
    detail.get_by_role("button", name="Good answer").focus()
    tab.keyboard.press("Enter")
    detail.get_by_text("Noted.").wait_for()
    detail.get_by_role("button", name="Ask again").focus()
    tab.keyboard.press("Enter")
    detail.locator("div .badge").wait_for()
    tab.get_by_label("Search").fill("nothing has this in it")
    expect(tab.locator("tbody tr")).to_have_count(0)


def test_the_router_view_moves_the_target_and_traces_a_prompt(page: Watched) -> None:
    tab = open_view(page, "Router")
    slider = tab.get_by_label("Share of the cloud's quality to keep")
    slider.focus()
    tab.keyboard.press("End")
    expect(tab.locator("output")).to_contain_text("Quality 100 %")
    tab.get_by_label("Prompt").focus()
    tab.keyboard.type(EASY)
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    expect(tab.locator(".trace")).to_contain_text("Gate 1, before generation")
    tab.get_by_role("button", name="Use the router's own target").click()
    tab.get_by_role("button", name="Use this target for all requests").focus()
    tab.keyboard.press("Enter")
    tab.get_by_text("The router's target: quality 1.").wait_for()
    slider.focus()
    tab.keyboard.press("Home")
    tab.get_by_role("button", name="Use this target for all requests").click()
    tab.get_by_text("The router's target: quality 0.8.").wait_for()


def test_savings_calibration_and_models_show_their_figures(page: Watched) -> None:
    tab = open_view(page, "Savings")
    expect(tab.locator(".cards")).to_contain_text("saved against all-cloud")
    expect(tab.locator(".cards"), "the abandoned stream").to_contain_text("1 of")
    tab = open_view(page, "Calibration")
    expect(tab.locator("main ul")).to_contain_text("of the cloud's score (observed")
    expect(tab.locator("tbody tr")).to_have_count(10)
    expect(open_view(page, "Tasks").locator("main")).to_contain_text("learns no tasks")
    tab = open_view(page, "Models")
    tab.get_by_role("button", name="Pull smollm2").wait_for()
    tab.get_by_role("button", name="Sleep now").focus()
    tab.keyboard.press("Enter")
    tab.get_by_text("The model sleeps.").wait_for()
    expect(tab.locator("main")).to_contain_text("asleep")
    tab.get_by_label("Name").fill("/etc/passwd")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("alert")).to_contain_text("pypi:package")
    page.faults[:] = [fault for fault in page.faults if "400" not in fault]  # the refusal, as Chromium logs it


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_no_accessibility_fault(page: Watched, name: str, scheme: Any) -> None:
    page.tab.emulate_media(color_scheme=scheme)
    assert accessibility_faults(open_view(page, name)) == []


def accessibility_faults(tab: Any) -> list[tuple[str, str]]:
    """Of WCAG 2.2, levels A and AA."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not here: make test fetches it")
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
    return [(each["id"], each["nodes"][0]["html"]) for each in axe.Axe().run(tab, options=rules).response["violations"]]


def test_an_accessibility_fault_is_found(page: Watched) -> None:
    tab = open_view(page, "Chat")
    tab.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert [rule for rule, _ in accessibility_faults(tab)] == ["label"]
    open_view(page, "Router")


def test_a_model_is_pulled_and_removed(page: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Hub({"owner/repo": {"tiny-Q8_0.gguf": tiny_gguf()}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        tab = open_view(page, "Models")
        tab.get_by_label("Name").focus()
        tab.keyboard.type("hf:owner/repo")
        tab.keyboard.press("Enter")
        tab.get_by_text("tiny-Q8_0 is ready.").wait_for()
    tab.get_by_role("cell", name="tiny-Q8_0", exact=True).wait_for()
    tab.get_by_role("button", name="Remove tiny-Q8_0").focus()
    tab.keyboard.press("Enter")
    tab.get_by_role("button", name="Really remove tiny-Q8_0?").wait_for()
    expect(tab.get_by_role("cell", name="tiny-Q8_0", exact=True)).to_have_count(1)
    tab.keyboard.press("Enter")
    tab.get_by_text("tiny-Q8_0 is removed.").wait_for()


def test_page_fits_a_phone(page: Watched) -> None:
    page.tab.set_viewport_size({"width": 360, "height": 740})
    for name in VIEWS:
        tab = open_view(page, name)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, name
    page.tab.set_viewport_size({"width": 1280, "height": 720})


def test_no_request_leaves_and_nothing_is_logged(page: Watched) -> None:
    assert {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")} == {urlsplit(page.url).netloc}
    assert page.faults == []


def test_the_first_view_weighs_little(chromium: Any, daemon: str) -> None:
    tab = chromium.new_context().new_page()
    watched = Watched(tab, daemon)
    tab.on("response", lambda answer: weigh(watched, answer))
    tab.goto(daemon)
    tab.get_by_role("dialog").wait_for()
    tab.wait_for_load_state("networkidle")
    paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    print(f"first paint after {paint:.0f} ms, {watched.weight:,} bytes")
    assert 0 < watched.weight < 300_000
    assert accessibility_faults(tab) == [], "the question for the key"
    assert tab.evaluate("[...document.scripts].every(script => script.src)"), "no inline script"
    tab.context.close()
