"""The page at /ui in a real Chromium: what a person does there, with the keyboard too, what hostile answers cannot do,
what axe finds, and that the code which the page shows works.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from ferrule_testkit import server as servers
from tests.fakes.serving import Here, serving_here
from tests.shared import grid

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
KEY = "sesame"
MODEL = "<b>tiny</b>"  # a name is text, whatever it looks like
VIEWS = ("chat", "live", "plugins", "options")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PATIENCE = 60_000  # ms


@pytest.fixture(scope="module")
def server() -> Iterator[Here]:
    """Run a server whose steps take 20 ms, so that a request can be seen while it runs."""
    args = [*servers.WITHOUT_MODEL, "--model-loader-extra-config", '{"step_seconds": 0.02}', "--api-key", KEY]
    args += [
        "--served-model-name",
        MODEL,
        "--max-num-seqs",
        "8",
        "--num-gpu-blocks-override",
        "2049",
        "--plugins-deny",
        "policy:chaos",
    ]
    with serving_here(args) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        text = "There is no Chromium (apt-get install chromium), so nobody has looked at the page at /ui."
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Browser, server: Here, view: str = "chat", key: str = KEY, **context: Any) -> Iterator[Page]:
    """Open a view in a tab of its own, with the key if there is one. No error may come from the page's scripts."""
    errors: list[str] = []
    tab = browser.new_context(**context)
    tab.set_default_timeout(PATIENCE)
    page = tab.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{server.url}/ui#/{view}")
    if key:
        page.get_by_label("This server needs a key").fill(key)
        page.keyboard.press("Enter")
        if view == "chat":
            expect(page.get_by_label("temperature")).to_be_attached()
    yield page
    tab.close()
    assert errors == []


def answer_with(page: Page, *events: dict[str, Any]) -> list[dict[str, Any]]:
    """Let the page's chats be answered with these events. Returns the bodies that will have been sent."""
    bodies: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def delta(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def seen(page: Page, holds: Callable[[], bool]) -> bool:
    """Wait for a condition while the browser's events are handled."""
    return servers.until(lambda: page.wait_for_timeout(20) or holds())


def load(page: Page, *bodies: dict[str, Any]) -> None:
    """Send completions that last until the tab is closed."""
    page.evaluate(
        """([bodies, key]) => {
            const headers = {authorization: `Bearer ${key}`, 'content-type': 'application/json'};
            for (const body of bodies) {
                const content = JSON.stringify({max_tokens: 1500, ignore_eos: true, ...body});
                fetch('v1/completions', {method: 'POST', headers, body: content});
            }
        }""",
        [bodies, KEY],
    )


def answers(page: Page) -> Any:
    return page.get_by_role("article", name="Model")


# ---------------------------------------------------------------------------------------------------------- the frame


def test_the_page_is_public_and_strict_and_its_figures_need_the_key(browser: Browser, server: Here) -> None:
    with opened(browser, server, key="") as page:
        answer = page.request.get(f"{server.url}/ui")
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("ui/api/live", "ui/api/plugins", "ui/api/options", "openapi.json"):
            assert page.request.get(f"{server.url}/{path}").status == 401
        assert page.request.get(f"{server.url}/ui/nothing.js").status == 404
        assert page.request.get(f"{server.url}/ui/..%2fui.py").status == 401  # no such route, which is not told


def test_the_key_is_asked_for_once_and_stays_in_the_tab(browser: Browser, server: Here) -> None:
    with opened(browser, server, key="") as page:
        field = page.get_by_label("This server needs a key")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("That key was refused.")).to_be_visible()
        field.fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_label("temperature")).to_be_attached()
        page.reload()
        expect(page.get_by_label("temperature")).to_be_attached()
        expect(page.get_by_role("dialog")).to_have_count(0)
        stored = page.evaluate(
            "[JSON.stringify(localStorage), document.cookie, location.href, JSON.stringify(history.state)]"
        )
        assert not any(KEY in text for text in stored)
        other = page.context.new_page()
        other.goto(f"{server.url}/ui")
        expect(other.get_by_label("This server needs a key")).to_be_visible()


