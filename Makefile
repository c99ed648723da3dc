# gpushare. `make help` lists what there is; everything that is built goes below build/.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
ifneq ($(words $(CURDIR)),1)
$(error gpushare: make knows no file names with spaces, and this tree is in "$(CURDIR)": move it)
endif
ifndef V # make V=1 shows the commands
MAKEFLAGS += --silent
endif

# $(call progress,CC file): on a terminal one line, which the next one replaces; else a line for each. V=1: the commands.
progress = $(if $(V),,@if [ -t 1 ] && [ "$${TERM:-dumb}" != dumb ]; then printf '\r\033[K  %s\r' '$(1)'; else echo '  $(1)'; fi)

# The distribution's Python runs the programs; build/venv is made from it.
PYTHON := $(firstword $(wildcard /usr/bin/python3) python3)
VENV_PYTHON := build/venv/bin/python
SETUP := build/.setup
TEST_SETUP := build/.setup-test
DOCS_SETUP := build/.setup-docs

# Headers from PyPI wheels (links into build/venv, made with it), for machines without CUDA
CUDA_INCLUDE := build/include/cuda
NVML_INCLUDE := build/include/nvml

CC := gcc
PYTEST_ARGS ?=

# Of make fuzz, for each target, and of test-tsan
SECONDS ?= 60

.PHONY: help setup build demo playground pictures newcomer dist test test-all matrix matrix-vm pythons test-elsewhere test-attacks test-kills test-recipes test-clients test-models test-aarch64 test-asan test-tsan test-dist fuzz check check-headers lint format bench gpu-check docs man site sizes clean root

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9_-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile packaging/packages.mk

setup: $(SETUP) ## install missing system packages, make build/venv

$(SETUP): packaging/bootstrap packaging/venv pyproject.toml
	@packaging/bootstrap
	@packaging/venv "$(PYTHON)"
	@touch $@

$(TEST_SETUP): packaging/bootstrap $(DOCS_SETUP)
	@packaging/bootstrap test
	@touch $@

$(DOCS_SETUP): $(SETUP)
	@packaging/venv "$(PYTHON)" docs
	@touch $@

# Python programs. The launchers, in build/bin, stand in front of those in build/libexec.
PROGRAMS := build/bin/gpushare build/libexec/gpushare-hook build/libexec/gpushare-runtime

-include shim/shim.mk
-include simulator/sim.mk
-include tests/limiter/throttle.mk
-include tests/hardware/gpu.mk
-include hook/launcher/launcher.mk
-include bench/bench.mk
-include hook/snapshot/snapshot.mk
-include tests/fuzz/fuzz.mk
-include packaging/dist.mk
-include packaging/packages.mk

# Headers and compiler come with the setup; being newer than an object must not rebuild it.
$(CUDA_INCLUDE)/cuda.h $(NVML_INCLUDE)/nvml.h $(SIM_CUDA_OBJECTS) $(SIM_NVML_OBJECTS): | $(SETUP)

build: $(SETUP) shim sim simhost $(PROGRAMS) $(SNAPSHOT_MADE) $(LAUNCHERS) build/bin/gpushare-runtime-cri ## build the shim, the simulated driver and the programs
	@[ ! -t 1 ] || [ "$${TERM:-dumb}" = dumb ] || printf '\r\033[K'

$(PROGRAMS): packaging/program $(SETUP)
	@mkdir -p $(@D)
	@packaging/program "$(PYTHON)" $(@F) >$@.new
	@chmod 755 $@.new && mv $@.new $@

root:
	@[ "$$(id -u)" = 0 ] || { echo "gpushare: this starts containers, so it needs root: sudo make $(MAKECMDGOALS)" >&2; exit 1; }

demo: root build ## two containers share one simulated 16 GiB GPU
	@$(VENV_PYTHON) -m demo

playground: root build ## a shell with a simulated GPU, gpushare and docker: docs/tour.md
	@packaging/bootstrap playground
	@$(VENV_PYTHON) -m demo.playground

pictures: root build ## draw the pictures of README.md again, from the output of the programs
	@$(VENV_PYTHON) tools/architecture.py
	@PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.pictures

newcomer: root build packages ## time what README.md tells a new user: the demo, then the .deb in a clean Debian 12 and 13; NEWCOMER_ARGS=--help
	@packaging/bootstrap debian
	@$(VENV_PYTHON) -m tools.newcomer $(NEWCOMER_ARGS)

# With the bundle: both ways in, every engine there is, command lines and refusals.
DIST_TESTS := $(addprefix tests/integration/,test_runtime.py test_runtime_calls.py test_engines.py test_cli.py test_doctor.py test_refused.py test_start.py)

# Three workers for two processors, since a test that starts containers waits for most of its time: tests/support/turns.py
# decides which tests run in parallel. WORKERS=0: one process, one test after the other.
WORKERS := 3
SIDE_BY_SIDE := --numprocesses $(WORKERS) --dist loadscope

.PHONY: say-test
say-test:
	@echo "make test runs every test: about 20 minutes on two cores, longer the first time. \`make test PYTEST_ARGS='-k NAME'\` selects."

