# The released files, in build/packages: the archive, wheels, .deb, .rpm, and for a cluster the contexts of two images
# (installer and device plugin) and a Helm chart.

# make packages REGISTRY=HOST/FOLDER: the manifests in .deb and .rpm name the images there. MAINTAINER and HOMEPAGE are
# fields of these packages.
export REGISTRY ?=
export MAINTAINER ?=
export HOMEPAGE ?=
build/dist/.registry: .FORCE
	@$(call STORE,$(REGISTRY) $(MAINTAINER) $(HOMEPAGE))

PACKAGES := build/packages
STAGE := build/stage
WHEELS := $(foreach machine,$(SHIM_MACHINES),build/wheel/$(machine)/.complete)

.PHONY: packages repo test-packages
packages: $(PACKAGES)/SHA256SUMS ## make build/packages: archive, wheels, .deb, .rpm, images for Kubernetes

# The launchers of a wheel start gpushare-hook.py and gpushare-runtime.py beside them.
WHEEL_CFLAGS := $(LAUNCHER_CFLAGS) '-DPYTHON_PROGRAM="%s/%s.py"' '-DSNAPSHOT="%s/../libexec/gpushare/snapshot"'
WHEEL_CC_x86_64 = $(LAUNCHER_CC)
WHEEL_CC_aarch64 = $(SHIM_ZIG) -target aarch64-linux-musl
define wheel_launchers
build/wheel/$(1)/gpushare-runtime build/wheel/$(1)/gpushare-hook: $(LAUNCHER_SOURCES) $(LAUNCHER_TABLES) packaging/packages.mk build/.setup-dist
	@mkdir -p $$(@D)
	$$(WHEEL_CC_$(1)) $$(WHEEL_CFLAGS) -DIS_HOOK=$$(if $$(filter %-hook,$$@),1,0) $$(LAUNCHER_LDFLAGS) -Wl,-s -o $$@.new $$(LAUNCHER_SOURCES)
	@mv $$@.new $$@

build/wheel/$(1)/gpushare-runtime-cri: build/wheel/$(1)/gpushare-runtime
	@cp $$< $$@