def test_the_first_paint(browser: Browser, server: Here, record_property: Any) -> None:
    """Measure the first paint. What it may take depends on the machine, so it is printed and not asserted."""
    with opened(browser, server) as page:
        page.reload()
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        took = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        record_property("first_contentful_paint_ms", took)
        print(f"first contentful paint of /ui: {took:.0f} ms")
        elsewhere = page.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
        assert all(address.startswith(server.url) for address in elsewhere)


@grid({"theme": ["light", "dark"], "width": [360, 1280]})
def test_axe_finds_nothing(browser: Browser, server: Here, theme: Any, width: int) -> None:
    axe = Axe()
    with opened(browser, server, color_scheme=theme, viewport={"width": width, "height": 800}) as page:
        answer_with(page, delta(reasoning="Hm."), delta(content=RICH), delta("tool_calls", tool_calls=[CALL]))
        ask(page, "Show everything.")
        expect(page.get_by_role("button", name="Send the results")).to_be_visible()
        load(page, {"prompt": "hello", "n": 9})
        found = {}
        for view in VIEWS:
            page.goto(f"{server.url}/ui#/{view}")
            expect(page.locator("main .controls, main td").first).to_be_attached()
            if view in {"plugins", "options"}:
                page.get_by_label("Filter").fill("policy")  # some rows stand for all: axe looks at each cell
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{view} is {wide} pixels wide"
            found[view] = [
                (each["id"], [node["target"] for node in each["nodes"]])
                for each in axe.run(page).response["violations"]
            ]
        assert found == {view: [] for view in VIEWS}


def test_the_theme_is_switched(browser: Browser, server: Here) -> None:
    with opened(browser, server, color_scheme="light") as page:
        colour = "getComputedStyle(document.documentElement).backgroundColor"
        light = page.evaluate(colour)
        switch = page.get_by_role("button", name="Theme")
        switch.click()
        assert page.evaluate(colour) == light
        switch.click()
        expect(switch).to_have_accessible_name("Theme: dark")
        assert page.evaluate(colour) != light
        page.reload()
        assert page.evaluate(colour) != light


# ----------------------------------------------------------------------------------------------------------- the chat

RICH = """# Title

Some *emphasis*, **strong**, `code`, ~~gone~~, [a link](https://example.org/) and https://example.org/bare.

1. one
2. two
   - inner

| a | b |
|---|--:|
| x | 1 |

```python
print("hello")
```

> said
"""
CALL = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def test_a_chat_by_keyboard_alone(browser: Browser, server: Here) -> None:
    """Give the key, set a control, ask, stop an answer with Esc, and ask again, without a mouse."""
    with opened(browser, server, key="", viewport={"width": 1280, "height": 900}) as page:
        expect(page.get_by_label("This server needs a key")).to_be_focused()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_label("temperature")).to_be_visible()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        limit = page.get_by_label("max_tokens")
        for _ in range(40):
            if limit.evaluate("each => each === document.activeElement"):
                break
            page.keyboard.press("Tab")
        page.keyboard.type("1000")
        for _ in range(40):
            if page.get_by_label("Message", exact=True).evaluate("each => each === document.activeElement"):
                break
            page.keyboard.press("Shift+Tab")
        page.keyboard.type("first line")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("second line")
        for number in (1, 2):
            page.keyboard.press("Enter")
            expect(answers(page).last.locator("> .text")).not_to_be_empty()
            page.keyboard.press("Escape")
            expect(page.get_by_text("ended by stopping it here")).to_have_count(number)
            page.keyboard.type("again")
        expect(page.get_by_role("article", name="You").first).to_contain_text("first line\nsecond line")
        assert answers(page).count() == 2


