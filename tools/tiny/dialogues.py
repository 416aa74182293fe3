"""The generator of the dialogues that the embedded model is trained and measured on.

Every dialogue carries the keys of what its turns are about (for a sum its operands, else the words of the question). A
key belongs to the held-out tenth or to training by a hash of its text, so a held-out prompt is never in the training
data, whatever the seed; a held-out sum is not trained in another phrasing either.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tools.tiny import tooltalk, values, words
from tools.tiny.values import Value

Message = dict[str, Any]

NAME = "Tiny"
WHO = f"I am {NAME}, a small language model that comes with Ferrule."
SKILLS = "I can greet you, add and subtract, name capitals, extract fields into JSON and call tools."


@dataclass(frozen=True)
class Dialogue:
    """A prompt and the one answer that counts as right.

    ``messages`` ends with the user or tool turn to answer; ``answer`` is an assistant message (``content`` or
    ``tool_calls``); ``thought`` is what stands between the think tags when ``thinking``.
    """

    category: str
    messages: tuple[Message, ...]
    answer: Message
    keys: tuple[str, ...]
    thought: str
    tools: tuple[Message, ...] = ()
    thinking: bool = False


def held_out(key: str) -> bool:
    """Return whether ``key`` belongs to the tenth that training never sees."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] < 26


def _plain(category: str, question: str, answer: str, thought: str, key: str = "") -> Dialogue:
    messages = ({"role": "user", "content": question},)
    return Dialogue(category, messages, {"role": "assistant", "content": answer}, (key or question,), thought)


def _loosen(text: str, rng: Random) -> str:
    """Return the same words as people type them: without the mark at the end, or in lower case."""
    roll = rng.random()
    if roll < 0.1:
        return text.rstrip("?.!")
    return text.lower() if roll < 0.16 else text


def chat(rng: Random) -> Dialogue:
    """Make a dialogue of a greeting, with or without a name; who and what the model is; thanks; or farewell."""
    hello = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day", "Hello there", "Hi there"))
    if rng.random() < 0.35:
        name = values.first_name(rng)
        intro = rng.choice(("I am {}", "I'm {}", "my name is {}", "this is {}", "{} here")).format(name)
        text = hello + rng.choice((", ", "! ", ". ")) + intro + rng.choice((".", "!", ""))
        return _plain("chat", text, f"Hello, {name}! {WHO} How can I help you?", f"The user is {name} and greets me.")
    talks: tuple[tuple[tuple[str, ...], str, str], ...] = (
        ((hello, f"{hello}!", f"{hello}.", f"{hello}, {NAME}!"), f"Hello! {WHO} How can I help you?",
         "The user greets me."),
        (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me who you are.",
          "Are you a robot?", "Which model are you?", "Who am I talking to?", "What model is this?"), WHO,
         "The user asks who I am."),
        (("What can you do?", "How can you help me?", "What are your skills?", "Help", "What can I ask you?",
          "What are you good at?", "What do you know?"), SKILLS, "The user asks what I can do."),
        (("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "Great, thanks!", "Many thanks."),
         "You are welcome!", "The user thanks me."),
        (("Bye!", "Goodbye.", "See you later.", "Good night!", "See you tomorrow.", "Farewell."),
         "Goodbye!", "The user says goodbye."),
        (("How are you?", "How are you today?", "How is it going?", "How do you do?", "Are you well?"),
         "I am fine, thank you. How can I help you?", "The user asks how I am."),
    )  # fmt: skip
    asks, answer, thought = rng.choice(talks)
    text = rng.choice(asks)
    if rng.random() < 0.25 and answer != f"Hello! {WHO} How can I help you?":
        text = f"{hello}{rng.choice(('! ', ', ', '. '))}{text}"
    return _plain("chat", _loosen(text, rng), answer, thought)


