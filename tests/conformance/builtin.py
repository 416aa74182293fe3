"""The promises of built-in plugins: with which settings the kits prove them, and which take long."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterator, Mapping
from typing import Any

import pytest
import torch

from ferrule.interfaces.quantization import LinearLayer
from ferrule.plugin import KINDS, discover
from ferrule_testkit.kits import kit_of
from ferrule_testkit.kits.base import Kit, promises
from ferrule_testkit.quantized import FORMATS
from tests.fakes import drafts
from tests.fakes.resolvers import adapter_in_a_folder, adapter_in_a_repository
from tests.shared import OURS

PLUGINS = discover()

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
WHOLE_GROUPS = ((64, 48), (224, 104), (512, 256))


def encoding(name: str) -> Any:
    """Return a function that makes the tensors of a layer, as the kit wants it."""

    def encode(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        tensors, _ = FORMATS[name].encode(weight)
        return {key: value for key, value in tensors.items() if key not in ("g_idx", "input_scale")}

    return staticmethod(encode)


def halved(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Process logits in vLLM's form of a processor."""
    return logits / (2 + len(output_ids))


STORE = tempfile.TemporaryDirectory()  # of files and batches
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("model", "FalconForCausalLM"): {"attention": "sdpa"},  # the eager one adds linear biases twice
    ("logits_processor", "python_function"): {
        "arguments": ({"function": halved}, {"function": f"{__name__}:halved"}),
        "wrong": ({}, {"function": 5}, {"function": "no_such_module.x"}, {"function": halved, "args": [1]}, {"x": 1}),
    },
    ("speculator", "draft_model"): {"draft": staticmethod(drafts.itself)},
    ("speculator", "medusa"): {"draft": staticmethod(drafts.medusa)},
    ("speculator", "mlp_speculator"): {"draft": staticmethod(drafts.mlp_speculator)},
    ("speculator", "eagle"): {"draft": staticmethod(drafts.eagle)},
    ("speculator", "eagle3"): {"draft": staticmethod(drafts.eagle3)},
    ("speculator", "mtp"): {"target": staticmethod(drafts.target_of_mtp)},
    ("router", "openai"): {
        "calls": (
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/fake", None),
            ("POST", "/v1/completions", {"prompt": "hello"}),
            ("POST", "/v1/completions", {"prompt": ["hello", "you"], "n": 2, "stream": True}),
            ("POST", "/v1/chat/completions", CHAT),
            ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        )
    },
    ("router", "lora"): {"calls": (("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/adapters/a"}),)},
    ("lora_resolver", "filesystem"): {"world": staticmethod(adapter_in_a_folder)},
    ("lora_resolver", "hf_hub"): {"world": staticmethod(adapter_in_a_repository)},
    ("router", "anthropic"): {
        "calls": (
            ("POST", "/v1/messages", {**CHAT, "model": "fake", "max_tokens": 4}),
            ("POST", "/v1/messages", {**CHAT, "model": "fake", "max_tokens": 4, "stream": True}),
            ("POST", "/v1/messages/count_tokens", {**CHAT, "model": "fake"}),
        )
    },
    ("router", "responses"): {
        "calls": (
            ("POST", "/v1/responses", {"model": "fake", "input": "hello", "max_output_tokens": 4}),
            ("POST", "/v1/responses", {"input": [{"role": "user", "content": "hello"}], "stream": True}),
            ("POST", "/v1/responses/input_tokens", {"input": "hello"}),
        )
    },
    ("router", "batches"): {
        "plugin_options": {"folder": STORE.name},
        "calls": (("GET", "/v1/files", None), ("GET", "/v1/batches?limit=3", None)),
    },
    ("router", "ollama"): {
        "calls": (
            ("POST", "/api/chat", {**CHAT, "model": "fake"}),
            ("POST", "/api/chat", {**CHAT, "model": "fake:latest", "stream": False}),
            ("POST", "/api/generate", {"model": "fake", "prompt": "hello"}),
            ("POST", "/api/generate", {"model": "fake", "prompt": "hello", "raw": True, "stream": False}),
            ("POST", "/api/show", {"model": "fake"}),
            ("POST", "/api/embed", {"model": "fake", "input": ["hello", "you"]}),
            ("POST", "/api/embeddings", {"model": "fake", "prompt": "hello"}),
            ("GET", "/api/tags", None),
            ("GET", "/api/ps", None),
            ("GET", "/api/version", None),
            ("GET", "/", None),
        )
    },
    ("router", "tokenize"): {
        "calls": (("POST", "/tokenize", {"prompt": "hello"}), ("POST", "/detokenize", {"tokens": [72, 105]}))
    },
    ("router", "health"): {
        "calls": (
            ("GET", "/health", None),
            ("POST", "/ping", None),
            ("GET", "/version", None),
            ("GET", "/metrics", None),
        )
    },
    ("router", "docs"): {"calls": (("GET", "/openapi.json", None), ("GET", "/docs", None), ("GET", "/redoc", None))},
    ("router", "ui"): {
        "calls": (
            ("GET", "/ui", None),
            ("GET", "/ui/app.js", None),
            ("GET", "/ui/api/plugins", None),
            ("GET", "/ui/api/options", None),
            ("GET", "/ui/api/live", None),
        )
    },
    ("router", "admin"): {"calls": (("POST", "/reset_prefix_cache", None),)},
    **{
        ("quantization", name): {"config": FORMATS[form].config, "encode": encoding(form), **more}
        for name, form, more in (
            ("compressed-tensors", "int8", {}),
            ("fp8", "fp8-blocks", {}),
            ("deepseek_v4_fp8", "fp8-blocks", {}),
            ("fbgemm_fp8", "fp8-fbgemm", {}),
            ("ptpc_fp8", "fp8-fbgemm", {}),
            *(
                (name, "modelopt-fp4", {"sizes": WHOLE_GROUPS, "error": 0.2})
                for name in ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "nvfp4")
            ),
        )
    },
}
if not torch.cuda.is_available():  # under Triton's interpreter, which is slow; tests/unit has more sizes
    SETTINGS["attention", "triton"] = {
        "platform": "cpu",
        "device": "cpu",
        "dtypes": ("float32",),
        "block_sizes": (4,),
        "head_dims": (8,),
    }
    # A compilation for each size; tests/unit has all of them in `make test-slow`.
    SETTINGS["attention", "flex_attention"] = {"block_sizes": (4,), "head_dims": (8,)}