def test_controls_are_those_of_the_schema(browser: Browser, server: Here) -> None:
    with opened(browser, server) as page:
        bodies = answer_with(page, delta("stop", content="ok"))
        document = page.request.get(f"{server.url}/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
        field = document["components"]["schemas"]["ChatBody"]["properties"]["presence_penalty"]
        control = page.get_by_label("presence_penalty")
        expect(control).to_have_accessible_description(field["description"])
        assert control.get_attribute("max") == f"{field['anyOf'][0]['maximum']:g}"
        control.fill("9")
        ask(page, "one")
        expect(page.get_by_role("alert")).to_contain_text("presence_penalty")
        assert bodies == []
        control.fill("1.5")
        page.get_by_label("stop", exact=True).fill("a\nb")
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Further fields").fill('{"priority": 3}')
        ask(page, "two")
        expect(answers(page)).to_contain_text("ok")
        body = bodies[0]
        assert body["model"] == MODEL
        assert [each["role"] for each in body["messages"]] == ["system", "user", "user"]
        assert (body["presence_penalty"], body["stop"], body["priority"]) == (1.5, ["a", "b"], 3)
        assert "temperature" not in body


def test_edit_and_retry_go_on_from_a_message(browser: Browser, server: Here) -> None:
    with opened(browser, server) as page:
        bodies = answer_with(page, delta("stop", content="ok"))
        for number, text in enumerate(("one", "two"), 1):
            ask(page, text)
            expect(answers(page)).to_have_count(number)
            expect(answers(page).last).to_contain_text("ok")
        answers(page).last.hover()
        answers(page).last.get_by_role("button", name="Retry").click()
        assert seen(page, lambda: len(bodies) == 3)
        assert bodies[2]["messages"] == bodies[1]["messages"]
        first = page.get_by_role("article", name="You").first
        first.hover()
        first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the message").fill("changed")
        page.keyboard.press("Enter")
        assert seen(page, lambda: len(bodies) == 4)
        assert bodies[3]["messages"] == [{"role": "user", "content": "changed"}]
        expect(answers(page)).to_have_count(1)


def test_a_key_that_comes_late_opens_what_is_on_the_screen(browser: Browser, server: Here) -> None:
    with opened(browser, server, key="") as page:
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("This server needs a key: the button Key asks for it.")).to_be_visible()
        page.get_by_label("Message", exact=True).fill("kept")
        page.get_by_role("button", name="Key", exact=True).click()
        page.get_by_label("This server needs a key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_label("temperature")).to_be_attached()
        expect(page.get_by_label("Message", exact=True)).to_have_value("kept")
        expect(page.get_by_text("needs a key")).to_have_count(0)


def test_a_message_is_edited_while_an_answer_goes_on(browser: Browser, server: Here) -> None:
    with opened(browser, server) as page:
        page.get_by_label("max_tokens").fill("1500")
        ask(page, "one")
        text = answers(page).locator(".text").last
        expect(text).not_to_be_empty()
        question = page.get_by_role("article", name="You")
        question.hover()
        question.get_by_role("button", name="Edit").click()
        page.get_by_role("button", name="Cancel").click()
        before = len(text.inner_text())
        assert seen(page, lambda: len(text.inner_text()) > before)
        answers(page).hover()
        answers(page).get_by_role("button", name="Edit").click()
        editor = page.get_by_label("Edit the message")
        editor.fill("mine")
        page.get_by_role("button", name="Stop").click()
        expect(answers(page)).to_contain_text("ended by stopping it here")
        expect(editor).to_have_value("mine")


def test_a_connection_that_is_lost_is_told_and_the_code_is_that_of_the_last_request(
    browser: Browser, server: Here
) -> None:
    with opened(browser, server) as page:
        cut = f"data: {json.dumps(delta(content='half'))}\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
        ask(page, "one")
        expect(answers(page).get_by_role("alert")).to_contain_text("The connection was lost")
        page.get_by_role("button", name="Code").click()
        curl = page.get_by_role("dialog").locator("pre").first
        expect(curl).to_contain_text("one")
        expect(curl).not_to_contain_text("half")


def test_a_page_that_is_left_open_over_a_restart_sees_the_new_models(browser: Browser, server: Here) -> None:
    with opened(browser, server) as page:
        page.clock.install()
        page.reload()
        model = page.get_by_label("model", exact=True)
        expect(model).to_have_value(MODEL)
        page.route("**/health", lambda route: route.abort())
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "other"}]}))
        state = page.locator("#state")
        expect(state).to_have_attribute("title", "ready")
        page.clock.fast_forward(5000)
        expect(state).to_have_attribute("title", "no answer")
        page.unroute("**/health")
        page.clock.fast_forward(5000)
        expect(model).to_have_value("other")