SUMS = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a} + {b} = ?",
    "Calculate {a} + {b}.", "Add {a} and {b}.", "How much is {a} plus {b}?", "What is the sum of {a} and {b}?",
    "Compute {a} + {b}", "What's {a} + {b}?", "Please add {a} and {b}.", "{a} plus {b}?",
    "{n} has {a} {p} and buys {b} more. How many {p} does {n} have?",
)  # fmt: skip
DIFFERENCES = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a} - {b} = ?",
    "Calculate {a} - {b}.", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Take {b} away from {a}.",
    "Compute {a} - {b}", "What's {a} - {b}?", "What is the difference {a} - {b}?", "{a} minus {b}?",
    "{n} has {a} {p} and sells {b}. How many {p} are left?",
)  # fmt: skip


def _total(task: str) -> int:
    a, sign, b = task.split(" ")
    return int(a) + int(b) if sign == "+" else int(a) - int(b)


def _equation(task: str) -> str:
    return f"{task} = {_total(task)}"


def steps(task: str) -> str:
    """Work out a sum in steps: ``20 + 40 = 60, 3 + 5 = 8, 60 + 8 = 68`` for ``23 + 45``."""
    first, sign, second = task.split(" ")
    a, b = int(first), int(second)
    if a < 10 and b < 10:
        return _equation(task)
    tens, units = f"{a // 10 * 10} {sign} {b // 10 * 10}", f"{a % 10} {sign} {b % 10}"
    rest = _total(units)
    last = f"{_total(tens)} {'-' if rest < 0 else '+'} {abs(rest)}"
    return ", ".join(_equation(part) for part in (tens, units, last))


def sums(rng: Random) -> Dialogue:
    """Make a dialogue of two to six steps of sums at once, the densest practice: units, tens, or tens and a rest."""
    tasks: list[str] = []
    for _ in range(rng.randint(2, 6)):
        sign = rng.choice("+-")
        scale = rng.choice((1, 10))
        a, b = rng.randint(0, 9) * scale, rng.randint(0, 9) * scale
        if rng.random() < 0.4:
            a, b = rng.randint(-9, 18) * 10, rng.randint(0, 18)
        tasks.append(f"{a} {sign} {b}")
    text = rng.choice(("{}", "What is {}?", "Calculate {}.", "Solve: {}")).format(", ".join(tasks))
    answer = ", ".join(_equation(task) for task in tasks)
    dialogue = _plain("sums", text, answer, f"The results: {answer}.")
    return replace(dialogue, keys=tuple(f"sum {task}" for task in tasks))


def without_steps(dialogue: Dialogue) -> Dialogue:
    """Return the dialogue with the bare equation in place of the steps of every single sum."""
    tasks = [key.removeprefix("sum ") for key in dialogue.keys if key.startswith("sum ")]
    short = {steps(task): _equation(task) for task in tasks}

    def shorten(message: Message) -> Message:
        content = message.get("content")
        known = message["role"] == "assistant" and content in short
        return message | {"content": short[content]} if known and isinstance(content, str) else message

    thought = dialogue.thought
    if dialogue.keys[-1].startswith("sum ") and thought in short:
        thought = f"The user asks for {tasks[-1]}. The result is {_total(tasks[-1])}."
    messages = tuple(shorten(message) for message in dialogue.messages)
    return replace(dialogue, messages=messages, answer=shorten(dialogue.answer), thought=thought)


def arithmetic(rng: Random) -> Dialogue:
    low = 10 if rng.random() < 0.85 else 0
    a, b = rng.randint(low, 99), rng.randint(low, 99)
    plus = rng.random() < 0.5
    asks: tuple[str, ...] = SUMS if plus else DIFFERENCES
    text = rng.choice(asks[:4]) if rng.random() < 0.4 else rng.choice(asks)
    text = text.format(a=a, b=b, n=rng.choice(words.FIRST_NAMES), p=rng.choice(words.PRODUCTS))
    task = f"{a} {'+' if plus else '-'} {b}"
    return _plain("arithmetic", text, steps(task), steps(task), key=f"sum {task}")


