"""The environment: typed, checked, with a fallback, and nothing secret in a report."""

from __future__ import annotations

import pytest

from ferrule import env
from ferrule.env import VARIABLES, Environment
from ferrule.errors import ConfigError


def test_an_empty_environment_is_the_defaults() -> None:
    assert env.read({}) == Environment()


def test_every_field_has_a_variable() -> None:
    found = {"options", "notices", "missing"}  # of the others, while a configuration is read
    assert {entry.field for entry in VARIABLES} == set(Environment.__struct_fields__) - found
    assert all(entry.doc.endswith((".", ")")) for entry in VARIABLES)


def test_ours_wins_over_the_fallback() -> None:
    assert env.read({"VLLM_CPU_KVCACHE_SPACE": "2"}).cpu_kvcache_space == 2.0
    both = {"VLLM_CPU_KVCACHE_SPACE": "2", "FERRULE_CPU_KVCACHE_SPACE": "3"}
    assert env.read(both).cpu_kvcache_space == 3.0


def test_values() -> None:
    found = env.read(
        {
            "FERRULE_CPU_KVCACHE_SPACE": "0",
            "FERRULE_PLUGINS": "a, b,",
            "FERRULE_SERVER_DEV_MODE": "True",
            "FERRULE_LOGGING_LEVEL": "WARNING",
            "VLLM_ATTENTION_BACKEND": "TORCH_SDPA",
            "FERRULE_RPC_BASE_PATH": " ",
        }
    )
    assert found == Environment(
        cpu_kvcache_space=4.0,
        plugins=("a", "b"),
        server_dev_mode=True,
        logging_level="warning",
        attention_backend="torch_sdpa",
    )


def test_an_empty_allow_list_is_a_list() -> None:
    assert env.read({"FERRULE_PLUGINS": ""}).plugins == ()


@pytest.mark.parametrize(
    ("name", "value", "expects"),
    [
        ("FERRULE_CPU_KVCACHE_SPACE", "four", "GiB as a number >= 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1", "GiB as a number >= 0"),
        ("FERRULE_CPU_KVCACHE_SPACE", "nan", "GiB as a number >= 0"),
        ("FERRULE_CPU_KVCACHE_SPACE", "1e9", "GiB as a number >= 0"),
        ("FERRULE_SERVER_DEV_MODE", "yes", "0 or 1"),
        ("VLLM_LOGGING_LEVEL", "loud", "one of: debug, info, warning, error"),
    ],
)
def test_a_bad_value_names_the_variable_that_was_set(name: str, value: str, expects: str) -> None:
    with pytest.raises(ConfigError) as caught:
        env.read({name: value})
    assert str(caught.value) == f"Environment variable {name}: {value!r} is not valid; expected {expects}."


def test_unknown_names() -> None:
    found = env.read({"FERRULE_APIKEY": "x", "FERRULE_PRT": "1", "VLLM_WHATEVER": "1", "FERRULE_API_KEY": "k"})
    assert found.unknown({"port", "host"}) == (
        "Environment variable FERRULE_APIKEY is not known. Did you mean 'FERRULE_API_KEY'?",
        "Environment variable FERRULE_PRT is not known. Did you mean 'FERRULE_PORT'?",
    )


def test_variables_of_options() -> None:
    found = env.read({"FERRULE_PORT": "1", "VLLM_PORT": "tcp://10.0.0.1:80", "FERRULE_HOST": " ", "VLLM_HOST_IP": "x"})
    assert found.options == {"port": ("FERRULE_PORT", "1")}
    assert found.notices == found.missing == ()
    timeout = {"VLLM_ENGINE_ITERATION_TIMEOUT_S": "60"}
    assert env.read(timeout).options == {"watchdog_timeout": ("VLLM_ENGINE_ITERATION_TIMEOUT_S", "60")}
    assert env.read({**timeout, "FERRULE_WATCHDOG_TIMEOUT": "5"}).options["watchdog_timeout"][1] == "5"


def test_variables_without_effect_say_so() -> None:
    assert env.read({"VLLM_USE_V1": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_USAGE_SOURCE": "production"}).notices == ()
    assert env.read({"VLLM_USE_V1": "0"}).notices == (
        "Environment variable VLLM_USE_V1 has no effect: there is one engine.",
    )
    assert env.read({"VLLM_MLA_DISABLE": "false"}).notices == ()
    assert len(env.read({"VLLM_MLA_DISABLE": "True", "VLLM_FLASH_ATTN_VERSION": "3"}).notices) == 2


def test_variables_of_features_that_are_not_here() -> None:
    assert env.read({"VLLM_DP_SIZE": "1", "VLLM_USE_MODELSCOPE": "False"}).missing == ()
    (said,) = env.read({"VLLM_USE_MODELSCOPE": "True"}).missing
    assert said.startswith("Environment variable VLLM_USE_MODELSCOPE: not in this build: other model hubs.")


def test_reports_hold_no_secret() -> None:
    secrets = {"FERRULE_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "RAY_AUTH_MODE": "s3cret", "VLLM_PASSWORD": "s3cret"}
    found = env.report({**secrets, "OMP_NUM_THREADS": "2", "HOME": "/root", "AWS_REGION": "x"})
    assert found["OMP_NUM_THREADS"] == "2"
    assert set(found) == {*secrets, "OMP_NUM_THREADS"}
    assert "s3cret" not in str(found)
