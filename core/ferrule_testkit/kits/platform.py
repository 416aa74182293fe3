"""The kit of platforms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ferrule.config import Config, DeviceSettings
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import Packable
from ferrule.interfaces.platform import DeviceCaps, Platform
from ferrule.interfaces.sampler import SamplerKernels
from ferrule_nn import MLP, GatedMLP, LayerNorm, Linear, RMSNorm, load_into
from ferrule_nn.ops import using
from ferrule_testkit.installed import installed_plugins
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
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
        """Return an instance, prepared; skip the test where the platform refuses."""
        reason = self.plugin.refuses()
        if reason is not None:
            does_not_apply(f"it refuses: {reason}")
        self._threads = torch.get_num_threads()
        platform: Platform = self.new()
        self.caps: DeviceCaps = platform.prepare(self._config())
        return platform

    # ------------------------------------------------------------------------------------ promises

    def test_refusal_is_an_answer(self) -> None:
        """Return None or a reason in one line from `refuses`, the same each time, and never raise."""
        answers = [self.plugin.refuses() for _ in range(3)]
        promise(len(set(answers)) == 1, f"three answers: {shown(answers)}")
        reason = answers[0]
        told = reason is None or (isinstance(reason, str) and bool(reason) and "\n" not in reason)
        promise(told, f"refuses gives {shown(reason)}")

    def test_refusal_is_cheap(self) -> None:
        """Run little code in `refuses` and start no device: it is called on every machine."""
        self.plugin.refuses()
        before = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        lines = work(self.plugin.refuses)
        promise(lines <= _CHEAP, f"refuses runs {lines} lines of Python")
        after = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        promise(after == before, "refuses starts CUDA")

    def test_the_device_is_described(self) -> None:
        """Name the device in `prepare`, with a possible size of memory, and describe the same device a second time."""
        platform = self.here()
        caps = self.caps
        promise(isinstance(caps, DeviceCaps) and bool(caps.platform) and bool(caps.name), f"{shown(caps)} has no name")
        promise(0 < caps.memory_bytes < _MOST_MEMORY, f"{caps.memory_bytes} bytes of memory")
        features = isinstance(caps.features, frozenset) and all(isinstance(name, str) for name in caps.features)
        promise(features, f"features are {shown(caps.features)}")
        promise(platform.prepare(self._config()) == caps, "a second prepare describes another device")

    def test_tensors_live_there(self) -> None:
        """Hold and add tensors on the device, of the types that it names."""
        platform = self.here()
        dtype = platform.dtype("auto", {})
        total = torch.ones(3, device=platform.device(), dtype=dtype).sum()
        promise(float(total) == 3.0, f"1 + 1 + 1 in {dtype} is {float(total)}")

    def test_types_are_resolved(self) -> None:
        """Resolve `auto` to a floating type for every checkpoint; use a type that is named, or raise ConfigError."""
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
        """Raise ConfigError that names an unknown type."""
        platform = self.here()
        for name in ("float7", "", "int8", "torch.float32", "__class__"):
            try:
                found: Any = platform.dtype(name, {})
            except ConfigError as error:
                promise(name in str(error), f"the refusal does not name {name!r}: {shown(str(error))}")
            else:
                promise(False, f"--dtype {name!r} gives {shown(found)}")

    def test_the_cache_fits(self) -> None:
        """Return from `cache_bytes` a positive size within the device's memory; raise ConfigError if the user asks for
        more.
        """
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
        """Name installed backends in `attention_order`, at least one of which accepts plain attention here."""
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
        """Return a small whole number from `depth`."""
        depth = self.here().execution().depth()
        promise(isinstance(depth, int) and 1 <= depth <= 8, f"depth is {shown(depth)}")

    def test_features_are_true(self) -> None:
        """Give a device with the feature "host_memory" tensors that NumPy can read."""
        platform = self.here()
        if "host_memory" not in self.caps.features:
            does_not_apply("its tensors are not said to lie in the host's memory")
        read = torch.arange(3, device=platform.device()).numpy()
        promise(read.tolist() == [0, 1, 2], f"NumPy reads {shown(read)}")

    def test_kernels_compute_what_torch_does(self) -> None:
        """Compute layers and samples with the platform's kernels nearly as without them."""
        platform = self.here()
        execution, device, dtype = platform.execution(), platform.device(), platform.dtype("auto", {})
        kernels = execution.kernels()
        promise(isinstance(kernels, Kernels), f"kernels are {shown(kernels)}")
        classes = [type(part) for part in kernels.parts]
        promise(len(set(classes)) == len(classes), f"two parts are of one class: {shown(classes)}")
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(5, 64, generator=draw).to(device, dtype)
        error = 1e-4 if dtype == torch.float32 else 0.05
        for name, (layer, plain) in _layers(kernels, device, dtype, draw).items():
            got, wanted = layer(x).float(), plain(x).float()
            off = float((got - wanted).abs().max() / (1 + wanted.abs().max()))
            promise(off <= error, f"{name} with kernels is {off:.1e} off, more than {error}")
        part = kernels.part(SamplerKernels)
        if part is not None:
            logits = torch.randn(4, 50, generator=draw).to(device)
            best = part.chooser().best(logits.clone()).tokens
            promise(torch.equal(best, logits.argmax(-1)), f"the likeliest tokens are {shown(best)}")

    def test_tensors_cross_whole(self) -> None:
        """Carry tensors of any type and shape to the device and back with `transfers`, in order, several at a time."""
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
        """Write to the log and never to standard output, where commands answer."""
        platform, written = self.here(), []
        stdout = sys.stdout

        class Watch:
            def write(self, text: str) -> int:
                written.append(text)
                return len(text)

            def flush(self) -> None:
                """Do nothing: no text is buffered."""

        sys.stdout = Watch()
        try:
            platform.prepare(self._config())
        finally:
            sys.stdout = stdout
        promise(not written, f"prepare prints {shown(''.join(written))}")

    # ------------------------------------------------------------------------------------ parts

    def _config(self, **variables: Any) -> DeviceSettings:
        return DeviceSettings.of(resolve(Config(env=Environment(**{"cpu_kvcache_space": 0.01, **variables}))))


def _layers(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, draw: torch.Generator
) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return layers of 64 features with the kernels, packed, and the same layers computed by torch, by their names."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "RMSNorm": lambda: RMSNorm(64, 1e-5),
        "RMSNorm with an offset": lambda: RMSNorm(64, 1e-5, 1.0),
        "LayerNorm": lambda: LayerNorm(64),
        "Linear": lambda: Linear(64, 48, bias=True),
        "GatedMLP": lambda: GatedMLP(64, 96),
        "MLP": lambda: MLP(64, 96, "gelu_pytorch_tanh"),
    }
    return {name: _pair(make, kernels, device, dtype, draw) for name, make in makers.items()}


def _pair(
    make: Callable[[], nn.Module],
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    draw: torch.Generator,
) -> tuple[nn.Module, nn.Module]:
    pair, before = [], torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for each in (kernels, Kernels()):
            with device, using(each):
                pair.append(make())
    finally:
        torch.set_default_dtype(before)
    shapes = {name: tuple(own.shape) for name, own in pair[0].named_parameters()}
    weights = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}
    for layer in pair:
        load_into(layer, weights.items())
    for part in pair[0].modules():
        if isinstance(part, Packable):
            part.pack()
    return pair[0], pair[1]