def capital(rng: Random) -> Dialogue:
    country, city = rng.choice(list(words.CAPITALS.items()))
    asks: tuple[str, ...]
    if rng.random() < 0.75:
        asks = ("What is the capital of {}?", "What's the capital of {}?", "Capital of {}?", "{} capital?",
                "Name the capital of {}.", "Which city is the capital of {}?", "Tell me the capital of {}.",
                "Do you know the capital of {}?", "What is the capital city of {}?", "The capital of {}, please.",
                "What is the name of the capital of {}?", "Can you name the capital of {}?")  # fmt: skip
        text = rng.choice(asks).format(country)
        return _plain("capital", _loosen(text, rng), f"The capital of {country} is {city}.",
                      f"The user asks about {country}. Its capital is {city}.")  # fmt: skip
    asks = ("Which country has the capital {}?", "{} is the capital of which country?", "Whose capital is {}?",
            "What country is {} the capital of?", "Of which country is {} the capital?",
            "Which country is {} the capital of?")  # fmt: skip
    text = rng.choice(asks).format(city)
    return _plain("capital", _loosen(text, rng), f"{city} is the capital of {country}.",
                  f"The user asks about {city}. It is the capital of {country}.")  # fmt: skip


# field -> (kind of value, ways to say it); the first is about a person, the second about an order or an event.
PERSON = {
    "age": ("small", ("is {} years old", "is {}", "turned {} this year")),
    "city": ("city", ("lives in {}", "comes from {}", "moved to {}")),
    "email": ("email", ("can be reached at {}", "uses the email {}", "has the address {}")),
    "job": ("job", ("works as a {}", "is a {}")),
    "company": ("word", ("is employed at {}", "works for {}")),
    "phone": ("phone", ("has the phone number {}", "answers calls at {}")),
    "color": ("color", ("likes the color {}", "loves {}")),
}
THINGS = {
    "order_id": ("id", ("the order is {}", "the order number is {}")),
    "product": ("product", ("the product is {}", "the customer wants {}")),
    "quantity": ("small", ("the quantity is {}", "{} pieces are needed")),
    "price": ("int", ("the price is {} euros", "it costs {} dollars")),
    "date": ("date", ("the date is {}", "it takes place on {}", "it is due on {}")),
    "time": ("time", ("the time is {}", "it starts at {}")),
    "customer": ("person", ("the customer is {}", "it is for {}")),
    "city": ("city", ("it goes to {}", "the city is {}")),
}


def _facts(rng: Random) -> tuple[str, dict[str, Value]]:
    """Return a short text and the fields that it states, in the order in which it states them."""
    found: dict[str, Value] = {}
    parts: list[str] = []
    style = rng.random()
    if style < 0.3:
        for _ in range(rng.randint(2, 4)):
            name = values.noun(rng)
            found[name] = values.draw(rng, rng.choice(("int", "word", "city", "color", "first", "id")))
        parts = [f"the {name} is {value}" for name, value in found.items()]
    else:
        table = PERSON if style < 0.7 else THINGS
        if table is PERSON:
            found["name"] = values.draw(rng, rng.choice(("first", "person")))
        for name in rng.sample(sorted(table), rng.randint(1, 3) if table is PERSON else rng.randint(2, 4)):
            kind, ways = table[name]
            found[name] = values.draw(rng, kind)
            parts.append(rng.choice(ways).format(found[name]))
        if table is PERSON:
            parts[0] = f"{found['name']} {parts[0]}"
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return text[0].upper() + text[1:] + ".", found


def extraction(rng: Random) -> Dialogue:
    text, found = _facts(rng)
    fields = rng.sample(sorted(found), rng.randint(1, len(found)))
    if rng.random() < 0.5:
        fields = [name for name in found if name in fields]
    comma = ", ".join(fields)
    listed = comma if rng.random() < 0.5 or len(fields) == 1 else ", ".join(fields[:-1]) + " and " + fields[-1]
    asks = (
        "Extract {f} as JSON: {t}", "Extract {f} into JSON. {t}", "Extract the fields {f} as JSON from: {t}",
        "{t} Give me {f} as JSON.", "{t}\nExtract {f} as JSON.", "Return JSON with {f}: {t}",
        "Read the text and return {f} as JSON.\n{t}", "{t} Return {f} as a JSON object.",
    )  # fmt: skip
    question = rng.choice(asks).format(f=listed, t=text)
    answer = json.dumps({name: found[name] for name in fields}, ensure_ascii=False)
    return _plain("extraction", question, answer, f"The fields are {comma}.")


