"""Chat templates: what they see, what they may do, and that conversations are checked before they get there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ferrule.errors import ConfigError, RequestError
from ferrule.frontend.text import template as rendering
from ferrule.frontend.text.builtin import builtin_templates, choose_templates
from ferrule.frontend.text.messages import read_messages
from ferrule.frontend.text.template import RenderJob, compile_template, work
from tools import ROOT

LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}({{ part.type }}:{{ part.text }}){% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}S{{ m.content }}"
    "{% else %}{% for p in m.content %}P{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
ALIAS = "{% for m in messages %}{% set c = m['content'] %}{% set d = c %}" + (
    "{% for p in d %}{{ p.text }}{% endfor %}{% endfor %}"
)
MACRO = "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}"
CALLS = "{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{{ m.content | trim }}{% endfor %}"
SLICE = "{% for m in messages %}{% for p in m.content[0:] | list %}{{ p.text }}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


def render(job: RenderJob) -> str:
    return rendering.render(job).text


def calling(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def job(template: str, messages: list[dict[str, Any]] | None = None, **values: Any) -> RenderJob:
    return RenderJob(
        template=template,
        messages=read_messages(messages or HI, 10_000),
        variables={"add_generation_prompt": True, "tools": None, **values.pop("variables", {})},
        extra=values.pop("extra", {}),
        content_format=values.pop("content_format", "auto"),
        max_characters=values.pop("max_characters", 10_000),
        **values,
    )


def test_renders_what_published_templates_use() -> None:
    template = (
        "{{ bos_token }}\n"
        "{%- for m in messages %}\n"
        "  {%- if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{{ {'é': [1, true], 'a': '<'} | tojson }}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "user", "content": c} for c in "abc"]
    text = render(job(template, messages, variables={"bos_token": "<s>"}))
    assert text.startswith("<s>")
    assert "b" not in text
    assert re.sub(r"\s", "", text) == '<s>ac{"é":[1,true],"a":"<"}4'


def test_equals_transformers_on_the_embedded_model_s_template() -> None:
    tokenizer = ROOT / "contrib_models/ferrule_contrib/tiny/checkpoint"
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer)
    template = (tokenizer / "chat_template.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    ours = render(job(template, messages, variables={"tools": tools, **theirs.special_tokens_map}))
    read = json.loads(json.dumps(messages))
    read[2]["tool_calls"][0]["function"]["arguments"] = {"x": "é"}
    read[2]["content"] = ""
    assert ours == theirs.apply_chat_template(read, tools=tools, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize(
    ("template", "shape"),
    [
        (LOOP, "string"),
        (PARTS, "openai"),
        (BOTH, "given"),
        (ALIAS, "openai"),
        (MACRO, "openai"),
        (CALLS, "string"),
        (SLICE, "openai"),
    ],
)
def test_the_form_of_content_is_read_from_the_template(template: str, shape: str) -> None:
    assert work({"inspect": template, "special_tokens": {}})["content"] == shape


def lost(template: str, messages: list[dict[str, Any]], **values: Any) -> list[str]:
    return list(rendering.render(job(template, messages, **values)).lost)


TOOL_CALL = {"id": "a1b2c3d4e", "function": {"name": "f", "arguments": {}}}
PER_ROLE = (
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for x in c %}{{ x.text }}{% endfor %}{% endif %}"
    "{% endmacro %}{% for turn in messages %}{% if turn.role == 'tool' %}<{{ turn.get('content') | trim }}>"
    "{% else %}{{ text(turn['content']) }}{% endif %}{{ turn.tool_calls }};{% endfor %}"
)


def test_each_role_gets_its_content_in_the_form_that_is_read() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": parts},
    ]
    assert render(job(PER_ROLE, messages)).replace("\n", "+").endswith("<one+two>;")
    assert render(job(PER_ROLE, messages)).startswith("onetwo;")
    first = "{% for m in messages %}({{ m.content[0].text }}){% endfor %}"
    assert render(job(first, messages[:1])) == "(one\ntwo)"
    as_data = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert render(job(as_data, messages[:1])) == '"one\\ntwo"'


def test_what_a_template_does_not_show_is_told() -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content | upper }}{% endfor %}"
    system = {"role": "system", "content": "hi"}  # which the user says, too
    called = {"role": "assistant", "content": "I look.", "tool_calls": [TOOL_CALL]}
    long = {"role": "user", "content": "a text of more than sixteen characters"}
    assert lost(users, [*HI, long, {"role": "user", "content": " "}]) == []
    assert lost(users, [system, *HI, called, long]) == [
        "messages[0].content",
        "messages[2].content",
        "messages[2].tool_calls",
    ]
    assert lost(LOOP, [system, *HI, called, long]) == ["messages[2].tool_calls"]
    assert lost(BOTH, [{"role": "user", "content": ["x", {"type": "text", "text": "y"}]}]) == []
    # a template that fails on marks says nothing
    assert (
        lost("{{ messages[0].content }}{{ 1 // (messages[1].content == 'x') }}", [*HI, {**HI[0], "content": "x"}]) == []
    )


def test_developers_are_the_system_where_no_role_is_named_so() -> None:
    developer = {"role": "developer", "content": "Be brief, and kind to all."}
    known = "{% for m in messages if m.role in ['system', 'user'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    named = known.replace("'system'", "'developer'")
    assert render(job(known, [developer, *HI])) == "[system]Be brief, and kind to all.[user]hi"
    assert render(job(named, [developer, *HI])) == "[developer]Be brief, and kind to all.[user]hi"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "thought", "tool_plan"])
def test_thoughts_come_back_under_every_name(name: str) -> None:
    template = "{% for m in messages %}{{ m." + name + " or '-' }}/{{ m.content or '' }} {% endfor %}"
    for given in ("reasoning", "reasoning_content", "thinking"):
        silent = {"role": "assistant", given: "hm", "tool_calls": [TOOL_CALL]}
        assert render(job(template, [*HI, silent, {**silent, "content": "x"}])) == (
            "-/hi hm/ " + ("-" if name == "thinking" != given else "hm") + "/x "
        )


def test_no_content_stays_none_where_the_template_takes_it() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    tests = "{% for m in messages %}{% if m.content is none %}NONE{% else %}{{ m.content }}!{% endif %}{% endfor %}"
    assert render(job(tests, [*HI, called])) == "hi!NONE"
    assert render(job(LOOP, [*HI, called])) == "[user]hi[assistant]>"
    assert render(job("{% for m in messages %}{{ m.content + '.' }}{% endfor %}", [*HI, called])) == "hi.."
    assert render(job(tests, [*HI, {"role": "assistant", "refusal": "I cannot."}])) == "hi!I cannot.!"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 123456789012345678901234567890}', '{"a": 123456789012345678901234567890}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": "\\ud83d\\ude00"}', '{"a": "😀"}'),
        ("null", "{}"),
        ("", "{}"),
    ],
)
def test_arguments_that_models_write_come_back(arguments: str, shown: str) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
        "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
    )
    made = job(template, [calling(arguments)])
    sent = json.loads(json.dumps(msgspec.to_builtins(made)))
    text = work({"job": json.dumps(sent)})["text"]
    assert text.partition(" a=")[0] == shown
    text.encode()


def test_content_takes_the_form_that_the_template_reads() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(job(LOOP, parts)) == "[user]a\nb>"
    assert render(job(PARTS, parts)) == "(text:a)(text:b)"
    assert render(job(PARTS)) == "(text:hi)"
    assert render(job(BOTH, parts + HI)) == "PaPbShi"
    assert render(job(BOTH, HI, content_format="openai")) == "Phi"
    assert render(job(BOTH, parts, content_format="string")) == "Sa\nb"


def test_extra_variables_reach_the_template_only_where_it_reads_them() -> None:
    template = "{{ enable_thinking }}{{ add_generation_prompt }}"
    extra = {"enable_thinking": False, "unread": 1, "add_generation_prompt": "x"}
    assert render(job(template, extra=extra)) == "FalseTrue"
    assert compile_template("{{ a }}{% set b = 1 %}{{ b }}{{ raise_exception }}").reads == {"a"}


def test_a_refusal_of_the_template_is_told() -> None:
    with pytest.raises(RequestError, match="refuses this conversation: roles must alternate"):
        render(job("{{ raise_exception('roles must alternate') }}"))


@pytest.mark.advisory("CVE-2026-5760")
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "syntax error in line 1"),
        ("ok\n{{ 'x' ", "syntax error in line 2"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update({'role': 'x'}) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
        ("{{ strftime_now(5) }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_a_clean_refusal(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(job(template))
    assert "0x" not in caught.value.message
    assert "/" not in caught.value.message


@pytest.mark.parametrize(
    "expression",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 9**(9**9) }}",
        "{{ -(9**(9**9)) }}",
        "{{ ['x'] * 10**10 }}",
        "{{ 'x' | center(10**10) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ 'x' ~ 'y' * 10**10 }}",
        "{{ ('x' * 10**10)[0] }}",
        "{{ range(10**10) | list }}",
        "{{ 'a' if 9**(9**9) else 'b' }}",
        "{{ [9**(9**9)] }}{{ {'a': 9**(9**9)} }}",
        "{{ 1 < 9**(9**9) }}{{ 9**(9**9) is odd }}",
        "{% set x = 'x' * 10**10 %}",
        "{% if 9**(9**9) %}{% endif %}",
        "{% for x in 'x' * 10**10 %}{% endfor %}",
        "{% macro m(x='x' * 10**10) %}{% endmacro %}",
        "{% include 'x' * 10**10 %}",
        "{% filter center(10**10) %}x{% endfilter %}",
    ],
)
def test_nothing_is_computed_where_a_template_is_only_compiled(expression: str) -> None:
    """Compile without running: the server checks the operator's template in its own process, where no limit holds."""
    assert compile_template(expression + "{{ name }}").reads == {"name"}


