"""The OpenAPI document as one page to read and to try, without a byte from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

_EXAMPLES: Mapping[str, Any] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "stream": True,
    },
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_EMPTY: Mapping[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False, "array": [], "object": {}}


def render(spec: Mapping[str, Any], console: bool) -> str:
    """The page. With `console` each route can be called from it; without, everything is open, to read or print."""
    groups: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {tag["name"]: [] for tag in spec["tags"]}
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            groups.setdefault((operation["tags"] or ["other"])[0], []).append((method, path, operation))
    words = {tag["name"]: tag["description"] for tag in spec["tags"]}
    index, main = [], []
    for tag, operations in groups.items():
        index.append(f"<h2>{escape(tag)}</h2>")
        main.append(f"<h2>{escape(tag)}</h2><p class=dim>{escape(words.get(tag, ''))}</p>")
        for method, path, operation in operations:
            index.append(f'<a href="#{operation["operationId"]}"><i>{escape(method.upper())}</i> {escape(path)}</a>')
            main += _card(spec, method, path, operation, console)
    info = spec["info"]
    other = "<a href=redoc>To read or print</a>" if console else "<a href=docs>To try</a>"
    key = "<div class=bar><input id=key type=password autocomplete=off placeholder='API key, if there is one'></div>"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Ferrule</title><style>{_file('docs_page.css')}</style>",
        f"<div class=all><nav><b>Ferrule</b>{''.join(index)}</nav><main>",
        f"<h1>Ferrule <small>{escape(info['version'])}</small></h1><p>{escape(info['description'])} ",
        f"Described for machines: <a href=openapi.json>openapi.json</a>. {other}.</p>",
        *([key] if console else []),
        *main,
        "<h2>types</h2><p class=dim>Of fields above.</p>",
        *(
            f"<h4 id={escape(name)}>{escape(name)}</h4>{_table(kind)}"
            for name, kind in spec["components"]["schemas"].items()
        ),
        "</main></div>",
        *([f"<script>{_file('docs_page.js')}</script>"] if console else []),
        "</html>\n",
    ]
    return "".join(parts)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _card(
    spec: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any], console: bool
) -> Iterator[str]:
    lock = next((name for entry in operation["security"] for name in entry), "")
    label = {"key": "key", "adminKey": "admin key"}.get(lock, "")
    yield f'<details id="{operation["operationId"]}"{"" if console else " open"}><summary>'
    yield f"<span class='method {escape(method)}'>{escape(method.upper())}</span><code>{escape(path)}</code>"
    yield f"<span class=what>{escape(operation['summary'])}</span>{f'<span class=lock>{label}</span>' if label else ''}"
    yield f"</summary><div class=in><p>{escape(operation.get('description', ''))}</p>"
    for parameter in operation.get("parameters", ()):
        yield f"<p><code>{escape(parameter['name'])}</code> <span class=dim>in {parameter['in']}</span> "
        yield f"{escape(parameter.get('description', ''))}</p>"
    body = operation.get("requestBody")
    schema = _resolve(spec, body["content"]["application/json"]["schema"]) if body else None
    if console:
        yield from _form(method, path, schema)
    if schema is not None:
        yield f"<h4>Fields of the body</h4>{_table(schema)}"
    yield "<h4>Answers</h4><table>"
    for status, answer in operation["responses"].items():
        kinds = ", ".join(answer.get("content", {})) if status == "200" else ""
        words = f"{escape(answer['description'])} <span class=dim>{kinds}</span>"
        yield f"<tr><td><code>{escape(status)}</code></td><td>{words}</td></tr>"
    yield "</table>"
    for content in operation["responses"]["200"].get("content", {}).values():
        answer = _resolve(spec, content.get("x-event", content["schema"]))
        if answer.get("properties"):
            what = "an event" if "x-event" in content else "the answer"
            yield f"<h4>Fields of {what}</h4>{_table(answer)}"
    yield "</div></details>"


def _form(method: str, path: str, schema: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"<form data-method={escape(method.upper())}><div class=bar>"
    yield f'<input value="{escape(path)}" aria-label=path><button>Send</button></div>'
    if schema is not None:
        example = json.dumps(_EXAMPLES.get(path, _example(schema)), indent=2)
        yield f"<textarea aria-label=body spellcheck=false>{escape(example)}</textarea>"
    yield "<pre hidden></pre></form>"


def _example(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The required fields, each with the emptiest value of its type."""
    properties = schema.get("properties", {})
    return {name: _EMPTY.get(properties[name].get("type"), None) for name in schema.get("required", ())}


def _table(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, kind in schema.get("properties", {}).items():
        mark = " <b title=required>*</b>" if name in required else ""
        words = kind.get("description", "")
        rows.append(
            f"<tr><td><code>{escape(name)}</code>{mark}</td><td class=dim>{escape(type_text(kind))}</td>"
            f"<td>{escape(words)}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>" if rows else "<p class=dim>An object.</p>"


def _resolve(spec: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in schema:
        found: Mapping[str, Any] = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def type_text(kind: Mapping[str, Any]) -> str:
    """A schema in words, such as ``integer ≥ 0 or list of strings``. null is left out: it means an absent field."""
    if "$ref" in kind:
        return str(kind["$ref"]).rpartition("/")[2]
    if "anyOf" in kind:
        parts = [type_text(part) for part in kind["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in kind:
        return " or ".join(json.dumps(value) for value in kind["enum"])
    name = kind.get("type", "any value")
    if name == "array":
        return f"list of {type_text(kind.get('items', {}))}"
    if name == "object" and isinstance(kind.get("additionalProperties"), dict):
        return f"object of {type_text(kind['additionalProperties'])}"
    return f"{name}{_bounds(kind)}"


def _bounds(kind: Mapping[str, Any]) -> str:
    """Bounds that say more than that integers have 64 bits."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f" {sign} {kind[name]}" for name, sign in signs.items() if abs(kind.get(name, 1 << 63)) < (1 << 63) - 1]
    return " and".join(found)