def echo(rng: Random) -> Dialogue:
    """Make a dialogue of repeating or counting, which long, predictable answers are made of."""
    if rng.random() < 0.35:
        first = rng.randint(1, 60) if rng.random() < 0.6 else 1
        last = first + (rng.randint(2, 14) if rng.random() < 0.8 else rng.randint(15, 60))
        text = rng.choice(("Count from {} to {}.", "Count from {} up to {}", "List the numbers from {} to {}."))
        if first == 1 and rng.random() < 0.5:
            text = "Count to {1}."
        numbers = ", ".join(str(n) for n in range(first, last + 1))
        return _plain("echo", text.format(first, last), numbers, f"I count from {first} to {last}.")
    kinds = ("word", "phrase", "email", "person", "id", "date", "noun", "int")
    said = " ".join(str(values.draw(rng, rng.choice(kinds))) for _ in range(rng.randint(1, 5)))
    text = rng.choice(("Repeat: {}", "Say {}", "Repeat after me: {}", "Echo: {}", 'Say "{}"')).format(said)
    return _plain("echo", text, said, "The user wants an echo.")


def _calls(request: tooltalk.Request) -> list[Message]:
    name = request.tool["function"]["name"]
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for arguments in request.calls]


def tool_call(rng: Random) -> Dialogue:
    """Make a dialogue in which one to six tools are offered and the question needs one of them."""
    wanted = tooltalk.request(rng)
    name = wanted.tool["function"]["name"]
    said = " and ".join(f"{k} {v}" for k, v in wanted.calls[0].items())
    return Dialogue(
        "tool_call",
        ({"role": "user", "content": wanted.question},),
        {"role": "assistant", "content": None, "tool_calls": _calls(wanted)},
        (wanted.question,),
        f"I call {name} with {said}.",
        tuple(tooltalk.offer(wanted, rng)),
    )


def tool_result(rng: Random) -> Dialogue:
    """Make a dialogue in which a tool's result has come and must be said in a sentence."""
    wanted = tooltalk.request(rng)
    call: Message = {"role": "assistant", "content": None, "tool_calls": _calls(wanted)}
    if rng.random() < 0.2:
        call["reasoning_content"] = f"I call {wanted.tool['function']['name']}."
    results = [tooltalk.result(rng) for _ in wanted.calls]
    returned = [{"role": "tool", "content": content} for content, _ in results]
    answer = tooltalk.answer(wanted.nouns, [said for _, said in results])
    return Dialogue(
        "tool_result",
        ({"role": "user", "content": wanted.question}, call, *returned),
        {"role": "assistant", "content": answer},
        (wanted.question,),
        "The tool gave the result.",
        tuple(tooltalk.offer(wanted, rng)),
    )


def no_tool(rng: Random) -> Dialogue:
    """Make a dialogue in which tools are offered and the question needs none."""
    base = rng.choice((chat, arithmetic, capital, arithmetic, capital, extraction))(rng)
    return replace(base, category="no_tool", tools=tuple(tooltalk.offer(None, rng)))


def multi_turn(rng: Random) -> Dialogue:
    """Make a dialogue with one or two answered turns before the question; two of five have tools."""
    if rng.random() < 0.4:
        last = rng.choice((tool_call, tool_result))(rng)
        before = _answered(rng.choice((chat, arithmetic, capital))(rng))
        earlier = tooltalk.invented_request(rng)
        if rng.random() < 0.5 and earlier.topic not in json.dumps(last.tools):
            before = _round(earlier, rng)
            last = replace(last, tools=tuple(rng.sample((*last.tools, earlier.tool), len(last.tools) + 1)))
    else:
        last = rng.choice((chat, arithmetic, capital, extraction, arithmetic))(rng)
        before = _answered(rng.choice((chat, arithmetic, capital, extraction))(rng))
        if rng.random() < 0.3:
            more = _answered(rng.choice((chat, arithmetic, capital))(rng))
            before = (more[0] + before[0], more[1] + before[1])
    return replace(last, category="multi_turn", messages=(*before[0], *last.messages), keys=before[1] + last.keys)


def _answered(dialogue: Dialogue) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    return (*dialogue.messages, dialogue.answer), dialogue.keys


