# What is handed out, in build/packages: the archive, wheels, .deb, .rpm, the shim for other machines, and the context of
# the image that installs gpushare on the nodes of a cluster.

PACKAGES := build/packages
STAGE := build/stage
WHEELS := $(foreach machine,$(SHIM_MACHINES),build/wheel/$(machine)/.complete)

.PHONY: packages test-packages
packages: $(PACKAGES)/SHA256SUMS ## make build/packages: archive, wheels, .deb, .rpm, image for Kubernetes

# The launchers of a wheel have their Python beside them, under another name.
WHEEL_CFLAGS := $(LAUNCHER_CFLAGS) '-DPYTHON_PROGRAM="%s/%s.py"'
WHEEL_CC_x86_64 = $(CC)
WHEEL_CC_aarch64 = $(SHIM_ZIG) -target aarch64-linux-musl
define wheel_launchers
build/wheel/$(1)/gpushare-runtime build/wheel/$(1)/gpushare-hook: $(LAUNCHER_SOURCES) $(LAUNCHER_TABLES) packaging/packages.mk build/.setup-dist
	@mkdir -p $$(@D)
	$$(WHEEL_CC_$(1)) $$(WHEEL_CFLAGS) -DIS_HOOK=$$(if $$(filter %-hook,$$@),1,0) $$(LAUNCHER_LDFLAGS) -Wl,-s -o $$@.new $$(LAUNCHER_SOURCES)
	@mv $$@.new $$@

build/wheel/$(1)/.complete: build/wheel/$(1)/gpushare-runtime build/wheel/$(1)/gpushare-hook $$(SHIM_RELEASE_$(1)) \
    $(DIST_SOURCES) packaging/wheel.py $(wildcard packaging/wheel/*) pyproject.toml README.md LICENSE
	@rm -f build/wheel/$(1)/*.whl
	GPUSHARE_WHEEL_MACHINE=$(1) build/venv/bin/hatchling build -t wheel -d build/wheel/$(1)
	@touch $$@
endef
$(foreach machine,$(SHIM_MACHINES),$(eval $(call wheel_launchers,$(machine))))

$(STAGE)/.complete: $(DIST)/.complete packaging/stage packaging/config.yaml packaging/copyright CHANGELOG.md LICENSE \
    packaging/60-gpushare.rules $(wildcard packaging/systemd/*)
	@packaging/stage $(DIST) $(STAGE)
	@touch $@

$(PACKAGES)/SHA256SUMS: $(STAGE)/.complete $(WHEELS) packaging/nfpm.yaml $(wildcard packaging/scripts/*) packaging/packages.mk
	@rm -rf $(PACKAGES) && mkdir -p $(PACKAGES)
	@cp build/dist/$(DIST_NAME).tar.gz $(foreach machine,$(SHIM_MACHINES),build/wheel/$(machine)/*.whl) $(PACKAGES)
	VERSION=$(DIST_VERSION) STAGE=$(STAGE) packaging/nfpm $(PACKAGES)
	@cd $(PACKAGES) && sha256sum * >SHA256SUMS
	@cd $(PACKAGES) && ls -l --human-readable
