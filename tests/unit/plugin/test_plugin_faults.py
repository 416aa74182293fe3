"""Faults of plugins while they run: one form for all kinds, with name, distribution and traceback."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ferrule.errors import ConfigError, PluginError, RequestFailed
from ferrule.plugin.faults import MAX_FAULTS, FaultCount, culprit, failing_request, fault_logger, naming_culprit
from tools.wheels import Distribution

PLATFORM = """
from ferrule.errors import ConfigError
from acme import helper

class Memory:
    def cache_bytes(self):
        return helper.divide(1)

    def refuse(self):
        raise ConfigError("there is no room")

class Device:
    def trim(self):
        raise OSError("the bus is gone")

def call(function):
    return function()
"""
HELPER = "def divide(number):\n    return number // 0\n"


@pytest.fixture
def acme(site: Any) -> Any:
    """Install a distribution with two plugins, and modules that are neither's."""
    dist = Distribution(
        name="acme-chips",
        version="2.1",
        entry_points={
            "ferrule.v1.platform": {"acme": "acme.device:Device"},
            "ferrule.v1.policy": {"acme": "acme.policy:Policy"},
        },
        files={
            "acme/__init__.py": "",
            "acme/device.py": PLATFORM,
            "acme/helper.py": HELPER,
            "acme/policy.py": "from acme import helper\ndef key():\n    return helper.divide(1)\n",
        },
    )
    site.install(dist)
    return site.discover()


def raised(function: Any, *args: Any) -> Exception:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_culprit_is_the_plugin_whose_code_raised(acme: Any) -> None:
    from acme import device, helper, policy  # type: ignore[import-not-found]

    assert culprit(acme, raised(device.Device().trim)) == "platform:acme of acme-chips 2.1"
    assert culprit(acme, raised(device.Memory().cache_bytes)) == "platform:acme of acme-chips 2.1"
    assert culprit(acme, raised(policy.key)) == "policy:acme of acme-chips 2.1"
    assert culprit(acme, raised(helper.divide, 1)) == "platform:acme or policy:acme of acme-chips 2.1"
    assert culprit(acme, raised(int, "x")) == ""
    assert culprit(acme, raised(device.call, lambda: int("x"))) == "platform:acme of acme-chips 2.1"
    assert culprit(acme, raised(acme.load, "policy", "none")) == "", "Ferrule's own plugins are nobody's fault"


def test_a_start_that_a_plugin_ends_names_it(acme: Any, caplog: pytest.LogCaptureFixture) -> None:
    from acme import device

    with (
        pytest.raises(PluginError, match=r"^Plugin platform:acme of acme-chips 2\.1 failed: OSError: the bus is gone$"),
        naming_culprit(acme),
    ):
        device.Device().trim()
    assert "the bus is gone" in caplog.text
    assert "plugin platform:acme of acme-chips 2.1 raised in start-up" in caplog.text
    with (
        pytest.raises(ConfigError, match=r"^platform:acme of acme-chips 2\.1: there is no room$"),
        naming_culprit(acme),
    ):
        device.Memory().refuse()


def test_what_ferrule_raises_while_a_plugin_calls_it_is_not_the_plugins_word(acme: Any) -> None:
    from acme import device

    def refuse() -> None:
        raise ConfigError("--max-model-len is too long")

    with pytest.raises(ConfigError, match="^--max-model-len"), naming_culprit(acme):
        device.call(refuse)
    with pytest.raises(ZeroDivisionError), naming_culprit(acme):
        1 // 0  # noqa: B018


def test_a_plugin_from_a_file_is_named_too(site: Any, tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from ferrule.interfaces.scheduler import SchedulingPolicy\n"
        "class Mine(SchedulingPolicy):\n"
        "    def key(self, view, now):\n        raise OSError\n"
        "    def victim(self, running):\n        return ''\n"
    )
    plugins = site.discover(plugin=(f"policy={file}",))
    made = plugins.make("policy", "mine")
    assert culprit(plugins, raised(made.key, None, 0.0)).startswith(f"policy:mine of file {file} ")


def test_faults_of_others_and_of_ferrule_go_to_their_logs(acme: Any, caplog: pytest.LogCaptureFixture) -> None:
    from acme import device

    own: list[str] = []
    write = fault_logger(acme, own.append)
    for function, doing in ((device.Device().trim, "a step"), (lambda: int("x"), "a call")):
        try:
            function()
        except Exception:
            write(doing)
    assert own == ["a call"]
    (fault,) = caplog.records
    assert fault.getMessage() == "plugin platform:acme of acme-chips 2.1 raised in a step"
    assert fault.exc_info is not None


def test_a_plugin_is_disabled_once(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultCount("hooks:x of y 1.0")
    with caplog.at_level(logging.ERROR, "ferrule.plugin"):
        for _ in range(MAX_FAULTS + 1):
            assert faults.disabled == (faults.count >= MAX_FAULTS)
            try:
                raise ValueError("no")
            except ValueError:
                faults.add("step_stats", ", and more")
    assert [r.getMessage() for r in caplog.records if "disabled" in r.getMessage()] == [
        "plugin hooks:x of y 1.0 is disabled after 3 faults, and more"
    ]


def test_a_fault_of_one_request_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RequestFailed) as caught, failing_request("tool_parser:x of y 1.0", "feed"):
        raise OSError("/etc/secret")
    assert "secret" not in caught.value.message
    assert caplog.records[0].getMessage() == "plugin tool_parser:x of y 1.0 raised in feed"
    with pytest.raises(ValueError, match="wrong"), failing_request("x", "y", ValueError):
        raise ValueError("wrong")
    assert len(caplog.records) == 1
