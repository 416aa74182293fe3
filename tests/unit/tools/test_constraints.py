"""`constraints.txt` can be installed: by every supported Python, with every build of PyTorch that is published.

pip resolves without installing, under a configuration that knows PyPI only, whatever the machine's own is. It reads
metadata: neither torch nor what it requires is downloaded. Skipped without a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tools import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OTHERS = [tomllib.loads(file.read_text(encoding="utf-8")) for file in ROOT.glob("distributions/*/pyproject.toml")]
PINS = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
PYTHONS = ["3.11", "3.12", "3.13"]
# What the CPU build requires; the one for CUDA adds triton and NVIDIA's libraries to it.
CPU_BUILD_REQUIRES = [
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def neutral() -> dict[str, str]:
    """Return the environment without pip's settings; certificates are the machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def interpreter(version: str) -> str | None:
    """Return a Python of this version that runs, on the path or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    for python in [shutil.which(f"python{version}"), *map(str, installed)]:
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


def cpu_build(folder: Path) -> None:
    """Write a wheel with the name, the version and the requirements of PyTorch's CPU build, which is not on PyPI."""
    version = f"{PINS['torch']}+cpu"
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in CPU_BUILD_REQUIRES)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{requires}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the newest pip, which downloads no wheel to resolve: older ones do, even in a dry run."""
    try:
        urllib.request.urlopen("https://pypi.org/simple/pip/", timeout=20).close()
    except urllib.error.URLError as error:
        pytest.skip(f"no network: {error.reason}")
    folder = tmp_path_factory.mktemp("pip")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "pip>=25.3"]
    subprocess.run(command, env=neutral(), check=True)
    return folder


@pytest.mark.parametrize("build", ["cuda", "cpu"])
@pytest.mark.parametrize("version", PYTHONS)
def test_constraints_resolve(version: str, build: str, pip: Path, tmp_path: Path) -> None:
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    extras += [line for other in OTHERS for line in other["project"]["dependencies"]]
    extras = [line for line in extras if not line.startswith("ferrule")]  # of this repository: all of them are here
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join([*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]))
    command = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    command += ["--use-feature=fast-deps"]  # where an index has no metadata beside a wheel, that part of the wheel
    command += ["-c", str(ROOT / "constraints.txt"), "-r", str(requirements)]
    if build == "cpu":
        cpu_build(tmp_path)
        command += ["--find-links", str(tmp_path)]
    python = interpreter(version)
    if python is None:
        command += ["--python-version", version, "--target", str(tmp_path / "target")]
    ran = subprocess.run(
        [python or sys.executable, *command],
        env={**neutral(), "PYTHONPATH": str(pip)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    would_install = ran.stdout.splitlines()[-1].split()
    assert f"torch-{PINS['torch']}{'+cpu' if build == 'cpu' else ''}" in would_install
    assert any(name.startswith("nvidia-cublas-") for name in would_install) is (build == "cuda")
    assert f"triton-{PINS['triton']}" in would_install