test: root say-test build gpu-programs dist $(TEST_SETUP) ## the linters and every test; installs the engines that they start
	@tools/lint & lint=$$!; \
	$(VENV_PYTHON) -m pytest -q $(SIDE_BY_SIDE) --programs $(DIST) $(DIST_TESTS) || { wait $$lint || true; exit 1; }; \
	wait $$lint
	@$(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-all: root build ## every test in its long form, for hours, or PARTS="attacks kills"; logs and a summary in build/test-all
	@$(VENV_PYTHON) -m tools.everything $(PARTS)

MATRIX ?= build/matrix
matrix: root $(SETUP) ## the tests in a root with another release, SUITE=bookworm, trixie or sid; PARTS="lint unit"; kept in MATRIX (build/matrix)
	@packaging/bootstrap matrix
	@$(VENV_PYTHON) -m tools.matrix --folder "$(MATRIX)" $(if $(RECORD),--record) $(or $(SUITE),all) $(PARTS)

matrix-vm: root build packages ## containers and units in a virtual machine with systemd, SUITE=sid; installs the .deb; CGROUP=1: device rules on cgroup v1
	@packaging/bootstrap matrix
	@$(VENV_PYTHON) -m tools.matrix_vm --folder "$(MATRIX)" $(if $(RECORD),--record) $(if $(CGROUP),--cgroup $(CGROUP)) $(SUITE)

pythons: build $(TEST_SETUP) ## the unit tests with each Python 3.9 or newer of PATH and pyenv; PYTHONS="/usr/bin/python3.13" selects
	@$(VENV_PYTHON) -m tools.pythons $(if $(RECORD),--record) $(PYTHONS)

test-elsewhere: root ## tests from clones below /tmp, at a long path and behind a symbolic link
	@tools/elsewhere

test-dist: root build dist $(TEST_SETUP) ## every end-to-end test with the programs of the bundle
	@$(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) --programs $(DIST) tests/integration $(PYTEST_ARGS)

test-attacks: root build dist $(TEST_SETUP) ## every attack on the host, by both ways in: table and build/attacks.json (ATTACK_ARGS="--runtime crun")
	@$(VENV_PYTHON) -m tests.security $(ATTACK_ARGS)

KILL_TESTS := $(addprefix tests/integration/,test_lifecycle.py test_adopt.py test_adopt_mask.py test_release.py test_kill_points.py test_agent_killed.py) tests/shim/test_agent_killed.py
# Each test in so many parts, for the workers; what was survived is in build/kills, so an interrupted run goes on there.
KILL_PARTS := 12
test-kills: root build $(TEST_SETUP) ## kill -9 at every point of starts and ends, where make test takes some of them
	@GPUSHARE_EVERY_POINT=$(KILL_PARTS) $(VENV_PYTHON) -m pytest --timeout 3600 -k killed $(KILL_TESTS) $(SIDE_BY_SIDE) $(PYTEST_ARGS)
	@GPUSHARE_EVERY_POINT=$(KILL_PARTS) $(VENV_PYTHON) -m tests.support.kills

test-models: root build $(TEST_SETUP) ## limits, and the simulator's behaviour, with each GPU model that it can imitate
	@GPUSHARE_MODELS=all $(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) tests/conformance tests/integration/test_capacity.py $(PYTEST_ARGS)

test-aarch64: root build $(TEST_SETUP) ## the snapshot for aarch64, cross-compiled, under qemu-user
	@$(VENV_PYTHON) -m pytest tests/integration/check_aarch64.py $(PYTEST_ARGS)

test-recipes: root build packages ## recipes with the programs of clean Debian systems: Slurm, JupyterHub, docker with CDI, Dev Containers
	@packaging/bootstrap debian
	@$(VENV_PYTHON) -m pytest --timeout 1800 -o python_files='check_*.py' tests/recipes $(PYTEST_ARGS)

test-clients: root build ## cuda-bindings 13, numba-cuda and CuPy over the simulated driver; downloads 400 MB
	@$(VENV_PYTHON) -m pytest tests/shim/check_clients.py $(PYTEST_ARGS)

# They count the instructions of the shim that is shipped.
NOT_SANITIZED := --deselect tests/shim/test_compute_cost.py::test_prepaid_launch_costs_few_instructions
test-asan: root build shim-asan $(TEST_SETUP) ## every test of the shim over its build with AddressSanitizer and UBSan
	@GPUSHARE_TEST_SHIM=shim-asan $(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) $(NOT_SANITIZED) tests/shim tests/fuzz $(PYTEST_ARGS)

test-tsan: root build ## threads, processes and forks over the shim with ThreadSanitizer, for SECONDS (60)
	@$(VENV_PYTHON) -m tests.shim.sanitized --seconds $(SECONDS)

fuzz: root build $(TEST_SETUP) ## fuzz all that reads untrusted bytes, or TARGET=name, SECONDS (60) each; finds go to build/fuzz/found
	@$(MAKE) --no-print-directory -j$(shell nproc) fuzz-programs
	@$(VENV_PYTHON) -m tests.fuzz --seconds $(SECONDS) $(TARGET)

# Generated files that cppcheck reads
lint check format: $(LAUNCHER_TABLES) build/shim/gen/cuda/symbols.h

lint: $(SETUP) ## ruff, mypy --strict, clang-format, cppcheck, shellcheck, codespell, names that must not be committed
	@tools/lint

check: $(SETUP) ## all static checks: lint, and gcc -fanalyzer through the shim and the launchers
	@$(MAKE) --no-print-directory -j$(shell nproc) shim-analyzed $(LAUNCHERS_ANALYZED)
	@tools/lint

check-headers: $(SETUP) ## compare shim/symbols.tsv with the newest CUDA headers of the package index
	@PYTHONPATH=. $(VENV_PYTHON) -m tools.check_headers

format: $(SETUP) ## rewrite Python and C files in the house format
	@tools/lint --fix

bench: root build shim_bench start_bench vt dist ## measure; prints a table and writes build/bench.json
	@$(VENV_PYTHON) -m bench.bench

MINUTES ?= 10
soak: root build ## starts, kills and crowds for MINUTES, then nothing may be left; writes build/soak.json
	@$(VENV_PYTHON) -m tests.soak --minutes $(MINUTES)

gpu-check: ## does gpushare work on this machine's GPU? in 2 minutes; GPU_ARGS=--all measures everything in 6
	@tests/hardware/start $(GPU_ARGS)

dist: $(ARCHIVE) ## make build/dist: programs that need no Python on the host, and an archive of them

docs: docs/config.md docs/cli.md docs/hardware.md docs/compute.md docs/attacks.md docs/dialects.md docs/backends.md docs/metrics.md docs/troubleshooting.md docs/versions.md hook/gpushare/request/dialects/triggers.py ## write the generated pages of docs/

docs/config.md: hook/gpushare/config/keys.py tools/config_docs.py
	$(VENV_PYTHON) tools/config_docs.py >$@.new && mv $@.new $@

docs/dialects.md: hook/gpushare/request/dialects/registry.py tools/dialect_docs.py
	$(VENV_PYTHON) tools/dialect_docs.py >$@.new && mv $@.new $@

docs/backends.md: $(shell find hook/gpushare/allocation/backends -name '*.py') tools/backend_docs.py
	$(VENV_PYTHON) tools/backend_docs.py >$@.new && mv $@.new $@

docs/metrics.md: hook/gpushare/cli/metrics.py tools/metrics_docs.py
	$(VENV_PYTHON) tools/metrics_docs.py >$@.new && mv $@.new $@

docs/troubleshooting.md: $(shell find hook/gpushare -name '*.py') $(wildcard hook/launcher/*.c shim/*/*.c) tools/error_docs.py tools/error_texts.py
	PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.error_docs >$@.new && mv $@.new $@

docs/versions.md: tools/matrix_docs.py $(wildcard tests/matrix/*.json)
	$(VENV_PYTHON) -m tools.matrix_docs >$@.new && mv $@.new $@

hook/gpushare/request/dialects/triggers.py: hook/gpushare/request/dialects/registry.py tools/dialect_docs.py
	$(VENV_PYTHON) tools/dialect_docs.py --triggers >$@.new && mv $@.new $@

# Sources of both pages
CLI_PAGES := $(wildcard hook/gpushare/cli/*.py) hook/gpushare/doctor/__init__.py hook/gpushare/core/errors.py \
    tools/commands.py tools/config_docs.py

docs/cli.md: tools/cli_docs.py $(CLI_PAGES)
	PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.cli_docs >$@.new && mv $@.new $@

man: build/man/.complete ## write the manual pages to build/man

build/man/.complete: tools/man_pages.py $(CLI_PAGES) $(SETUP)
	PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.man_pages build/man
	@touch $@

site: $(DOCS_SETUP) ## write the pages of docs/ as a web site to build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs --quiet build --strict --clean --config-file packaging/mkdocs.yml
	@echo build/site/index.html

sizes: dist ## write docs/sizes.md: what the bundle has, and how large it is
	@$(VENV_PYTHON) tools/sizes.py >docs/sizes.md.new && mv docs/sizes.md.new docs/sizes.md

docs/hardware.md: tests/hardware/docs.py tests/hardware/checks.py tests/hardware/assumptions.py $(wildcard tests/hardware/measured/*)
	PYTHONPATH=. $(VENV_PYTHON) -m tests.hardware.docs >$@.new && mv $@.new $@

docs/compute.md: tests/limiter/docs.py tests/limiter/matrix.py tests/limiter/misses.json tests/limiter/figures.json tests/limiter/ablation.json
	PYTHONPATH=. $(VENV_PYTHON) -m tests.limiter.docs

docs/attacks.md: tests/security/docs.py tests/security/table.py
	PYTHONPATH=. $(VENV_PYTHON) -m tests.security.docs >$@.new && mv $@.new $@

clean: ## remove build/
	rm -rf build
