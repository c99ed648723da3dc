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
# The set-up alone, since it brings the headers; then everything else by all processors
PARALLEL = $(MAKE) --no-print-directory setup && $(MAKE) --no-print-directory -j$(shell nproc)
PYTEST_ARGS ?=

# Of make fuzz, for each target, and of test-tsan
SECONDS ?= 60

.PHONY: help setup build built demo playground pictures newcomer dist unit quick planted test test-all matrix matrix-vm engines pythons test-elsewhere test-attacks test-kills test-recipes test-clients test-models test-aarch64 test-asan test-tsan test-dist fuzz check check-headers lint format bench gpu-check docs man site sizes clean root

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

# Programs that tests run: `make -q built` fails if an edit is newer (tests/support/host.py)
built: shim sim $(PROGRAMS) $(SNAPSHOT_MADE) $(LAUNCHERS)

build: $(SETUP) built simhost build/bin/gpushare-runtime-cri ## build the shim, the simulated driver and the programs
	@[ ! -t 1 ] || [ "$${TERM:-dumb}" = dumb ] || printf '\r\033[K'

$(PROGRAMS): packaging/program $(SETUP)
	@mkdir -p $(@D)
	@packaging/program "$(PYTHON)" $(@F) >$@.new
	@chmod 755 $@.new && mv $@.new $@

root:
	@[ "$$(id -u)" = 0 ] || { echo "gpushare: this starts containers, so it needs root: sudo make $(MAKECMDGOALS)" >&2; exit 1; }

demo: root ## two containers share one simulated 16 GiB GPU
	@$(PARALLEL) build
	@$(VENV_PYTHON) -m demo

playground: root ## a shell with a simulated GPU, gpushare and docker: docs/tour.md
	@$(PARALLEL) build
	@packaging/bootstrap playground
	@$(VENV_PYTHON) -m demo.playground

pictures: root build ## draw the pictures of README.md again, from the output of the programs
	@$(VENV_PYTHON) tools/architecture.py
	@PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.pictures

newcomer: root build packages ## time what README.md tells a new user: the demo, then the .deb in a clean Debian 12 and 13; NEWCOMER_ARGS=--help
	@packaging/bootstrap debian
	@$(VENV_PYTHON) -m tools.newcomer $(NEWCOMER_ARGS)

# The bundle differs from the tree in how a program is started: one start by each engine of this machine, the command
# line, the checks. make test-dist has the rest.
SMOKE := $(addprefix tests/integration/,test_start.py test_cli.py test_doctor.py test_engines.py) \
    -k "not test_engines or test_limit_is_visible and not newest and not trixie"

# Three workers for two processors, since a test that starts containers waits for most of its time: tests/support/turns.py
# decides which tests run in parallel. WORKERS=0: one process, one test after the other.
WORKERS := 3
SIDE_BY_SIDE := --numprocesses $(WORKERS) --dist loadscope
# Built by all processors, before the tests whose time limits it would use up
TEST_PARTS := build gpu-programs dist shim-asan shim-tsan shim_bench fuzz-programs vt $(TEST_SETUP)

.PHONY: say-test test-parts
say-test:
	@echo "make test runs every test in its short form: about 8 minutes on two cores, longer the first time. \`make test PYTEST_ARGS='-k NAME'\` selects."

# Not in `make unit`: tests that need what only `make test` installs or downloads, or that take long.
NOT_UNIT := $(addprefix --ignore=tests/unit/,test_cli_errors.py test_completion.py test_helm.py test_packaging.py test_rbac.py) \
    $(addprefix --deselect=tests/unit/,test_cli_docs.py::test_groff_prints_no_warnings test_cli_docs.py::test_manual_page_names_are_found_by_apropos \
    test_cli_docs.py::test_man_renders_sections test_configure.py::test_dry_run_changes_nothing_and_prints_patch \
    test_driverchoice.py::test_real_program_has_the_version_in_it test_driverfiles.py::test_real_driver_is_found_completely)
# Left to `make quick`, since they take longest
SLOW_UNIT := $(addprefix --ignore=tests/unit/,test_cli_top.py test_dra_hostile.py test_english.py test_eviction.py \
    test_kubelet_offers.py test_kubernetes.py test_launcher.py test_limit_update_killed.py)
# The tests that notice most planted faults (tests/planted)
QUICK := tests/golden $(addprefix tests/,integration/test_apply.py integration/test_apply_devices.py integration/test_cgroup_lock_warmup.py \
    integration/test_runtime.py integration/test_runtime_calls.py shim/test_processes.py shim/test_shared_memory.py)

unit: root $(SETUP) shim sim $(PROGRAMS) $(LAUNCHERS) ## the unit tests, in 90 s: after each edit
	@$(VENV_PYTHON) -m pytest -q $(SIDE_BY_SIDE) -m "not long" tests/unit $(NOT_UNIT) $(SLOW_UNIT) $(PYTEST_ARGS)

quick: root build gpu-programs ## unit tests, golden texts, and the tests that notice most faults, in 3 minutes
	@$(VENV_PYTHON) -m pytest -q $(SIDE_BY_SIDE) -m "not long" tests/unit $(NOT_UNIT) $(QUICK) $(PYTEST_ARGS)

planted: root build gpu-programs dist $(TEST_SETUP) ## plant faults in a copy of the tree: does a test notice each? PLANTED="shim/ NAME" selects
	@$(VENV_PYTHON) -m tests.planted $(PLANTED)

test-parts: $(TEST_PARTS)

