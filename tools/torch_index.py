"""Print the package index that `make` installs PyTorch from; nothing, if pip's own configuration is to decide.

On Linux, PyPI has the build for CUDA, several GB with the libraries that it requires. Where there is no NVIDIA GPU,
PyTorch's own index of CPU builds is used instead, if it answers. The variable TORCH_INDEX overrides this: it names an
index, or is empty for pip's own configuration; so does an index that pip is configured with.

The index goes to stdout; one line that says which build is taken, why, and how to choose, goes to stderr.
"""

from __future__ import annotations

import ast
import http.client
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYPI = "https://pypi.org/simple"
SECONDS = 5.0  # an index that takes longer to answer is not used
PIP_SECTIONS = ("global", "install", ":env:")  # later ones win


class Choice(NamedTuple):
    """`url` is the index, empty if pip's own configuration decides."""

    url: str
    message: str


def choose(
    wanted: str | None, pip: Mapping[str, str], has_gpu: Callable[[], bool], answers: Callable[[str], bool]
) -> Choice:
    """Choose by `wanted` (the value of TORCH_INDEX, None if it is not set), pip's settings, and what is found."""
    configured = "PyTorch: from pip's own configuration"
    for_cpu = f"make TORCH_INDEX={CPU_INDEX} ... for the CPU build"
    for_cuda = f"make TORCH_INDEX={PYPI} ... for CUDA"
    if wanted:
        return Choice(wanted, f"PyTorch: from {wanted} (TORCH_INDEX)")
    if wanted is not None:
        return Choice("", f"{configured} (TORCH_INDEX is empty)")
    if "index-url" in pip or "no-index" in pip:
        return Choice("", f"{configured}, which sets the index; {for_cpu}")
    if has_gpu():
        return Choice("", f"{configured}: on PyPI the CUDA build (NVIDIA GPU found); {for_cpu}")
    if answers(CPU_INDEX):
        return Choice(CPU_INDEX, f"PyTorch: CPU build from {CPU_INDEX} (no NVIDIA GPU found); {for_cuda}")
    return Choice(
        "",
        f"{configured}: on PyPI the CUDA build, 5 GB (no NVIDIA GPU found, but {CPU_INDEX} cannot be reached); "
        "make TORCH_INDEX=URL ... for another index",
    )


def pip_settings(shown: str) -> dict[str, str]:
    """Return the options of `pip install` by name, from what `pip config list` prints: its files and the PIP_*
    variables.
    """
    found: dict[str, str] = {}
    for section in PIP_SECTIONS:
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(['\"].*['\"])$", shown, re.MULTILINE):
            if text := ast.literal_eval(value):  # pip ignores empty ones
                found[name] = text
    return found


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Return whether a driver shows a GPU: its devices, its list of GPUs, or (Windows' subsystem for Linux) its
    tool.
    """
    if any(root.glob("dev/nvidia[0-9]*")) or any(root.glob("proc/driver/nvidia/gpus/*")):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU ")


def answers(index: str, pip: Mapping[str, str], seconds: float = SECONDS) -> bool:
    """Return whether the index has a page for torch, asked with pip's proxy and certificates. Any error means no."""
    opened = threading.Event()

    def ask() -> None:
        proxy = pip.get("proxy")
        try:
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None),
                urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=pip.get("cert"))),
            )
            with opener.open(f"{index.rstrip('/')}/torch/", timeout=seconds):
                opened.set()
        except (OSError, ValueError, http.client.HTTPException):
            return

    # On a thread of its own: looking up a name may take longer than the timeout of a socket.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return opened.is_set()


def main() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    )
    pip = pip_settings(shown.stdout)
    index, message = choose(os.environ.get("TORCH_INDEX"), pip, has_nvidia_gpu, lambda index: answers(index, pip))
    print(message, file=sys.stderr, flush=True)
    if index:
        print(index)


if __name__ == "__main__":
    main()
