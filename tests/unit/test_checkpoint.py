"""`config.json` in all the forms that exist gives one form, and whatever is wrong with it names file and key."""

import json

import pytest

from ferrule import checkpoint
from ferrule.errors import CheckpointError
from ferrule.plugin import discover

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 128}


@pytest.fixture
def write(tmp_path):
    def write_config(content, name="config.json"):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
        return tmp_path

    return write_config


def test_old_and_new_rotary_forms_are_one(write):
    old = checkpoint.read(write({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    assert old["rope_parameters"] == checkpoint.read(write({**LLAMA, **new}))["rope_parameters"]
    assert "rope_scaling" not in old
    assert "rope_theta" not in old
    assert old.raw["rope_theta"] == 5e5  # what the file says stays available


def test_a_file_that_says_nothing_about_rotary_stays_silent(write):
    assert "rope_parameters" not in checkpoint.read(write(LLAMA))


def test_rotary_settings_per_layer_type(write):
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    found = checkpoint.read(write({**LLAMA, "rope_parameters": rope}))["rope_parameters"]
    assert found["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_composite_models_give_their_text_part(write):
    text = {"model_type": "gemma3_text", "hidden_size": 8, "max_position_embeddings": 64, "dtype": "bfloat16"}
    folder = write({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}})
    values = checkpoint.read(folder, {"text_config": {"hidden_size": 16}, "max_position_embeddings": 32})
    assert values["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert (values["hidden_size"], values["max_position_embeddings"], values["dtype"]) == (16, 32, "bfloat16")
    assert "vision_config" in values.outer


_PER_TYPE = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("stated", "overrides", "found"),
    [
        ({"rope_theta": 1e4}, {"partial_rotary_factor": 0.5}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            {"partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        (
            {"original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}},
            {"original_max_position_embeddings": 64},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
        ({"rotary_emb_base": 1e4}, {"rope_theta": 1e6}, None),  # in the place where the file has it
        ({}, {"rope_theta": 1e6}, {"rope_theta": 1e6}),
        # an override says which of two is right
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, {"rope_theta": 1e6}, {"rope_theta": 1e6}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            {"rope_scaling": {"type": "linear", "factor": 3.0}},
            {"rope_type": "linear", "factor": 3.0},
        ),
        (
            {"rope_parameters": _PER_TYPE},
            {"rope_theta": 1e7, "rope_local_base_freq": 1e3},
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e7},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        ),
        (
            {"rope_parameters": _PER_TYPE},
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e3}}},
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        ),
    ],
)
def test_overrides_of_rotary_settings(write, stated, overrides, found):
    values = checkpoint.read(write({**LLAMA, **stated}), overrides)
    per_type = found is not None and "full_attention" in found
    assert values.get("rope_parameters") == (found if per_type or found is None else {"rope_type": "default"} | found)
    if found is None:
        assert values["rotary_emb_base"] == 1e6


def test_an_override_at_the_top_of_a_composite_file_is_in_its_text_part_for_every_reader(write):
    text = {"model_type": "gemma3_text", "hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}}
    folder = write({"architectures": ["M"], "model_type": "gemma3", "text_config": text})
    values = checkpoint.read(folder, {"rope_theta": 1e6, "hidden_size": 16, "model_type": "other"})
    assert values["rope_parameters"]["rope_theta"] == 1e6
    inner = values.outer["text_config"]
    assert (inner["hidden_size"], inner["rope_parameters"]["rope_theta"]) == (16, 1e6)
    assert (inner["model_type"], values.outer["model_type"]) == ("gemma3_text", "other")


def test_rotary_settings_that_nothing_reads_are_named(write):
    rope = {"rope_type": "yarn", "factor": 2.0, "finetuned": True}
    assert checkpoint.read(write({**LLAMA, "rope_parameters": rope})).notes == (
        "the rotary settings have 'finetuned', which nothing reads",
    )
    assert checkpoint.read(write({**LLAMA, "rope_theta": 1e4})).notes == ()


def test_the_first_name_of_the_settings_of_compressed_tensors_is_read(write):
    stated = {"config_groups": {}}
    values = checkpoint.read(write({**LLAMA, "compression_config": stated}), plugins=discover())
    assert values["quantization_config"] == {"quant_method": "compressed-tensors", **stated}
    both = {**LLAMA, "compression_config": stated, "quantization_config": {"quant_method": "fp8"}}
    assert checkpoint.read(write(both), plugins=discover())["quantization_config"] == {"quant_method": "fp8"}


@pytest.mark.parametrize(("key", "name"), [("torch_dtype", "float16"), ("dtype", "torch.float16")])
def test_stored_type(write, key, name):
    values = checkpoint.read(write({**LLAMA, key: name}))
    assert values["dtype"] == "float16"
    assert "torch_dtype" not in values


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32}, 128),
        ({"max_position_embeddings": None, "n_positions": 77}, 77),
        ({"max_position_embeddings": None}, 2048),
        ({"model_max_length": 1000}, 1000),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 128),
    ],
)
def test_max_length(write, changes, length):
    assert checkpoint.max_length(checkpoint.read(write({**LLAMA, **changes}))) == length