BUILT_IN = [ref for ref in PLUGINS.refs if ref.distribution in OURS]


# Kinds that compute tensors, and all others: a file of tests for each half, so that two processes share them.
COMPUTING = frozenset({"attention", "executor", "guided_decoding", "model", "quantization", "speculator"})
OTHERS = frozenset(KINDS) - COMPUTING
PARSERS = ("tool_parser", "reasoning_parser")
SYNTAXES = ("hermes", "deepseek_v31", "qwen3_coder", "pythonic", "qwen3", "openai_gptoss")  # one for each way to write
# One for each kind of cache and loading; test_models.py compares every model with a reference.
MODELS = ("LlamaForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM", "Gemma4ForCausalLM", "transformers")
WEIGHTS = ("int8", "int4", "gptq", "awq", "fp8", "bitsandbytes", "mxfp4", "gguf")  # one for each way to multiply
# Of promises that take long: kinds, the plugins of them that keep the promises in `make test`, the promises. The other
# plugins share the code that the promises are about.
IN_DEPTH: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        PARSERS,
        SYNTAXES,
        (
            *("test_work_is_linear", "test_short_texts_in_every_cut", "test_truncation_loses_nothing"),
            *("test_truncation_never_raises_and_closes_every_call", "test_truncation_never_raises"),
            "test_any_cut_gives_the_same",  # test_published.py streams outputs of every parser
        ),
    ),
    # Of the others, tests/unit/plugins/quantization compares the products.
    (
        ("quantization",),
        WEIGHTS,
        (
            *("test_zeros_are_zeros", "test_a_row_is_as_it_is_alone", "test_products_are_near"),
            *("test_answers_stay", "test_memory_is_saved"),
        ),
    ),
    # Of the others, test_models.py compares every token with that of transformers, in steps of chunks and preemption.
    (
        ("model",),
        ("LlamaForCausalLM",),
        (
            *("test_a_change_of_any_weight_changes_the_answer", "test_equals_transformers"),
            *("test_a_prompt_in_chunks_is_the_prompt", "test_a_slot_keeps_nothing_of_its_former_request"),
        ),
    ),
    # Of any model of transformers: what it does otherwise than the others is loading. Its steps are in test_models.py.
    (
        ("model",),
        ("LlamaForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM", "Gemma4ForCausalLM"),
        (
            *("test_what_is_cached_is_told", "test_a_row_is_as_it_is_alone"),
            *("test_ranks_compute_what_one_does", "test_embeddings_take_the_place_of_ids"),
        ),
    ),
    # Under Triton's interpreter, or compiled for each shape: tests/kernels asks it of the kernel, too.
    (
        ("attention",),
        ("cpu", "torch_sdpa", *(("triton", "flex_attention") if torch.cuda.is_available() else ())),
        (
            *("test_windows_soft_caps_slopes_and_sinks", "test_long_rows", "test_types", "test_groups_of_heads"),
            *("test_keys_and_values_go_where_they_belong", "test_a_row_is_as_it_is_alone", "test_sizes_of_heads"),
        ),
    ),
    # Each takes a process. --help of the others runs once: that nothing heavy is imported for it.
    (
        ("command",),
        ("serve", "plugins"),
        ("test_help_is_an_answer", "test_an_unknown_flag_is_one_block", "test_an_unknown_flag_is_named"),
    ),
    # Of the other routes that take a body, e2e/http/test_hostile.py tries the fields in a whole server.
    (
        ("router",),
        ("anthropic", "responses", "batches", "tokenize", "tgi"),
        ("test_no_value_of_a_field_is_the_servers_fault",),
    ),
    # Of the others, tests/unit/plugins/speculator compares outputs, and a guess that is verified alike counts alike.
    (("speculator",), ("ngram",), ("test_frequencies_are_those_without",)),
    (("speculator",), ("ngram", "suffix", "eagle"), ("test_scopes_are_kept_apart",)),
    (("speculator",), ("suffix", "medusa"), ("test_greedy_outputs_are_those_without",)),
    (("speculator",), ("draft_model", "mlp_speculator"), ("test_sampled_outputs_are_those_without",)),
    (
        ("speculator",),
        ("ngram", "eagle", "draft_model"),
        ("test_the_pool_is_left_as_it_was", "test_what_is_accepted_is_counted", "test_its_work_is_bounded"),
    ),
    # tests/simulate runs the default one with any number of steps in flight.
    (
        ("scheduler",),
        (),
        ("test_random_work_one_step_at_a_time", "test_random_work_with_three_steps_in_flight"),
    ),
    # tests/simulate runs the others, with one to three steps in flight.
    (
        ("policy",),
        ("fair",),
        ("test_random_work_one_step_at_a_time", "test_random_work_with_steps_in_flight"),
    ),
)


