"""Every documented option and variable is understood, is of one class, and does what its class says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import LLM
from ferrule.config.parse import Parsed, parse, parse_kwargs
from ferrule.config.schema import Schema, Spec
from ferrule.config.unsupported import engine_sections
from ferrule.env import VARIABLES, Environment
from ferrule.env import read as read_environment
from ferrule.env_vllm import FOREIGN
from ferrule.errors import ConfigError

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[2]
_SECTIONS = engine_sections()
_SCHEMA = Schema(_SECTIONS)
_ENV = Environment()
# Read by name, not by attribute, or by the parser itself.
_READ_OTHERWISE = {"config"}


class Documented(NamedTuple):
    """One line of the data file."""

    option: str
    documents: str
    short: str
    value: str
    default: str

    @property
    def spec(self) -> Spec:
        match = _SCHEMA.find(self.option)
        assert match is not None, f"{self.option} is documented and unknown"
        return match.spec


def documented() -> Iterator[Documented]:
    for line in (_HERE / "data" / "documented_options.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield Documented(*[*map(str.strip, line.split("|")), ""][:5])


_OPTIONS = tuple(documented())


def arguments(entry: Documented, tmp_path: Path) -> list[str]:
    if entry.value == "-":
        return [entry.option]
    if entry.value == "(file)":
        file = tmp_path / "serve.yaml"
        file.write_text("")
        return [entry.option, str(file)]
    if entry.value.startswith("="):
        return [entry.option + entry.value]
    return [entry.option, *(entry.value.split() if entry.spec.option.nargs == "+" else [entry.value])]


def read(*argv: str) -> Parsed:
    return parse(argv, _SCHEMA, env=_ENV)


def test_the_list_is_whole() -> None:
    assert len(_OPTIONS) == len({entry.option for entry in _OPTIONS}) == 179
    assert {entry.spec.name for entry in _OPTIONS} >= {spec.name for spec in _SCHEMA.specs if spec.option.inert} - {
        "safetensors_load_strategy"  # newer than the documents
    }


@pytest.mark.parametrize("entry", _OPTIONS, ids=lambda entry: entry.option)
def test_each_option_does_what_its_class_says(entry: Documented, tmp_path: Path) -> None:
    spec, argv = entry.spec, arguments(entry, tmp_path)
    option = spec.option
    if option.missing:
        with pytest.raises(ConfigError) as caught:
            read(*argv)
        assert f"{entry.option}: not in this build: {option.missing}." in str(caught.value)
        return
    parsed = read(*argv)
    said = " ".join(parsed.notices)
    if option.replaced:
        assert f"{entry.option} is replaced by {option.replaced}" in said
        assert spec.name not in parsed.origins
        return
    assert parsed.origins[spec.name] == "command line"
    section = parsed.extra.get(spec.section) or getattr(parsed.config, spec.section)
    assert getattr(section, spec.name) != spec.default
    assert (f"{entry.option} is accepted without effect: {option.inert}." in said) is bool(option.inert)


@pytest.mark.parametrize("entry", [entry for entry in _OPTIONS if entry.default], ids=lambda entry: entry.option)
def test_a_documented_default_passes_in_silence(entry: Documented) -> None:
    assert read(f"{entry.option}={entry.default}").notices == ()
    name = entry.option[2:].replace("-", "_")
    assert parse([], _SCHEMA, env=read_environment({f"FERRULE_{name.upper()}": entry.default})).notices == ()


@pytest.mark.parametrize("entry", _OPTIONS, ids=lambda entry: entry.option)
def test_spellings(entry: Documented) -> None:
    for written in filter(None, (entry.option, entry.option.replace("-", "_").replace("__", "--", 1), entry.short)):
        match = _SCHEMA.find(written)
        assert match is not None
        assert match.spec is entry.spec
    if entry.spec.base is bool:
        off = _SCHEMA.find(f"--no-{entry.option[2:]}")
        assert off is not None
        assert (off.spec, off.positive) == (entry.spec, False)


def test_every_option_has_one_class() -> None:
    for spec in _SCHEMA.specs:
        option = spec.option
        assert sum(map(bool, (option.inert, option.replaced, option.missing))) <= 1, spec.flag
        if option.replaced:
            successor = _SCHEMA.find(option.replaced)
            assert successor is not None, option.replaced
            assert not successor.spec.option.replaced
        for flag in option.suffixes.values():
            assert _SCHEMA.find(flag) is not None
    counts = Counter(entry.spec.option.standing for entry in _OPTIONS)
    assert set(counts) == {"works", "without effect", "replaced", "not in this build"}
    assert counts["works"] >= 77  # what has worked once goes on working


def test_nothing_that_works_is_without_a_reader() -> None:
    """Find a reader of each option that is said to work: an attribute of its name, outside of the configuration."""
    files = [
        path
        for folder in ("core/ferrule", "plugins/ferrule_plugins")
        for path in (_REPOSITORY / folder).rglob("*.py")
        if path.parent.name != "config" or "plugins" in path.parts
    ]
    names = ("adapters.py", "plugins.py", "resolve.py", "resolved.py", "speculative.py")
    files += [_REPOSITORY / "core/ferrule/config" / name for name in names]
    read_names = set(re.findall(r"\.([a-z_0-9]+)\b", "\n".join(file.read_text() for file in files if file.is_file())))
    works = {spec.name for spec in _SCHEMA.specs if spec.option.standing == "works"}
    assert works - read_names - _READ_OTHERWISE == set()


# ------------------------------------------------------------------------------------- further spellings


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["-O3"], "compilation_config", {"level": 3}),
        (["-O", "3"], "compilation_config", {"level": 3}),
        (["-O=2"], "compilation_config", {"level": 2}),
        (["-O", '{"level": 3}'], "compilation_config", {"level": 3}),
        (["-cc.mode=3"], "compilation_config", {"mode": 3}),
        (["--compilation-config.custom_ops+=a,b"], "compilation_config", {"custom_ops": ["a", "b"]}),
        (["--CUDA-graph-sizes", "1", "2"], "cuda_graph_sizes", (1, 2)),
        (["--preemption_mode", "swap"], "preemption_mode", "swap"),
        (["--multi-step-stream-outputs", "false"], "multi_step_stream_outputs", False),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--max-model-len=-1"], "max_model_len", None),
        (["--device", "CPU"], "device", "cpu"),
        (["--rope-scaling.rope_type", "yarn"], "hf_overrides", {"rope_scaling": {"rope_type": "yarn"}}),
        (["--rope-theta", "1e4", "--rope-scaling", '{"type": "linear"}'], "hf_overrides", None),
        (["--max-context-len-to-capture", "100"], "max_seq_len_to_capture", 100),
        (["--worker-use-ray"], "distributed_executor_backend", "ray"),
        (["--async-scheduling"], "pipeline_depth", 2),
        (["--no-async-scheduling"], "pipeline_depth", 1),
        (["--runner", "generate"], "task", "generate"),
        (["--convert", "none"], "task", "auto"),
        (["--enable-log-requests"], "enable_log_requests", True),
        (["--max-num-queued-reqs", "7"], "max_waiting_requests", 7),
        (["--scheduler-cls", "vllm.core.scheduler.Scheduler"], "scheduler_cls", "default"),
    ],
)
def test_spellings_of_values(argv: list[str], name: str, value: object) -> None:
    parsed = read(*argv)
    spec = _SCHEMA.by_name[name]
    found = getattr(parsed.extra.get(spec.section) or getattr(parsed.config, spec.section), name)
    expected = (
        {"rope_theta": 10_000, "rope_scaling": {"type": "linear"}}
        if value is None and name == "hf_overrides"
        else value
    )
    assert found == expected


@pytest.mark.advisory("CVE-2025-29783", "CVE-2025-30165", "CVE-2026-44223", "CVE-2023-48022")
@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["-O4"], "-O: '4' is not valid"),
        (["-zz3"], "Unknown option -zz3."),
        (["--guided-decoding-backend", "xgrammar:fast"], "'fast' behind the colon is none of no-fallback"),
        (["--limit-mm-per-prompt", "image"], "is not valid"),
        (["--limit-mm-per-prompt", "image=16,video=2"], "not in this build: multimodal inputs."),
        (["--task", "classify"], "--task: not in this build: models for other tasks than generate and embed"),
        (["--task", "embed", "--convert", "classify"], "--convert: not in this build: models for other tasks"),
        (
            ["-tp", "2", "-pp", "2", "-ep"],
            "-tp, -pp, -ep: not in this build: parallel workers.",
        ),
        (["--preemption-mode", "drop"], "one of: recompute, swap"),
        (["--kv-transfer-config", '{"kv_connector": "x"}'], "not in this build: "),
        (["--engine-use-ray"], "not in this build: "),
        (["--headless"], "not in this build: "),
        (["--mm-processor-kwargs", '{"code_revision": "x"}'], "not in this build: multimodal inputs"),
    ],
)
def test_refusals(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert part in str(caught.value)


def test_a_replaced_option_at_its_default_says_nothing() -> None:
    parsed = read("--no-worker-use-ray", "--mm-cache-preprocessor=false", "--speculative-model", "None")
    assert (parsed.notices, parsed.origins) == ((), {})


def test_media_are_not_kept_where_none_are_read() -> None:
    assert (
        "--disable-mm-preprocessor-cache is replaced by --mm-processor-cache-gb"
        in read("--disable-mm-preprocessor-cache").notices[0]
    )


def test_keyword_arguments_have_the_same_classes() -> None:
    parsed = parse_kwargs(_ENV, _SECTIONS, swap_space=8, rope_theta=1e4, tensor_parallel_size=1, tokenizer_pool_size=3)
    assert parsed.config.model.hf_overrides == {"rope_theta": 1e4}
    assert len(parsed.notices) == 3
    with pytest.raises(ConfigError, match="tensor_parallel_size: not in this build: parallel workers"):
        parse_kwargs(_ENV, _SECTIONS, tensor_parallel_size=2)


def test_a_file_has_the_same_classes(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nheadless: true\nswap-space: 8\n")
    with pytest.raises(ConfigError) as caught:
        read("--config", str(file))
    assert str(caught.value).startswith(f"{file}:2: headless: not in this build: data parallelism")


# ----------------------------------------------------------------------------------------- variables


def test_the_environment_stands_between_command_line_and_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nhost: file\nmax-num-seqs: 3\nserved-model-name: [x]\n")
    variables = {
        "FERRULE_PORT": "2",
        "FERRULE_HOST": "variable",
        "FERRULE_CONFIG": str(file),
        "FERRULE_SERVED_MODEL_NAME": "a b",
        "FERRULE_ALLOWED_ORIGINS": '["https://a"]',
        "FERRULE_TOKENIZER_POOL_SIZE": "1",
        "FERRULE_HF_OVERRIDES": '{"a": 1}',
    }
    parsed = parse(["--host", "line"], _SCHEMA, env=read_environment(variables))
    front = parsed.config.frontend
    assert (front.port, front.host, front.allowed_origins) == (2, "line", ("https://a",))
    assert parsed.config.scheduler.max_num_seqs == 3
    assert parsed.config.model.served_model_name == ("a", "b")
    assert parsed.config.model.hf_overrides == {"a": 1}
    assert parsed.origins["port"] == parsed.origins["config"] == "environment"
    assert parsed.origins["max_num_seqs"] == f"{file}:3"
    (notice,) = parsed.notices
    assert notice.startswith("Environment variable FERRULE_TOKENIZER_POOL_SIZE is accepted without effect: API ")
    assert parsed.config.env == Environment()  # texts of variables are not carried further


def test_a_bad_variable_of_an_option_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse([], _SCHEMA, env=read_environment({"FERRULE_PORT": "x", "FERRULE_TENSOR_PARALLEL_SIZE": "2"}))
    bad, missing = str(caught.value).splitlines()
    assert bad.startswith("Environment variable FERRULE_PORT: 'x' is not valid")
    assert missing.startswith("Environment variable FERRULE_TENSOR_PARALLEL_SIZE: not in this build: parallel workers")


def test_what_an_orchestrator_sets_by_accident_does_not_matter() -> None:
    variables = {"VLLM_PORT": "tcp://10.0.0.7:80", "VLLM_HOST_IP": "10.0.0.7", "VLLM_SERVICE_HOST": "10.0.0.7"}
    parsed = parse([], _SCHEMA, env=read_environment(variables))
    assert (parsed.config.frontend.port, parsed.notices, parsed.origins) == (8000, (), {})


def test_notices_about_variables_are_for_engines() -> None:
    env = read_environment({"VLLM_USE_V1": "0", "VLLM_USE_MODELSCOPE": "1", "VLLM_NO_DEPRECATION_WARNING": "1"})
    with pytest.raises(ConfigError, match="VLLM_USE_MODELSCOPE: not in this build: other model hubs"):
        parse([], _SCHEMA, env=env)
    assert parse([], Schema({}), env=env, positional=None).notices == ()


def test_notices_about_replaced_options_can_be_switched_off() -> None:
    env = read_environment({"VLLM_NO_DEPRECATION_WARNING": "1"})
    assert parse(["--rope-theta", "1e4"], _SCHEMA, env=env).notices == ()


def test_every_documented_variable_has_a_class() -> None:
    """Know the variables of the documents, but for those of builds and of the system, which are not Ferrule's."""
    listed = (_HERE / "data" / "documented_variables.txt").read_text().split()
    known = [row.name for row in FOREIGN] + [f"VLLM_{entry.field.upper()}" for entry in VARIABLES]
    assert len(known) == len(set(known))
    assert set(listed) - set(known) == set()
    assert all(sum(map(bool, (row.inert, row.missing, row.option))) == 1 for row in FOREIGN)
    assert {row.option for row in FOREIGN if row.option} <= _SCHEMA.by_name.keys()


