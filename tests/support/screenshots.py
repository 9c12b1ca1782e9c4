"""`make screenshots`: the six views of the page for the docs, light and dark, desktop and phone."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from browser import KEY, browser, page_daemon, streamed
from router_fakes import running_cloud

DESKTOP, TALL, PHONE = ({"width": width, "height": height} for width, height in ((960, 700), (960, 1060), (390, 780)))
#: View, colour scheme and window size of each screenshot.
SHOTS: tuple[tuple[str, Any, Any], ...] = (
    ("chat", "light", DESKTOP),
    ("router", "dark", TALL),
    ("savings", "light", DESKTOP),
    ("models", "dark", PHONE),
    ("requests", "light", PHONE),
    ("calibration", "dark", TALL),
)
QUESTIONS = ("What is 3 + 4?", "How do I reverse a list in Python?")
CLOUD = "Call `reverse()` on it, or take a **copy** in reverse order:\n\n```python\nnumbers[::-1]\n```"


def main(folder: Path) -> None:
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cloud = stack.enter_context(running_cloud())
        cloud.says = streamed(CLOUD)
        url = stack.enter_context(page_daemon(cloud.url, state))
        tab = stack.enter_context(browser()).new_context(viewport=DESKTOP).new_page()
        tab.goto(url)
        tab.get_by_label("Key", exact=True).fill(KEY)
        tab.keyboard.press("Enter")
        for count, question in enumerate(QUESTIONS, 1):
            tab.get_by_label("Your message").fill(question)
            tab.get_by_role("button", name="Send").click()
            tab.locator(".turn:has(.badge)").nth(count - 1).wait_for()
        tab.locator("summary").first.click()
        tab.locator(".trace li").first.wait_for()
        for view, colours, size in SHOTS:
            tab.emulate_media(color_scheme=colours)
            tab.set_viewport_size(size)
            tab.goto(f"{url}/#/{view}")
            tab.reload() if view != "chat" else None
            tab.locator("#view[aria-busy=false]").wait_for()
            if view == "router":
                tab.get_by_label("Prompt").fill(QUESTIONS[0])
                tab.get_by_role("button", name="Trace").click()
                tab.locator(".trace li").first.wait_for()
            tab.evaluate("scrollTo(0, 0)")
            tab.screenshot(path=folder / f"page-{view}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
