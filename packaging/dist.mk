# The bundle for hosts without Python: build/dist/gpushare, and the same as a tar archive with its checksum.

DIST := build/dist/gpushare
DIST_VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DIST_NAME = gpushare-$(DIST_VERSION)-linux-x86_64
DIST_SOURCES := $(shell find hook/gpushare -name '*.py') $(wildcard config/*.*) packaging/gpushare.spec packaging/pack

# Everything that is dated has the time of the last commit: two builds of one commit are the same bytes.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

build/dist/boot: hook/launcher/boot.c hook/launcher/launcher.mk | $(SETUP)
	@mkdir -p $(@D)
	$(LAUNCHER_CC) $(LAUNCHER_CFLAGS) $(LAUNCHER_LDFLAGS) -o $@.new $<
	@mv $@.new $@

build/.setup-dist: $(SETUP) packaging/bootstrap
	@packaging/bootstrap dist
	@packaging/venv "$(PYTHON)" package
	@touch $@

# WITH=kubernetes: also what gpushare k8s-plugin needs. The bundle of the plugin's image has it in any case.
export WITH ?=
build/dist/.with: .FORCE
	@mkdir -p $(@D)
	@[ "$$(cat $@ 2>/dev/null)" = "$(WITH)" ] && [ -f $@ ] || echo "$(WITH)" >$@
.PHONY: .FORCE

# The archive's files have one owner, one order, one time and modes that no umask decides.
IN_DIST := build/.setup-dist build/dist/boot $(LAUNCHERS) $(SHIM_RELEASE_x86_64) build/man/.complete $(DIST_SOURCES) packaging/dist.mk
$(DIST)/.complete: $(IN_DIST) build/dist/.with
	@rm -rf $(DIST)
	build/venv/bin/pyinstaller --noconfirm --log-level WARN --distpath build/dist --workpath build/dist/work packaging/gpushare.spec
	tar -C build/dist --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$$SOURCE_DATE_EPOCH" --mode=u=rwX,go=rX \
	    --transform 's,^gpushare,$(DIST_NAME),S' --exclude=.complete -c gpushare | gzip -9n >build/dist/$(DIST_NAME).tar.gz.new
	@mv build/dist/$(DIST_NAME).tar.gz.new build/dist/$(DIST_NAME).tar.gz
	@cd build/dist && sha256sum $(DIST_NAME).tar.gz >$(DIST_NAME).tar.gz.sha256
	@touch $@
	@echo "build/dist/$(DIST_NAME).tar.gz"

PLUGIN := build/plugin/gpushare
$(PLUGIN)/.complete: $(IN_DIST)
	@rm -rf $(PLUGIN)
	WITH=kubernetes build/venv/bin/pyinstaller --noconfirm --log-level WARN --distpath build/plugin --workpath build/plugin/work packaging/gpushare.spec
	@touch $@
