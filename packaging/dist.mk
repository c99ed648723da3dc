# The bundle for hosts without Python: build/dist/gpushare, and the same as a tar archive with its checksum.

DIST := build/dist/gpushare
DIST_VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DIST_NAME = gpushare-$(DIST_VERSION)-linux-x86_64
DIST_SOURCES := $(shell find hook/gpushare -name '*.py') $(wildcard config/*.*) packaging/gpushare.spec

# Everything that is dated has the time of the last commit: two builds of one commit are the same bytes.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

build/dist/boot: hook/launcher/boot.c hook/launcher/launcher.mk | $(SETUP)
	@mkdir -p $(@D)
	$(LAUNCHER_CC) $(LAUNCHER_CFLAGS) $(LAUNCHER_LDFLAGS) -o $@.new $<
	@mv $@.new $@

build/.setup-dist: $(SETUP) packaging/bootstrap README.md # which is in the metadata of what is installed
	@packaging/bootstrap dist
	@packaging/venv "$(PYTHON)" package
	@touch $@

# What no file's time tells: these are written when they would say something else than before, and only then.
SAYS = mkdir -p $(@D); [ -f $@ ] && [ "$$(cat $@)" = "$(1)" ] || echo "$(1)" >$@
# WITH=kubernetes: also what gpushare k8s-plugin needs. The bundle of the plugin's image has it in any case.
export WITH ?=
build/dist/.with: .FORCE
	@$(call SAYS,$(WITH))
# The date in archives and packages; the bundle has none in it
DATED := build/dist/.dated
$(DATED): .FORCE
	@$(call SAYS,$(SOURCE_DATE_EPOCH))
# Which modules there are: one that was removed is newer than nothing
build/dist/.names: .FORCE
	@$(call SAYS,$(sort $(DIST_SOURCES)))
.PHONY: .FORCE

IN_DIST := build/.setup-dist build/dist/boot $(LAUNCHERS) $(SNAPSHOT_MADE) $(SHIM_RELEASE_x86_64) build/man/.complete $(DIST_SOURCES) build/dist/.names packaging/dist.mk packaging/licences LICENSE
$(DIST)/.complete: $(IN_DIST) build/dist/.with
	@rm -rf $(DIST)
	build/venv/bin/pyinstaller --noconfirm --log-level WARN --distpath build/dist --workpath build/dist/work packaging/gpushare.spec
	@touch $@

# Its files have one owner, one order, one time and modes that no umask decides.
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