def is_slow(ref: Any, method: str) -> bool:
    return any(ref.kind in kinds and ref.name not in names and method in methods for kinds, names, methods in IN_DEPTH)


def cases(kinds: Container[str]) -> Iterator[Any]:
    """Yield (plugin, promise) of these kinds. Other names of a class that was proved already are for `make test-slow`,
    as are the longest cases.
    """
    proved: set[str] = set()
    for ref in BUILT_IN:
        again = ref.target in proved or (ref.kind == "model" and ref.name not in MODELS)
        proved.add(ref.target)
        if ref.kind not in kinds:
            continue
        for method, _ in promises(kit_of(ref.kind)):
            marks = [pytest.mark.slow] if again or is_slow(ref, method) else []
            yield pytest.param(ref, method, id=f"{ref.kind}-{ref.name}-{method.removeprefix('test_')}", marks=marks)


def prove(ref: Any, method: str) -> None:
    """Check one promise on a separate instance, as pytest makes one of a subclass, with one thread."""
    settings = SETTINGS.get((ref.kind, ref.name), {})
    plugin = PLUGINS.load(ref.kind, ref.name)
    kit: Kit = type("Test", (kit_of(ref.kind),), {"plugin": plugin, "name": ref.name, **settings})()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kit.setup_method()
    try:
        getattr(kit, method)()
    finally:
        kit.teardown_method()
        torch.set_num_threads(before)