@pytest.mark.parametrize(
    "template",
    [
        "{% autoescape 'x' * 10**10 %}{% endautoescape %}",
        "{{ " + "(" * 50_000,
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 10_000 + " }}",
    ],
    ids=["modifier", "parentheses", "loops", "digits"],
)
def test_what_cannot_be_translated_is_a_clean_refusal(template: str) -> None:
    with pytest.raises(RequestError, match="The chat template"):
        compile_template(template)


@pytest.mark.advisory("CVE-2026-5760")
@pytest.mark.parametrize(
    "template",
    [
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '%s' | format(raise_exception.__globals__) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ self.__init__ }}",
    ],
)
def test_what_is_not_safe_is_not_there(template: str) -> None:
    assert render(job(template)) == ""


@pytest.mark.advisory("CVE-2025-61620")
def test_output_stops_at_its_limit() -> None:
    with pytest.raises(RequestError, match="longer than 1000 characters"):
        render(
            job(
                "{% for i in range(100000) %}{% for j in range(100000) %}xx{% endfor %}{% endfor %}",
                max_characters=1000,
            )
        )
    assert len(render(job("{{ 'a' * 1000 }}", max_characters=1000))) == 1000


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LOOP, "[user]hi[assistant]I am"),
        ("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "hi|I am"),
        (PARTS, "(text:hi)(text:I am"),
    ],
)
def test_continuing_the_final_message_ends_where_its_content_ends(template: str, expected: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    assert render(job(template, messages, marker="f00d" * 8)) == expected


def test_continuing_needs_a_template_that_shows_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        render(job("{{ messages[0].content }}", [*HI, {"role": "assistant", "content": "x"}], marker="f00d" * 8))
    assert caught.value.param == "continue_final_message"


# ------------------------------------------------------------------------------------------------ messages


def test_messages_are_brought_into_one_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    read = read_messages(
        [
            {"role": "user", "content": ["x", {"type": "text", "text": "y"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why", "audio": None},
            {"role": "tool", "content": "z", "tool_call_id": "1"},
        ],
        100,
    )
    assert read[0] == {
        "role": "user",
        "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        "name": "Ann",
    }
    assert read[1]["content"] is None
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert read[1]["reasoning"] == read[1]["reasoning_content"] == "why"
    assert "audio" not in read[1]
    assert read[2] == {"role": "tool", "content": "z", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must not be empty"),
        (["x"], "messages[0] must be an object"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "must be 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([calling("{")], "must be a JSON"),
        ([calling("[" * 90)], "must be a JSON"),
        ([calling("[" * 10**5)], "100000 characters"),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * 60}] * 2}], "120 characters"),
        ([{"role": "user", "content": ""}] * 20_000, "at most 16384"),
        ([{"role": "user", "content": [""] * 10_000}] * 2, "at most 16384"),
        ([{"role": "user", "tool_calls": [{}] * 20_000}], "at most 16384"),
        ([{"role": "user", "content": "x" * 101}], "101 characters"),
    ],
)  # fmt: skip
def test_wrong_messages_are_named(messages: list[Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        read_messages(messages, 100)
    param = caught.value.param or ""
    assert param == "messages" or (param.startswith("messages[") and param in words + caught.value.message)


# ------------------------------------------------------------------------------------------------ which template


def test_a_template_is_found_by_name_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }} é", "utf-8")
    own = {"default": "D", "tool_use": "T"}
    assert choose_templates(None, None) == {}
    assert choose_templates(None, "X") == {"default": "X"}
    assert choose_templates(None, own) == own
    assert choose_templates("tool_use", own) == {"default": "T"}
    assert choose_templates(str(file), own) == {"default": "{{ messages }} é"}
    assert choose_templates("{{ a }}\\nb", own) == {"default": "{{ a }}\nb"}
    assert "im_start" in choose_templates("chatml", own)["default"]
    with pytest.raises(ConfigError, match="Did you mean 'chatml'"):
        choose_templates("chatlm", own)
    with pytest.raises(ConfigError):
        choose_templates(str(tmp_path), own)
    (tmp_path / "bad.jinja").write_bytes(b"\xff{{")
    with pytest.raises(ConfigError, match="UTF-8"):
        choose_templates(str(tmp_path / "bad.jinja"), own)


@pytest.mark.parametrize("name", sorted(builtin_templates()))
def test_built_in_templates_render(name: str) -> None:
    messages = [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    template = builtin_templates()[name].text
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    text = render(job(template, messages, variables=tokens))
    assert [text.index(word) for word in ("one", "two", "three")] == sorted(
        text.index(w) for w in ("one", "two", "three")
    )
    assert "SYS" in text
    without = render(job(template, messages, variables={**tokens, "add_generation_prompt": False}))
    assert text.startswith(without)
    assert work({"inspect": template, "special_tokens": {}})["content"] == "string"
    assert render(job(template, messages[1:]))  # no system message, no special tokens


def test_llama_3_matches_its_published_form() -> None:
    template = builtin_templates()["llama3"].text
    assert render(job(template, [{"role": "user", "content": " hi "}], variables={"bos_token": "<B>"})) == (
        "<B><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