test: root say-test ## the linters and every test in its short form; installs the engines that they start
	@VENV_EXTRAS="docs package" $(PARALLEL) test-parts
	@tools/lint & lint=$$!; \
	$(VENV_PYTHON) -m pytest -q $(SIDE_BY_SIDE) --programs $(DIST) -m "not long" $(SMOKE) || { wait $$lint || true; exit 1; }; \
	wait $$lint
	@$(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) -m "not long" $(PYTEST_ARGS)

test-costs: root $(TEST_PARTS) ## measure the processor time of every test, for hours: decides which tests make test omits
	@VENV_EXTRAS="docs package" $(VENV_PYTHON) -m pytest -q --record-costs $(PYTEST_ARGS)

test-all: root build ## every test in its long form, for hours, or PARTS="attacks kills"; logs and a summary in build/test-all
	@$(VENV_PYTHON) -m tools.everything $(PARTS)

MATRIX ?= build/matrix
matrix: root $(SETUP) ## the tests in a root with another release, SUITE=bookworm, trixie or sid; PARTS="lint unit"; kept in MATRIX (build/matrix)
	@packaging/bootstrap matrix
	@$(VENV_PYTHON) -m tools.matrix --folder "$(MATRIX)" $(if $(RECORD),--record) $(or $(SUITE),all) $(PARTS)

matrix-vm: root build packages ## containers and units in a virtual machine with systemd, SUITE=sid; installs the .deb; CGROUP=1: device rules on cgroup v1
	@packaging/bootstrap matrix
	@$(VENV_PYTHON) -m tools.matrix_vm --folder "$(MATRIX)" $(if $(RECORD),--record) $(if $(CGROUP),--cgroup $(CGROUP)) $(SUITE)

CLUSTER_SETUP := build/.setup-cluster
$(CLUSTER_SETUP): packaging/bootstrap $(TEST_SETUP)
	@packaging/bootstrap cluster
	@touch $@

cluster: root build dist $(PLUGIN)/.complete $(CLUSTER_SETUP) ## one node of a real Kubernetes cluster, from the binaries in KUBE=DIR; CONTAINERD=1.7, CRIO=DIR, CHECKS="node dra"
	@$(VENV_PYTHON) -m tools.cluster --kube "$(KUBE)" $(if $(CONTAINERD),--containerd "$(CONTAINERD)") $(if $(CRIO),--crio "$(CRIO)") $(if $(RECORD),--record) $(CHECKS)

ENGINES ?=
engines: root build $(TEST_SETUP) ## the tests of engines with programs of other releases: ENGINES=DIR, with containerd, crio or dockerd in each DIR/NAME
	@$(VENV_PYTHON) -m tools.engines $(if $(RECORD),--record) "$(ENGINES)"

pythons: build $(TEST_SETUP) ## the unit tests with each Python 3.9 or newer of PATH and pyenv; PYTHONS="/usr/bin/python3.13" selects
	@$(VENV_PYTHON) -m tools.pythons $(if $(RECORD),--record) $(PYTHONS)

test-elsewhere: root ## tests from clones below /tmp, at a long path and behind a symbolic link
	@tools/elsewhere

test-dist: root build dist $(TEST_SETUP) ## every end-to-end test with the programs of the bundle
	@$(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) --programs $(DIST) tests/integration $(PYTEST_ARGS)

test-attacks: root build dist $(TEST_SETUP) ## every attack on the host, by both ways in: table and build/attacks.json (ATTACK_ARGS="--runtime crun")
	@$(VENV_PYTHON) -m tests.security $(ATTACK_ARGS)

KILL_TESTS := $(addprefix tests/integration/,test_lifecycle.py test_adopt.py test_adopt_mask.py test_release.py test_kill_points.py test_agent_killed.py test_suspend.py)
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
	@$(PARALLEL) fuzz-programs
	@$(VENV_PYTHON) -m tests.fuzz --seconds $(SECONDS) $(TARGET)

# Generated files that cppcheck reads
lint check format: $(LAUNCHER_TABLES) build/shim/gen/cuda/symbols.h

lint: $(SETUP) ## ruff, mypy --strict, clang-format, cppcheck, shellcheck, codespell, names that must not be committed
	@tools/lint

check: $(SETUP) ## all static checks: lint, and gcc -fanalyzer through the shim and the launchers
	@$(PARALLEL) shim-analyzed $(LAUNCHERS_ANALYZED)
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

docs: $(SETUP) ## write every generated file: pages of docs/, config/ (golden texts of tests: GOLDEN_WRITE=1)
	@PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.generated

CLI_PAGES := $(wildcard hook/gpushare/cli/*.py) hook/gpushare/doctor/__init__.py hook/gpushare/core/errors.py \
    tools/commands.py tools/config_docs.py

man: build/man/.complete ## write the manual pages to build/man

build/man/.complete: tools/man_pages.py $(CLI_PAGES) $(SETUP)
	PYTHONPATH=hook:. $(VENV_PYTHON) -m tools.man_pages build/man
	@touch $@

site: $(DOCS_SETUP) ## write the pages of docs/ as a web site to build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs --quiet build --strict --clean --config-file packaging/mkdocs.yml
	@echo build/site/index.html

sizes: dist ## write docs/sizes.md: what the bundle has, and how large it is
	@$(VENV_PYTHON) tools/sizes.py >docs/sizes.md.new && mv docs/sizes.md.new docs/sizes.md

clean: ## remove build/
	rm -rf build