def test_llm_takes_what_serve_takes() -> None:
    """Accept all options of the engine in the constructor, and refuse what is not here before loading."""
    with pytest.raises(ConfigError, match="tensor_parallel_size: not in this build: parallel workers"):
        LLM("org/name", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="Unexpected keyword argument 'tensor_paralel_size'. Did you mean"):
        LLM("org/name", tensor_paralel_size=2)


_WORDS = st.one_of(
    st.sampled_from([flag for spec in _SCHEMA.specs for flag in spec.flags]),
    st.sampled_from(["-O3", "-tp2", "--rope-scaling.a", "--rope-scaling.a+", "--speculative-config.a.b", "-cc.x=1"]),
    st.sampled_from(["xgrammar:", "auto:no-fallback", "image=1,=2", '{"a": 1}', "None", "true", "0", "auto", "x", "="]),
    st.text(max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_WORDS, max_size=6))
def test_any_command_line_is_understood_or_refused(argv: list[str]) -> None:
    try:
        parsed = read(*argv)
    except ConfigError:
        return
    assert all(notice.endswith((".", "?")) for notice in parsed.notices)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([spec.name for spec in _SCHEMA.specs]), st.text(max_size=6), max_size=3))
def test_any_environment_is_understood_or_refused(texts: dict[str, str]) -> None:
    variables = {f"FERRULE_{name.upper()}": text for name, text in texts.items() if name != "config"}
    refused = ""
    try:
        parse([], _SCHEMA, env=read_environment(variables))
    except ConfigError as error:
        refused = str(error)
    assert not refused or "FERRULE_" in refused
