"""The kit of platforms."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ferrule.config import Config, DeviceSettings
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.interfaces.platform import DeviceCaps, Platform
from ferrule_testkit.kits.base import Kit, does_not_apply, installed_plugins, promise, shown
from ferrule_testkit.kits.count import work

_CHEAP = 20_000  # lines of Python: asking every platform costs less than a blink
_MOST_MEMORY = 1 << 50


class PlatformKit(Kit):
    """A platform says cheaply whether it is here, and then what it can do, in numbers that can be.

    Where it refuses, only the refusal is proved.
    """

    kind = "platform"
    attention: tuple[str, ...] = ()  # backends besides the installed ones that `attention_order` may name

    def teardown_method(self) -> None:
        super().teardown_method()
        threads = getattr(self, "_threads", None)
        if threads:
            torch.set_num_threads(threads)

    def here(self) -> Platform:
        """An instance, prepared; skips where the platform refuses."""
        reason = self.plugin.refuses()
        if reason is not None:
            does_not_apply(f"it refuses: {reason}")
        self._threads = torch.get_num_threads()
        platform: Platform = self.new()
        self.caps: DeviceCaps = platform.prepare(self._config())
        return platform

    # ------------------------------------------------------------------------------------ promises

    def test_refusal_is_an_answer(self) -> None:
        """`refuses` gives None or a reason in one line, the same each time, and never raises."""
        answers = [self.plugin.refuses() for _ in range(3)]
        promise(len(set(answers)) == 1, f"three answers: {shown(answers)}")
        reason = answers[0]
        told = reason is None or (isinstance(reason, str) and bool(reason) and "\n" not in reason)
        promise(told, f"refuses gives {shown(reason)}")

    def test_refusal_is_cheap(self) -> None:
        """`refuses` runs little code and starts no device: it is asked on every machine."""
        self.plugin.refuses()
        before = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        lines = work(self.plugin.refuses)
        promise(lines <= _CHEAP, f"refuses runs {lines} lines of Python")
        after = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        promise(after == before, "refuses starts CUDA")

    def test_the_device_is_described(self) -> None:
        """`prepare` names the device and gives memory that can be; a second time it says the same."""
        platform = self.here()
        caps = self.caps
        promise(isinstance(caps, DeviceCaps) and bool(caps.platform) and bool(caps.name), f"{shown(caps)} has no name")
        promise(0 < caps.memory_bytes < _MOST_MEMORY, f"{caps.memory_bytes} bytes of memory")
        features = isinstance(caps.features, frozenset) and all(isinstance(name, str) for name in caps.features)
        promise(features, f"features are {shown(caps.features)}")
        promise(platform.prepare(self._config()) == caps, "a second prepare describes another device")

    def test_tensors_live_there(self) -> None:
        """The device can hold and add tensors of the types that it names."""
        platform = self.here()
        dtype = platform.dtype("auto", {})
        total = torch.ones(3, device=platform.device(), dtype=dtype).sum()
        promise(float(total) == 3.0, f"1 + 1 + 1 in {dtype} is {float(total)}")

    def test_types_are_resolved(self) -> None:
        """`auto` gives a floating type for every checkpoint; a type that is named is used, or is a ConfigError."""
        platform = self.here()
        for stored in ("float32", "float16", "bfloat16", None):
            found = platform.dtype("auto", {"dtype": stored} if stored else {})
            floating = isinstance(found, torch.dtype) and found.is_floating_point
            promise(floating, f"auto for {stored} gives {shown(found)}")
        for name in ("float32", "float", "bfloat16", "float16", "half"):
            wanted = {"float": "float32", "half": "float16"}.get(name, name)
            try:
                found = platform.dtype(name, {})
            except ConfigError as error:
                promise(name in str(error), f"the refusal of {name} does not name it: {shown(str(error))}")
            else:
                promise(found is getattr(torch, wanted), f"--dtype {name} gives {found}")

    def test_unknown_types_are_refused(self) -> None:
        """An unknown type is a ConfigError that names it."""
        platform = self.here()
        for name in ("float7", "", "int8", "torch.float32", "__class__"):
            try:
                found: Any = platform.dtype(name, {})
            except ConfigError as error:
                promise(name in str(error), f"the refusal does not name {name!r}: {shown(str(error))}")
            else:
                promise(False, f"--dtype {name!r} gives {shown(found)}")

    def test_the_cache_fits(self) -> None:
        """`cache_bytes` is positive and not more than there is; a wish for more is a ConfigError."""
        platform = self.here()
        given = platform.memory().cache_bytes(self._config())
        whole = isinstance(given, int) and 0 < given <= self.caps.memory_bytes
        promise(whole, f"{shown(given)} bytes for the cache, of {self.caps.memory_bytes}")
        try:
            more = platform.memory().cache_bytes(self._config(cpu_kvcache_space=1e7))
        except ConfigError:
            return
        promise(0 < more <= self.caps.memory_bytes, f"{more} bytes for the cache are promised")

    def test_attention_is_named(self) -> None:
        """`attention_order` names installed backends, at least one of which takes plain attention here."""
        from ferrule.interfaces.model import AttentionOptions, LayerCache
        from ferrule.types import CacheGroup

        platform = self.here()
        order, installed = platform.attention_order(), installed_plugins()
        known = {*installed.names("attention"), *self.attention}
        promise(bool(order) and set(order) <= known, f"attention_order {shown(order)} names what is not installed")
        spec, options = LayerCache(CacheGroup("full", 16), 2, 64), AttentionOptions(scale=0.1)
        backends = [installed.load("attention", name) for name in order if name not in self.attention]
        dtype = platform.dtype("auto", {})
        taken = [backend for backend in backends if backend.refuses(spec, options, self.caps, dtype) is None]
        promise(bool(taken) or bool(set(order) & set(self.attention)), f"all of {order} refuse plain attention here")

    def test_steps_in_flight(self) -> None:
        """`depth` is a small whole number."""
        depth = self.here().execution().depth()
        promise(isinstance(depth, int) and 1 <= depth <= 8, f"depth is {shown(depth)}")

    def test_tensors_cross_whole(self) -> None:
        """`transfers` carry tensors of any type and shape to the device and back, in order, several at a time."""
        platform = self.here()
        transfers = platform.execution().transfers()
        host = [
            torch.arange(5, dtype=torch.int32),
            torch.zeros(0, 3),
            torch.tensor([True, False]),
            torch.eye(3).double(),
        ]
        staged = [transfers.stage(host, platform.device()) for _ in range(2)]
        there = all(tensor.device.type == platform.device().type for each in staged for tensor in each)
        promise(there, "stage leaves tensors elsewhere than on the device")
        copies = [transfers.fetch([*each, each[0] + 1]) for each in staged]
        for back in (copy.wait() for copy in reversed(copies)):
            promise(all(tensor.device.type == "cpu" for tensor in back), "fetch leaves tensors on the device")
            alike = len(back) == 5 and all(
                mine.dtype == theirs.dtype and torch.equal(mine, theirs)
                for mine, theirs in zip(back, [*host, host[0] + 1], strict=False)
            )
            promise(alike, f"tensors come back as {shown(back)}")
        promise(all(copy.done() for copy in copies), "copies that were waited for are not done")

    def test_nothing_is_printed(self) -> None:
        """A platform logs; it does not write to standard output, where commands answer."""
        platform, written = self.here(), []
        stdout = sys.stdout

        class Watch:
            def write(self, text: str) -> int:
                written.append(text)
                return len(text)

            def flush(self) -> None:
                """Nothing is held."""

        sys.stdout = Watch()
        try:
            platform.prepare(self._config())
        finally:
            sys.stdout = stdout
        promise(not written, f"prepare prints {shown(''.join(written))}")

    # ------------------------------------------------------------------------------------ parts

    def _config(self, **variables: Any) -> DeviceSettings:
        return DeviceSettings.of(resolve(Config(env=Environment(**{"cpu_kvcache_space": 0.01, **variables}))))