def test_a_window_limits_the_context_when_sliding_is_off(write):
    values = checkpoint.read(write({**LLAMA, "sliding_window": 32}))
    assert checkpoint.max_length(values) == 128
    assert checkpoint.max_length(values, sliding_window=False) == 32
    off = checkpoint.read(write({**LLAMA, "sliding_window": 32, "use_sliding_window": False}))
    assert checkpoint.max_length(off, sliding_window=False) == 128


def test_end_ids_come_from_both_files_once(write):
    write({"eos_token_id": [7, 2]}, "generation_config.json")
    folder = write({**LLAMA, "eos_token_id": 2})
    assert checkpoint.eos_ids(checkpoint.read(folder), folder) == (2, 7)
    assert checkpoint.eos_ids({"eos_token_id": None}) == ()


def test_sampling_defaults(write):
    folder = write({"temperature": 0.6, "max_new_tokens": 9, "do_sample": True}, "generation_config.json")
    assert checkpoint.sampling_defaults(folder, {"top_k": 3}) == {"temperature": 0.6, "max_tokens": 9, "top_k": 3}
    write({"temperature": "hot"}, "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*'temperature'"):
        checkpoint.sampling_defaults(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ("[" * 100_000, "not valid JSON"),
        ({"model_type": "llama"}, "'architectures'"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures'"),
        ({**LLAMA, "rope_scaling": "linear"}, "'rope_scaling'"),
        ({**LLAMA, "rope_theta": -1}, "'rope_theta'"),
        ({**LLAMA, "dtype": 16}, "'dtype'"),
        ({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "'rope_theta'.*contradict"),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "'rope_scaling' has 'rope_type' 'yarn'.*contradict",
        ),
        (
            {**LLAMA, "partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "'partial_rotary_factor'.*contradict",
        ),
        ({**LLAMA, "rope_scaling": {"factor": 2.0}}, "'factor' 2.0 and no 'rope_type'"),
        ({**LLAMA, "rope_scaling": {"type": "default", "factor": 2.0}}, "'factor' 2.0 and the type 'default'"),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, "orignal_max_position_embeddings": 64}},
            "'orignal_max.*Did you mean 'original_max_position_embeddings'",
        ),
    ],
)
def test_errors_name_file_and_key(write, content, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.read(write(content))
    assert "config.json" in str(caught.value)


def test_a_missing_file_and_a_missing_key(write, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        checkpoint.read(tmp_path)
    values = checkpoint.read(write({**LLAMA, "max_position_embeddings": 0}))
    with pytest.raises(CheckpointError, match=r"config\.json has no 'hidden_size'"):
        values["hidden_size"]
    with pytest.raises(CheckpointError, match="'max_position_embeddings' must be a positive integer"):
        checkpoint.max_length(values)


@pytest.mark.advisory("CVE-2025-66448")
def test_remote_code_needs_trust():
    config = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        checkpoint.remote_code(config, known=False, trusted=False)
    assert checkpoint.remote_code(config, known=True, trusted=False) is False
    assert checkpoint.remote_code(config, known=False, trusted=True) is True
    assert checkpoint.remote_code({}, known=False, trusted=True) is False
