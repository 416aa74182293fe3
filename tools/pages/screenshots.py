"""``python -m tools.pages.screenshots``: take the pictures of the page at `/ui` in docs/images, with a real Chromium.

The embedded model serves, and is busy. They show times, so two runs never give the same files: nothing compares them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, ViewportSize, sync_playwright

from ferrule_testkit import server as servers
from tools import ROOT

_FOLDER = ROOT / "docs" / "images"
_SIZE: ViewportSize = {"width": 1280, "height": 800}
_BUSY = {"n": 7, "max_tokens": 1600, "ignore_eos": True, "temperature": 1}
_ARGUMENTS = ("--max-num-seqs", "12", "--num-gpu-blocks-override", "1025", "--max-num-batched-tokens", "256")
_QUESTION = "Compare three ways to sort a list in Python."
_ANSWER = """All three sort **stably**; they differ in what they return.

| way | returns | changes the list |
|---|---|:-:|
| `sorted(items)` | a new list | no |
| `items.sort()` | `None` | yes |
| `heapq.nsmallest(n, items)` | the first *n* | no |

For most programs `sorted` is right:

```python
words = ["pear", "fig", "apple"]
for word in sorted(words, key=len):
    print(word)
```

1. `key` is called once for each item.
2. `reverse=True` keeps equal items in their order.
"""


def main() -> int:
    """Renew all pictures. Returns 1 where there is no Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("There is no Chromium: apt-get install chromium.", file=sys.stderr)
        return 1
    _FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.running(_ARGUMENTS, Path(folder) / "log") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, take in {"chat": _chat, "live": _live, "plugins": _plugins, "options": _options}.items():
            with _opened(browser, f"{server.url}/ui#/{name}", dark=name == "live") as page:
                take(page)
                page.screenshot(path=_FOLDER / f"ui-{name}.png")
        browser.close()
    return 0


@contextmanager
def _opened(browser: Browser, address: str, dark: bool) -> Iterator[Page]:
    context = browser.new_context(viewport=_SIZE, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def _chat(page: Page) -> None:
    """Show an answer that the embedded model could not give: it is a picture of the page, not of the model."""

    def fulfil(route: Route) -> None:
        usage = {"prompt_tokens": 21, "completion_tokens": 164}
        deltas = [{"reasoning": "Three ways, and what each returns."}, {"content": _ANSWER}]
        choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        events = [{"choices": each} for each in choices] + [{"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)
    page.locator(".controls").wait_for(state="attached")
    page.get_by_label("temperature").fill("0.7")
    page.get_by_label("Message", exact=True).fill(_QUESTION)
    page.keyboard.press("Enter")
    page.locator(".message ol").wait_for()


def _live(page: Page) -> None:
    prompts = [f"Once upon a time there was a scheduler. {'It had many blocks. ' * number}" for number in (4, 9)]
    page.evaluate(
        """([prompts, more]) => { for (const prompt of prompts) fetch('v1/completions', {method: 'POST',
        headers: {'content-type': 'application/json'}, body: JSON.stringify({prompt, ...more})}) }""",
        [prompts, _BUSY],
    )
    page.locator(".steps").wait_for()
    page.wait_for_timeout(6000)  # for the curves


def _plugins(page: Page) -> None:
    page.locator("td").first.wait_for()


def _options(page: Page) -> None:
    page.locator("td").first.wait_for()
    page.get_by_label("Filter").fill("max")


if __name__ == "__main__":
    sys.exit(main())
