"""Invents tools, questions that need them, their calls and their results.

Half of the tools come from the table of common ones with varied names and parameters, half are invented word by
word, so that the only way to be right is to read the offered signature and to copy from the question.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.tiny import values, words
from tools.tiny.tooldata import DOMAINS, Domain
from tools.tiny.values import Value

Schema = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A question that exactly one of the offered tools answers (once per element of ``calls``)."""

    tool: Schema
    question: str
    calls: tuple[dict[str, Value], ...]
    nouns: tuple[str, ...]  # per call: what the answer calls the result; "" for an action
    topic: str  # two tools of one topic are never offered together


def as_schema(name: str, description: str, params: list[tuple[str, str]], rng: Random) -> Schema:
    """Make an OpenAI tool with ``params`` of (name, JSON type); description and ``required`` vary as in the wild."""
    properties: Schema = {}
    for param, kind in params:
        properties[param] = {"type": kind}
        if rng.random() < 0.12:
            properties[param]["description"] = f"The {param.replace('_', ' ')}"
    function: Schema = {"name": name}
    if description:
        function["description"] = description + (rng.choice((".", "")))
    function["parameters"] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        function["parameters"]["required"] = [param for param, _ in params]
    return {"type": "function", "function": function}


def _pick(variants: str, rng: Random) -> str:
    """Draw one of ``a|b|c``; the first, which is what most people write, more often."""
    options = variants.split("|")
    return options[0] if rng.random() < 0.35 else rng.choice(options)


def _decorate(question: str, rng: Random) -> str:
    roll = rng.random()
    if roll < 0.06:
        return "Please " + question[0].lower() + question[1:]
    if roll < 0.10:
        return rng.choice(("Hi! ", "Hello, ", "Quick question: ")) + question
    if roll < 0.13:
        return question + rng.choice((" Thanks!", " Thank you."))
    return question


def domain_request(domain: Domain, rng: Random) -> Request:
    """Make a request for one of the common tools; single-parameter look-ups are sometimes asked twice at once."""
    names: list[str] = []
    for param in domain.params:
        names.append(_pick(param.names, rng))
    tool = as_schema(
        _pick(domain.names, rng),
        _pick(domain.description, rng) if rng.random() < 0.9 else "",
        [(name, param.type) for name, param in zip(names, domain.params, strict=True)],
        rng,
    )
    count = 2 if domain.noun and len(names) == 1 and rng.random() < 0.1 else 1
    rows = [[values.draw(rng, param.kind) for param in domain.params] for _ in range(count)]
    ask = _pick("|".join(domain.asks), rng)
    shown = [" and ".join(str(row[i]) for row in rows) for i in range(len(names))]
    return Request(
        tool=tool,
        question=_decorate(ask.format(*shown), rng),
        calls=tuple(dict(zip(names, row, strict=True)) for row in rows),
        nouns=tuple(domain.noun.format(*row) for row in rows),
        topic=domain.names,
    )


def _invented_name(verb: str, thing: str, rng: Random) -> str:
    camel = verb.split("_")[0] + thing.capitalize()
    return rng.choice((f"{verb}_{thing}", f"{verb}_{thing}", f"{thing}_{verb}", thing, camel))


def _invented_params(rng: Random, taken: str) -> list[tuple[str, str, Value]]:
    """Draw one to three distinct parameters as (name, JSON type, value)."""
    plain = ("id", "name", "city", "date", "count", "amount", "key", "text", "code", "limit", "x", "y", "a", "b")
    params: list[tuple[str, str, Value]] = []
    used = {taken}
    count = rng.choice((1, 1, 2, 2, 3))
    while len(params) < count:
        name = rng.choice((rng.choice(plain), values.noun(rng)))
        if name in used:
            continue
        used.add(name)
        if rng.random() < 0.4:
            params.append((name, "integer", values.integer(rng)))
        else:
            kind = rng.choice(("city", "first", "word", "word", "phrase", "email", "id", "date", "color", "person"))
            params.append((name, "string", values.draw(rng, kind)))
    return params


