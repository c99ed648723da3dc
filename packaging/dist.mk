# The bundle for hosts without Python: build/dist/gpushare, and a tar archive of it with its checksum.

DIST := build/dist/gpushare
DIST_VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DIST_NAME = gpushare-$(DIST_VERSION)-linux-x86_64
DIST_SOURCES := $(shell find hook/gpushare -name '*.py') $(wildcard config/*.*) packaging/gpushare.spec

# All timestamps are the time of the last commit, so that two builds of one commit are identical.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

build/dist/boot: hook/launcher/boot.c hook/launcher/launcher.mk | $(SETUP)
	@mkdir -p $(@D)
	$(LAUNCHER_CC) $(LAUNCHER_CFLAGS) $(LAUNCHER_LDFLAGS) -o $@.new $<
	@mv $@.new $@

build/.setup-dist: $(SETUP) packaging/bootstrap README.md # README.md is part of the installed metadata
	@packaging/bootstrap dist
	@packaging/venv "$(PYTHON)" package
	@touch $@

# Prerequisites that are no files (variables, a list of names): each is stored in a file, which is written only when its
# content changes.
STORE = mkdir -p $(@D); [ -f $@ ] && [ "$$(cat $@)" = "$(1)" ] || echo "$(1)" >$@
# WITH=kubernetes: include what gpushare k8s-plugin needs. The bundle of the plugin's image always includes it.
export WITH ?=
build/dist/.with: .FORCE
	@$(call STORE,$(WITH))
# The date in archives and packages; the bundle contains no date
DATED := build/dist/.dated
$(DATED): .FORCE
	@$(call STORE,$(SOURCE_DATE_EPOCH))
# The list of modules: make would not notice that a module was removed
build/dist/.names: .FORCE
	@$(call STORE,$(sort $(DIST_SOURCES)))
.PHONY: .FORCE

IN_DIST := build/.setup-dist build/dist/boot $(LAUNCHERS) $(SNAPSHOT_MADE) $(SHIM_RELEASE_x86_64) build/man/.complete $(DIST_SOURCES) build/dist/.names packaging/dist.mk packaging/licences LICENSE
$(DIST)/.complete: $(IN_DIST) build/dist/.with
	@rm -rf $(DIST)
	build/venv/bin/pyinstaller --noconfirm --log-level WARN --distpath build/dist --workpath build/dist/work packaging/gpushare.spec
	@touch $@

# Owner, order, time and modes of its files are fixed, so that the archive is reproducible.
ARCHIVE := build/dist/$(DIST_NAME).tar.gz
$(ARCHIVE): $(DIST)/.complete $(DATED)
	@rm -f build/dist/gpushare-*.tar.gz*
	tar -C build/dist --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$$SOURCE_DATE_EPOCH" --mode=u=rwX,go=rX \
	    --transform 's,^gpushare,$(DIST_NAME),S' --exclude=.complete -c gpushare | gzip -9n >$@.new
	@mv $@.new $@
	@cd $(@D) && sha256sum $(@F) >$(@F).sha256
	@echo "$@"

PLUGIN := build/plugin/gpushare
$(PLUGIN)/.complete: $(IN_DIST)
	@rm -rf $(PLUGIN)
	WITH=kubernetes build/venv/bin/pyinstaller --noconfirm --log-level WARN --distpath build/plugin --workpath build/plugin/work packaging/gpushare.spec
	@touch $@