def test_a_chat_names_its_adapter(browser: Browser, server: Here) -> None:
    served = [{"id": MODEL}, {"id": "sql", "parent": MODEL}, {"id": "poet", "parent": MODEL}]
    with opened(browser, server) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": served}))
        page.get_by_role("link", name="Live").click()
        page.get_by_role("link", name="Chat").click()  # an adapter that was loaded meanwhile is there
        model = page.get_by_label("model", exact=True)
        expect(model.locator("optgroup[label=Adapters] option")).to_have_text(["sql", "poet"])
        expect(model).to_have_value(MODEL)
        bodies = answer_with(page, delta("stop", content="yes"))
        for name in ("poet", MODEL):
            model.select_option(name)
            ask(page, "hello")
            expect(answers(page).last.locator("header")).to_contain_text(name)
            expect(answers(page).last).to_contain_text("yes")
        assert [body["model"] for body in bodies] == ["poet", MODEL]
        page.get_by_role("link", name="Models and options").click()
        cells = page.get_by_role("region", name="Models").get_by_role("row", name="sql").get_by_role("cell")
        expect(cells.nth(1)).to_have_text(MODEL)


def test_markdown_thoughts_and_tools(browser: Browser, server: Here) -> None:
    with opened(browser, server) as page:
        bodies = answer_with(page, delta(reasoning="Hm."), delta(content=RICH), delta("tool_calls", tool_calls=[CALL]))
        page.get_by_role("button", name="Insert an example").click()
        ask(page, "hello")
        answer = answers(page)
        for text, selector in (
            ("Title", "h2"),
            ("emphasis", "em"),
            ("strong", "strong"),
            ("gone", "del"),
            ("inner", "ol li ul li"),
            ("1", "table td.num"),
            ('print("hello")', "figure pre code"),
            ("said", "blockquote"),
        ):
            expect(answer.locator(f"> .text {selector}").first).to_have_text(text)
        links = answer.locator("a")
        assert {link.get_attribute("href") for link in links.all()} == {
            "https://example.org/",
            "https://example.org/bare",
        }
        assert all("noopener" in str(link.get_attribute("rel")) for link in links.all())
        thoughts = answer.locator("details", has_text="Thoughts")
        expect(thoughts.get_by_text("Hm.")).to_be_hidden()
        thoughts.locator("summary").click()
        expect(thoughts.get_by_text("Hm.")).to_be_visible()
        assert bodies[0]["tools"][0]["function"]["name"] == "weather"
        page.get_by_label("Result of weather").fill("sunny")
        page.get_by_role("button", name="Send the results").click()
        expect(answers(page)).to_have_count(2)
        call, result = bodies[1]["messages"][-2:]
        assert call["tool_calls"][0]["function"] == CALL["function"]
        assert result == {"role": "tool", "tool_call_id": "call-1", "content": "sunny"}