build/wheel/$(1)/.complete: build/wheel/$(1)/gpushare-runtime build/wheel/$(1)/gpushare-runtime-cri build/wheel/$(1)/gpushare-hook $$(SHIM_RELEASE_$(1)) \
    $(SNAPSHOT_MADE) $(DIST_SOURCES) build/dist/.names $(DATED) packaging/wheel.py packaging/licences $(wildcard packaging/wheel/*) pyproject.toml README.md LICENSE
	@rm -f build/wheel/$(1)/*.whl
	GPUSHARE_WHEEL_MACHINE=$(1) build/venv/bin/hatchling build -t wheel -d build/wheel/$(1)
	@touch $$@
endef
$(foreach machine,$(SHIM_MACHINES),$(eval $(call wheel_launchers,$(machine))))

$(STAGE)/.complete: $(DIST)/.complete $(DATED) packaging/stage packaging/config.yaml packaging/copyright CHANGELOG.md LICENSE \
    packaging/60-gpushare.rules $(wildcard packaging/systemd/* packaging/metrics/*) README.md README.zh-CN.md \
    $(shell find docs config packaging/kubernetes packaging/helm -type f) build/dist/.registry
	@packaging/stage $(DIST) $(STAGE)
	@touch $@

# Owner, order, time and modes of files are fixed, so that archives are reproducible
TAR := tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$$SOURCE_DATE_EPOCH" --exclude=.complete
INSTALLER := packaging/kubernetes/installer
PLUGIN_IMAGE := packaging/kubernetes/plugin

$(PACKAGES)/SHA256SUMS: $(ARCHIVE) $(STAGE)/.complete $(WHEELS) packaging/nfpm packaging/nfpm.yaml $(wildcard packaging/scripts/*) \
    $(INSTALLER)/Dockerfile $(INSTALLER)/install.py $(PLUGIN)/.complete $(PLUGIN_IMAGE)/Dockerfile packaging/packages.mk
	@rm -rf $(PACKAGES) && mkdir -p $(PACKAGES)
	@cp $(ARCHIVE) $(foreach machine,$(SHIM_MACHINES),build/wheel/$(machine)/*.whl) $(PACKAGES)
	VERSION=$(DIST_VERSION) STAGE=$(STAGE) packaging/nfpm $(PACKAGES)
	$(TAR) -C $(INSTALLER) -c Dockerfile install.py -C $(abspath build/dist) gpushare | \
	    gzip -9n >$(PACKAGES)/gpushare-installer-$(DIST_VERSION).tar.gz
	$(TAR) -C $(PLUGIN_IMAGE) -c Dockerfile -C $(abspath build/plugin) gpushare | \
	    gzip -9n >$(PACKAGES)/gpushare-plugin-$(DIST_VERSION).tar.gz
	$(TAR) -C packaging/helm --dereference -c gpushare | gzip -9n >$(PACKAGES)/gpushare-chart-$(DIST_VERSION).tgz
	@cd $(PACKAGES) && sha256sum * >SHA256SUMS
	@cd $(PACKAGES) && ls -l --human-readable

# KEY: of gpg's keyring; URL: where the folder will be served
export KEY ?=
export URL ?=
repo: $(PACKAGES)/SHA256SUMS ## make build/repo for apt and dnf, signed with KEY=FINGERPRINT, to be served at URL=https://...
	@packaging/bootstrap repo
	@packaging/repo $(PACKAGES) build/repo "$$KEY" "$$URL"

PACKAGES_SETUP := build/.setup-packages
$(PACKAGES_SETUP): packaging/bootstrap $(TEST_SETUP)
	@packaging/bootstrap packages
	@touch $@

# The simulated driver for aarch64, and the test program that allocates and frees memory with it. `stress` is linked
# with the newer C library of the Debian release in which make test-packages runs programs.
AARCH64 := build/aarch64
AARCH64_CC = $(SHIM_ZIG) -target aarch64-linux-gnu.2.36
AARCH64_ZSTD := build/shim-release/aarch64/obj/cuda/zstd.o
$(AARCH64)/sim/libcuda.so.1 $(AARCH64)/sim/libnvidia-ml.so.1 &: $(wildcard simulator/*.[ch] simulator/*/*.[ch]) $(AARCH64_ZSTD) build/.setup-dist
	$(MAKE) --no-print-directory -f simulator/sim.mk BUILD=$(AARCH64) CC='$(AARCH64_CC)' PYTHON='$(PYTHON)' \
	    CUDA_INCLUDE=$(CUDA_INCLUDE) NVML_INCLUDE=$(NVML_INCLUDE) SIM_ZSTD=$(AARCH64_ZSTD) \
	    $(AARCH64)/$(SIM_LIBCUDA:build/%=%) $(AARCH64)/$(SIM_LIBNVML:build/%=%)
	@ln -f $(AARCH64)/$(SIM_LIBCUDA:build/%=%) $(AARCH64)/sim/libcuda.so.1
	@ln -f $(AARCH64)/$(SIM_LIBNVML:build/%=%) $(AARCH64)/sim/libnvidia-ml.so.1

$(AARCH64)/stress: tests/shim/stress.c tests/shim/families.h tests/packages/robust.c $(AARCH64)/sim/libcuda.so.1
	$(AARCH64_CC) -O2 -rdynamic -Wall -Wextra -Werror -I$(CUDA_INCLUDE) -o $@ $(filter %.c %.so.1,$^) -ldl

# Packages of 0.1.0, to test the upgrade from them. They are built from a clone of this repository, which is kept.
FIRST_VERSION := 461939a
build/before/build/packages/.$(FIRST_VERSION):
	rm -rf build/before
	git clone --quiet --no-checkout . build/before && git -C build/before checkout --quiet $(FIRST_VERSION)
	$(MAKE) --no-print-directory -C build/before packages
	@touch $@

test-packages: root build packages build/before/build/packages/.$(FIRST_VERSION) $(PACKAGES_SETUP) $(AARCH64)/stress ## install, use, upgrade and remove each package; build all of them twice
	@$(VENV_PYTHON) -m tests.packages.cleanroot
	@$(VENV_PYTHON) -m pytest -o python_files='check_*.py' tests/packages $(PYTEST_ARGS)

release-check: root build ## what a release needs: one version everywhere, notes, current docs, packages that install and upgrade
	@$(VENV_PYTHON) -m tools.release
	@$(MAKE) --no-print-directory docs && git diff --exit-code --stat
	@$(MAKE) --no-print-directory test-packages PYTEST_ARGS="-k 'check_install or check_upgrade'"
