"""What `ferrule plugins check` should know: answers in Acme's notation."""

from __future__ import annotations

from ferrule_testkit.kits import CallText

REHEARSAL = {
    "arguments": ({"ids": []}, {"ids": [3, 1, 2]}),
    "wrong": ({}, {"ids": 3}, {"ids": ["3"]}, {"ids": [3], "loud": True}),
}
ROUTER = {
    "calls": (
        ("POST", "/acme/v1/ask", {"question": "What is it like?"}),
        ("POST", "/acme/v1/ask", {"question": "What is it like?", "abilities": [{"name": "weather"}], "live": True}),
    )
}
DIALOGUE = {"calls": (("POST", "/acme/v2/say", {"text": "Once"}),)}
PARSER = {
    "samples": (
        [
            "Let me look. ",
            CallText('@call get_weather(city="Paris", unit="C")', "get_weather", {"city": "Paris", "unit": "C"}),
            " Done.",
        ],
        [
            CallText("@call add(a=1, b = -2.5)", "add", {"a": 1, "b": -2.5}),
            "\nand then\n",
            CallText('@call f( a="(\\"@call f()\\\\", )', "f", {"a": '("@call f()\\'}),
            CallText("@call now()", "now", {}),
        ],
        ["Write to a@call or @call me(), even @call f(x) or @call f(a=1 b=2), or @@call now(."],
    )
}