def _spoken(params: list[tuple[str, str, Value]], rng: Random) -> str:
    """Say parameters: ``city Lisbon and level 4``, ``city = Lisbon, level = 4``, ``city "Lisbon" and level "4"`` ..."""
    link = rng.choice((" ", " ", " = ", "=", ": ", " is "))
    quote = '"' if rng.random() < 0.15 else ""
    parts = [f"{name.replace('_', ' ')}{link}{quote}{value}{quote}" for name, _, value in params]
    if len(parts) == 1:
        return parts[0]
    glue = rng.choice((" and ", ", "))
    return ", ".join(parts[:-1]) + glue + parts[-1]


def invented_request(rng: Random) -> Request:
    """Make a request for an invented tool."""
    action = rng.random() < 0.35
    verb = rng.choice(words.ACTIONS if action else words.VERBS)
    thing = values.noun(rng)
    params = _invented_params(rng, thing)
    name = _invented_name(verb, thing, rng)
    spoken_verb = verb.replace("_", " ").capitalize()
    object_ = rng.choice((thing, f"{thing} of a {values.noun(rng)}"))
    description = rng.choice((f"{spoken_verb} the {object_}", f"{spoken_verb} a {thing}", f"The {thing} tool", ""))
    tool = as_schema(name, description, [(param, kind) for param, kind, _ in params], rng)
    said = _spoken(rng.sample(params, len(params)) if rng.random() < 0.15 else params, rng)
    first = params[0][2]
    asks = [
        f"Call {name} with {said}.", f"Use {name} with {said}.", f"Use the tool {name} with {said}.",
        f"{spoken_verb} the {thing} with {said}.", f"{spoken_verb} the {thing} for {said}.",
        f"{spoken_verb} {thing} with {said}, please.",
    ]  # fmt: skip
    if not action:
        asks += [f"What is the {thing} for {said}?", f"What is the {thing} with {said}?"]
        if len(params) == 1:
            asks += [f"What is the {thing} of {first}?", f"What is the {thing} for {first}?"] * 2
    question = _decorate(rng.choice(asks), rng) if rng.random() < 0.5 else rng.choice(asks)
    arguments = {param: value for param, _, value in params}
    noun = "" if action else f"{thing} for {first}"
    return Request(tool, question, (arguments,), (noun,), thing)


def request(rng: Random) -> Request:
    return domain_request(rng.choice(DOMAINS), rng) if rng.random() < 0.5 else invented_request(rng)


def offer(wanted: Request | None, rng: Random) -> list[Schema]:
    """Return the list of offered tools: that of ``wanted`` among distractors of other topics, or distractors alone."""
    count = rng.choice((1, 1, 2, 2, 3)) if rng.random() < 0.95 else rng.randint(4, 6)
    tools = [wanted.tool] if wanted else []
    topics = {wanted.topic} if wanted else set()
    used = {wanted.tool["function"]["name"]} if wanted else set()
    while len(tools) < count:
        other = request(rng)
        name = other.tool["function"]["name"]
        if other.topic not in topics and name not in used:
            topics.add(other.topic)
            used.add(name)
            tools.append(other.tool)
    rng.shuffle(tools)
    return tools


def result(rng: Random) -> tuple[str, str]:
    """Draw what a tool returns, and how an answer says it: ``('{"temperature": 18}', '18')``."""
    kinds = ("int", "small", "word", "phrase", "city", "person", "date", "time", "id", "color")
    unit = rng.choice(("", "", " C", " km", " euros", " percent", " hours", " and sunny"))

    def value() -> Value:
        drawn = values.draw(rng, rng.choice(kinds))
        return f"{drawn}{unit}" if isinstance(drawn, int) and unit else drawn

    shape = rng.random()
    if shape < 0.4:
        plain = str(value())
        return plain, plain
    keys = rng.sample(("result", "value", "temperature", "status", "price", "total", "name", "info", "level"), 2)
    if rng.random() < 0.3:
        keys[0] = values.pseudo_word(rng)
    found = {key: value() for key in keys[: 1 if shape < 0.75 else 2]}
    spoken = [str(v) for v in found.values()] if len(found) == 1 else [f"{k} {v}" for k, v in found.items()]
    return json.dumps(found, ensure_ascii=False), ", ".join(spoken)


def answer(nouns: tuple[str, ...], results: list[str]) -> str:
    """Return the sentences that report ``results``, one per call."""
    return " ".join(
        f"The {noun} is {said}." if noun else f"Done: {said}." for noun, said in zip(nouns, results, strict=True)
    )
