"""The CUDA platform keeps what every platform promises, on the device itself."""

from __future__ import annotations

import pytest

from ferrule_plugins.platform.cuda import CudaPlatform
from ferrule_testkit.kits.platform import PlatformKit


@pytest.mark.usefixtures("gpu")
class TestCuda(PlatformKit):
    plugin = CudaPlatform