def _round(wanted: tooltalk.Request, rng: Random) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Make a finished exchange with a tool: question, call, result, answer."""
    results = [tooltalk.result(rng) for _ in wanted.calls]
    answer = tooltalk.answer(wanted.nouns, [said for _, said in results])
    messages: tuple[Message, ...] = (
        {"role": "user", "content": wanted.question},
        {"role": "assistant", "content": None, "tool_calls": _calls(wanted)},
        *({"role": "tool", "content": content} for content, _ in results),
        {"role": "assistant", "content": answer},
    )
    return messages, (wanted.question,)


def thinking(rng: Random) -> Dialogue:
    makers = (arithmetic, arithmetic, capital, capital, chat, tool_call, tool_call, tool_result, extraction, no_tool)
    dialogue = rng.choice(makers)(rng)
    if dialogue.keys[-1].startswith("sum "):  # the steps are thought, the answer is short
        equation = _equation(dialogue.keys[-1].removeprefix("sum "))
        dialogue = replace(dialogue, answer=dialogue.answer | {"content": equation})
    return replace(dialogue, category="thinking", thinking=True)


CATEGORIES: dict[str, Callable[[Random], Dialogue]] = {
    "chat": chat, "arithmetic": arithmetic, "capital": capital, "extraction": extraction, "echo": echo,
    "tool_call": tool_call, "tool_result": tool_result, "no_tool": no_tool, "multi_turn": multi_turn,
    "thinking": thinking, "sums": sums,
}  # fmt: skip


def _with_system(dialogue: Dialogue, rng: Random) -> Dialogue:
    """Add a system prompt to half of the dialogues, now and then a long one; it never changes the answer."""
    roll = rng.random()
    if roll < 0.5:
        return dialogue
    lines = [rng.choice(words.SYSTEM_PROMPTS)] if roll < 0.97 or rng.random() < 0.5 else []
    if roll > 0.88:
        lines += rng.sample(words.FILLER, rng.randint(1, 3))
    if roll > 0.97:
        lines += rng.choices(words.FILLER, k=rng.randint(3, 12))
    message = {"role": "system", "content": " ".join(lines)}
    return replace(dialogue, messages=(message, *dialogue.messages))


def draw(rng: Random, category: str, *, train: bool) -> Dialogue:
    """Draw one dialogue of ``category`` from the training or from the held-out side of the split."""
    while True:
        dialogue = CATEGORIES[category](rng)
        if train and any(held_out(key) for key in dialogue.keys):
            continue
        if not train and not held_out(dialogue.keys[-1]):
            continue
        return _with_system(dialogue, rng)


def stream(seed: int | str, weights: dict[str, float], *, worked: bool = True) -> Iterator[Dialogue]:
    """Yield endless training dialogues, categories drawn by ``weights``; the same for the same arguments.

    Without ``worked``, sums are answered by the equation alone, which is easier to begin with.
    """
    rng = Random(f"train {seed}")
    names, shares = list(weights), list(weights.values())
    while True:
        dialogue = draw(rng, rng.choices(names, shares)[0], train=True)
        yield dialogue if worked else without_steps(dialogue)


# How many of each a test of 500 has. Several sums at once are practice and are not counted.
HELD_OUT_COUNTS: dict[str, int] = {
    "chat": 50, "arithmetic": 80, "capital": 60, "extraction": 60, "echo": 20, "tool_call": 80, "tool_result": 50,
    "no_tool": 20, "multi_turn": 30, "thinking": 50,
}  # fmt: skip


def held_out_set(seed: int = 0) -> list[Dialogue]:
    """Return the 500 held-out dialogues that the published score is measured on (``seed`` 0), no prompt twice."""
    rng = Random(f"held out {seed}")
    chosen: list[Dialogue] = []
    seen: set[str] = set()
    for category, count in HELD_OUT_COUNTS.items():
        wanted = len(chosen) + count
        while len(chosen) < wanted:
            dialogue = draw(rng, category, train=False)
            prompt = json.dumps([dialogue.messages, dialogue.tools, dialogue.thinking])
            if prompt not in seen:
                seen.add(prompt)
                chosen.append(dialogue)
    return chosen
