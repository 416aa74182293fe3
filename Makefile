# Two commands do all the set-up:  make serve   and   make test
#
#   make serve [ARGS="MODEL --port 8001"]   install Ferrule into .venv and serve (the embedded model by default)
#   make test                               everything that CI runs: lint, types, tests, coverage
#   make lint | unit | test-slow | docs     parts of it, and what takes minutes
#   make format                             rewrite the source as `make lint` wants it
#   make reference                          renew the pages that are written from the code
#   make campaign [QUICK=1]                 attack real servers in every way that is known; the table is docs/reliability.md
#   make gpu-check | gpu-bench [NAME=h200]  on a machine with a GPU: all of its tests; its figures, one file
#   make wheel                              dist/*.whl: Ferrule with kernels for every x86-64 processor (a few minutes),
#                                           and each of distributions/
#   make gpu-wheels                         what these two need where there is no network, as files
#
# PYTHON is the interpreter that .venv is made with (3.11 to 3.13). JOBS is how many tests run at once.
# TORCH_INDEX is the package index that PyTorch comes from when .venv is made: where there is no NVIDIA GPU that of the
# CPU builds, which are 1.3 GB in place of 5; with nothing (make TORCH_INDEX= serve), where pip is configured to look, which
# is also where it comes from if that of the CPU builds cannot be reached.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
TORCH_INDEX ?= $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),,https://download.pytorch.org/whl/cpu)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_DOCS := $(VENV)/.installed-docs
DISTRIBUTIONS := $(wildcard distributions/*)
MANIFEST := pyproject.toml constraints.txt $(DISTRIBUTIONS:%=%/pyproject.toml)

.PHONY: serve install test lint format unit test-slow campaign docs reference wheel gpu-wheels gpu-check gpu-bench clean

serve: $(INSTALLED)
	$(BIN)/ferrule serve $(ARGS)

install: $(INSTALLED)

test: lint unit

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict core plugins kernels contrib_models $(DISTRIBUTIONS:%=%/src) tools

format: $(INSTALLED_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One thread per test process: JOBS of them share the machine. Bytecode is kept, whatever the shell says: the tests start
# hundreds of interpreters.
unit test-slow: export OMP_NUM_THREADS = 1
unit test-slow: export PYTHONDONTWRITEBYTECODE =

# Files run in the order of their names: conformance kits and servers, which take minutes, before unit tests, which take
# seconds and fill the end of the run. Otherwise files with few tests, and those are the long ones, would come last.
unit: $(INSTALLED_TEST)
	$(BIN)/python -m tools.coverage -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED_TEST)
	$(BIN)/python -m pytest -m slow $(ARGS)

# What was proved is kept in tools/campaign/proofs.json: a run that was interrupted goes on. ARGS: --again, or names of goals.
campaign: $(INSTALLED_TEST)
	$(BIN)/python -m tools.campaign $(if $(QUICK),--quick) --write docs/reliability.md $(ARGS)

docs: $(INSTALLED_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

reference: $(INSTALLED_TEST)
	$(BIN)/python -m tools.pages

# An installation compiles the kernels that its own processor uses; a wheel is for processors that are not known yet.
wheel: export FERRULE_KERNEL_VARIANTS = all
wheel: $(INSTALLED_TEST)
	for project in . $(DISTRIBUTIONS); do $(BIN)/python -m build --wheel --outdir dist $(ARGS) $$project || exit 1; done

# A machine with a GPU has Python 3.12, torch's build for CUDA with Triton, transformers, and a C compiler, which Triton
# needs. What else Ferrule and its tests need is carried there in GPU_WHEELS, and installed beside what is there.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS ?= gpu-wheels
GPU_VENV := .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
GPU_PACKAGES := msgspec pyzmq pluggy fastapi pydantic starlette uvicorn httptools uvloop prometheus-client jinja2 pyyaml \
	tqdm aiohttp prompt_toolkit pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis slipcover openai httpx gguf \
	psutil setuptools
GPU_JOBS ?= 8
NAME ?= gpu
OUT ?= docs/benchmarks

gpu-wheels: | $(BIN)/python
	rm -rf $(GPU_WHEELS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --only-binary=:all: \
		--python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--dest $(GPU_WHEELS) $(GPU_PACKAGES)
	rm -f $(GPU_WHEELS)/numpy-*  # it is where torch is
	du -sh $(GPU_WHEELS)

# Ferrule itself is installed from this folder; its CPU kernels are built if there is a C++ compiler. The .pth file is for a
# GPU_PYTHON that is itself of a virtual environment, whose packages --system-site-packages does not mean.
$(GPU_VENV)/.installed: $(MANIFEST)
	$(GPU_PYTHON) -c 'import torch, transformers, triton; print(torch.__version__, torch.cuda.get_device_name())'
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
		{ echo "Triton needs a C compiler: install gcc or clang" >&2; exit 1; }
	$(GPU_PYTHON) -m venv --system-site-packages --without-pip $(GPU_VENV)
	$(GPU_PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
		"$$($(GPU_BIN)/python -c 'import site; print(site.getsitepackages()[0])')/gpu.pth"
	$(GPU_PYTHON) -m pip --python $(GPU_BIN)/python install --quiet --disable-pip-version-check --no-index \
		--find-links $(GPU_WHEELS) $(GPU_PACKAGES)
	$(GPU_PYTHON) -m pip --python $(GPU_BIN)/python install --quiet --disable-pip-version-check --no-index \
		--no-deps --no-build-isolation -e . $(DISTRIBUTIONS:%=-e %)
	@touch $@

# Most of a test's time is the compilation of kernels, so many run at once; those that measure memory are alone.
gpu-check: export HF_HUB_OFFLINE = 1
gpu-check: export OMP_NUM_THREADS = 1
gpu-check: $(GPU_VENV)/.installed
	$(GPU_BIN)/python -m pytest tests/kernels tests/gpu/test_models.py tests/unit/plugins/platform/test_cuda.py -n $(GPU_JOBS) $(ARGS)
	$(GPU_BIN)/python -m pytest tests/gpu --ignore=tests/gpu/test_models.py $(ARGS)

gpu-bench: export HF_HUB_OFFLINE = 1
gpu-bench: $(GPU_VENV)/.installed
	$(GPU_BIN)/python -m tools.benchmarks.gpu --name $(NAME) --out $(OUT) $(ARGS)

clean:
	rm -rf $(VENV) $(GPU_VENV) $(GPU_WHEELS) site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "Ferrule needs Python 3.11 to 3.13; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Only torch comes from its index: everything else, and what torch requires, from where pip is configured to look.
install_torch = $(if $(TORCH_INDEX),$(if $(filter file,$(origin TORCH_INDEX)),-)$(PIP) --no-deps --retries 1 --timeout 15 --index-url $(TORCH_INDEX) torch)

$(INSTALLED): $(MANIFEST) | $(BIN)/python
	$(install_torch)
	$(PIP) -e .
	@touch $@

$(INSTALLED_TEST): $(MANIFEST) | $(BIN)/python
	$(install_torch)
	$(PIP) -e '.[test]' $(DISTRIBUTIONS:%=-e %)
	@touch $@ $(INSTALLED)

# The pages are texts: the site is built without Ferrule, and without torch.
$(INSTALLED_DOCS): $(MANIFEST) | $(BIN)/python
	$(PIP) mkdocs-material
	@touch $@