def test_the_code_of_a_request_works(browser: Browser, server: Here) -> None:
    """Run what the page shows, with a message that tries to break out of it."""
    nasty = "it's \"quoted\" $(touch /tmp/never) `x` \\ \n'''\n–"
    with opened(browser, server) as page:
        page.get_by_label("max_tokens").fill("3")
        page.get_by_label("top_k").fill("5")
        page.get_by_label("Message", exact=True).fill(nasty)
        page.get_by_role("button", name="Code").click()
        curl, python = (each.text_content() or "" for each in page.get_by_role("dialog").locator("pre").all())
    assert KEY not in curl + python
    around = {**os.environ, "FERRULE_API_KEY": KEY}
    for command in (["bash", "-c", curl], [sys.executable, "-c", python]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=around, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert '"error"' not in done.stdout
    sent = json.loads(re.findall(r"-d '(.*)'$", curl, re.DOTALL)[0].replace("'\\''", "'"))
    assert sent["messages"] == [{"role": "user", "content": nasty.strip()}]


def test_an_error_in_the_stream_is_shown(browser: Browser, server: Here) -> None:
    with opened(browser, server) as page:
        answer_with(page, delta(content="half "), {"error": {"message": "<i>broke</i>", "code": 500}})
        ask(page, "hello")
        expect(answers(page).get_by_role("alert")).to_have_text("<i>broke</i>")
        expect(answers(page)).to_contain_text("half")


# ------------------------------------------------------------------------------------------------------ hostile answers


def hostile(canary: str) -> Sequence[str]:
    return (
        "<script>window.caught = 1</script>",
        f"<img src={canary}/img onerror='window.caught = 1'>",
        f"![alt]({canary}/markdown.png)",
        "![alt](javascript:window.caught=1) [x](javascript:window.caught=1) [y](data:text/html,<script>1</script>)",
        "[z](vbscript:x) [w](/ui/api/options) [v](//evil.example/) <javascript:window.caught=1>",
        f'<iframe src="{canary}/frame"></iframe><link rel=stylesheet href="{canary}/css"><style>*{{color:red}}</style>',
        f'<form action="{canary}/form"><input autofocus onfocus="window.caught=1"></form>',
        '[a](https://example.org/"onmouseover="window.caught=1)',
        '```"><script>window.caught=1</script>\n</code></pre><script>window.caught=1</script>\n```',
        "| <script>window.caught=1</script> | b |\n|---|---|\n| <svg onload=window.caught=1> | x |",
        "[" * 2_000 + "](",
        "*" * 2_000 + "_a" * 2_000 + "`" * 99,
        "> " * 1_000 + "deep",
        "- a\n" * 200 + "  " * 3_000 + "- b",
        "\u202e\u0000\ud83d\ude00 <!-- -->",
    )


def test_hostile_answers_do_nothing(browser: Browser, server: Here) -> None:
    """Answer with markup and addresses that would run or load something: neither happens, and the text is shown."""
    asked: list[str] = []

    class Canary(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        do_POST = do_GET

    site = ThreadingHTTPServer(("127.0.0.1", 0), Canary)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    texts = hostile(f"http://127.0.0.1:{site.server_port}")
    try:
        with opened(browser, server) as page:
            answer_with(
                page,
                *(delta(content=f"{text}\n\n") for text in texts),
                *(delta(reasoning=text) for text in texts),
                delta("stop"),
            )
            ask(page, texts[0])
            expect(page.get_by_text("<!-- -->").first).to_be_attached()
            page.locator("details", has_text="Thoughts").first.locator("summary").click()
            assert page.evaluate("window.caught") is None
            bad = "script, img, iframe, link, style, form:not(.composer), svg, [onerror], [onmouseover], [style]"
            assert page.locator(f"main :is({bad})").count() == 0
            hrefs = [str(link.get_attribute("href")) for link in page.locator("main a").all()]
            assert hrefs
            assert all(href.startswith(("http://127.0.0.1", "https://example.org/")) for href in hrefs)
            refused = page.evaluate(
                "(() => { try { document.body.innerHTML = '<b></b>' } catch (error) { return error.name } })()"
            )
            assert refused == "TypeError"  # Trusted Types: the page itself could not do it
    finally:
        site.shutdown()
        site.server_close()
    assert asked == []


# --------------------------------------------------------------------------------------------- the engine and the rest


def test_live_shows_who_runs_and_nothing_of_what_they_say(browser: Browser, server: Here) -> None:
    with opened(browser, server, "live") as page:
        expect(page.get_by_text("Running").first).to_be_visible()
        running = page.get_by_role("region", name="Running").locator("tbody tr")
        secret = "The password is swordfish. " * 20
        load(page, {"prompt": f"{secret}?"})
        expect(running).to_contain_text("decode")
        load(page, {"prompt": f"{secret}!", "n": 11})
        expect(running).to_have_count(8)
        expect(page.get_by_role("region", name="Waiting").locator("tbody tr")).to_have_count(4)
        expect(page.locator(".map .used").first).to_be_attached()
        expect(page.locator(".steps rect").first).to_be_attached()
        picture = page.request.get(f"{server.url}/ui/api/live", headers={"authorization": f"Bearer {KEY}"})
        assert "swordfish" not in picture.text()
        found = picture.json()
        assert sum(found["blocks"]["shared"]) > 0
        assert {row["phase"] for row in found["running"]} <= {"prefill", "decode"}
        assert all(row["blocks"] > 0 for row in found["running"])
        assert found["figures"]["running"] == 8


def test_live_shows_adapters_and_guesses(browser: Browser, server: Here) -> None:
    """Add what a server with both shows to the picture of one that has neither."""
    adapters = [
        {"name": "<i>sql</i>", "loaded": True, "running": 2, "waiting": 1},
        {"name": "poet", "loaded": False, "running": 0, "waiting": 3},
    ]
    asked = 0

    def fulfil(route: Route) -> None:
        nonlocal asked
        picture = route.fetch().json()
        picture["adapters"], picture["limits"]["adapter_slots"] = adapters, 1
        picture["now"] += asked  # each one is new
        guesses = {"drafts": 10 * asked, "draft_tokens": 40 * asked, "accepted_by_place": [8 * asked, 2 * asked]}
        picture["figures"] |= guesses
        picture["steps"] = [[0.1, 0.01, 7, 2, 5]]
        for row in picture["running"]:
            row |= {"adapter": "<i>sql</i>", "guesses": guesses}
        asked += 1
        route.fulfill(json=picture)

    with opened(browser, server, "live") as page:
        page.route("**/ui/api/live", fulfil)
        load(page, {"prompt": "a b c"})
        rows = page.get_by_role("region", name="Adapters").locator("tbody tr")
        expect(rows).to_have_text(["<i>sql</i>loaded21", "poetwaits for a slot03"])
        expect(page.get_by_role("heading", name="Adapters 1 of 1 slot taken")).to_be_visible()
        expect(page.locator(".card", has_text="Tokens a step")).to_contain_text("2.00")
        expect(page.locator(".card", has_text="Guesses that hold")).to_contain_text("25.0 %")
        expect(page.locator(".steps .guess")).to_be_attached()
        expect(page.get_by_text("0 prompt tokens, 2 decoding, 5 guesses.")).to_be_visible()
        running = page.get_by_role("region", name="Running").locator("tbody tr")
        expect(running).to_contain_text("<i>sql</i>")
        expect(running).to_contain_text("25.0 %")
        assert Axe().run(page).violations_count == 0
    with opened(browser, server, "live") as page:
        expect(page.get_by_role("region", name="Running").or_(page.get_by_text("None.")).first).to_be_visible()
        expect(page.get_by_role("region", name="Adapters")).to_have_count(0)
        expect(page.get_by_text("Guesses that hold")).to_have_count(0)


def test_live_asks_only_while_it_is_seen(browser: Browser, server: Here) -> None:
    with opened(browser, server, "live") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        assert seen(page, lambda: any(url.endswith("/ui/api/live") for url in asked))
        page.get_by_role("link", name="Plugins").click()
        expect(page.get_by_role("heading", name="router")).to_be_visible()
        asked.clear()
        page.wait_for_timeout(2500)
        assert not any(url.endswith("/ui/api/live") for url in asked)


def test_plugins_models_and_options(browser: Browser, server: Here) -> None:
    with opened(browser, server, "plugins") as page:
        policies = page.get_by_role("region", name="Plugins of the kind policy")
        expect(policies.get_by_role("row", name="fcfs")).to_contain_text("chosen")
        expect(policies.get_by_role("row", name="chaos")).to_contain_text("denied: ")
        page.get_by_label("Filter").fill("policy fcfs")
        expect(page.get_by_text(re.compile(r"^1 of \d+$"))).to_be_visible()
        page.get_by_role("link", name="Models and options").click()
        expect(page.get_by_role("region", name="Models")).to_contain_text(MODEL)
        cells = page.get_by_role("row", name="--max-num-seqs").get_by_role("cell")
        expect(cells).to_have_text(["--max-num-seqs", "8", "command line", "–"])
        expect(page.get_by_role("row", name="--api-key ").get_by_role("cell").nth(1)).to_have_text("(hidden)")
        expect(page.get_by_role("row", name="--max-num-batched-tokens")).to_contain_text("resolved")
        page.get_by_label("only what is not a default").check()
        expect(page.get_by_role("row", name="--seed")).to_have_count(0)
