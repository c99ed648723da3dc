# The bundle for hosts without Python: build/dist/gpushare, and the same as a tar archive with its checksum.

DIST := build/dist/gpushare
DIST_VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DIST_NAME = gpushare-$(DIST_VERSION)-linux-x86_64
DIST_SOURCES := $(shell find hook/gpushare -name '*.py') $(wildcard config/*.*) packaging/gpushare.spec packaging/pack

build/dist/boot: hook/launcher/boot.c hook/launcher/launcher.mk | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(LAUNCHER_CFLAGS) $(LAUNCHER_LDFLAGS) -o $@.new $<
	@mv $@.new $@

build/.setup-dist: $(SETUP) packaging/bootstrap
	@packaging/bootstrap dist
	@packaging/venv "$(PYTHON)" package
	@touch $@

# The archive's files have one owner, one order and the time of the last commit.
$(DIST)/.complete: build/.setup-dist build/dist/boot $(LAUNCHERS) build/shim/libcuda.so build/shim/libnvidia-ml.so build/man/.complete $(DIST_SOURCES) packaging/dist.mk
	@rm -rf $(DIST)
	build/venv/bin/pyinstaller --noconfirm --log-level WARN --distpath build/dist --workpath build/dist/work packaging/gpushare.spec
	tar -C build/dist --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$$(git log -1 --format=%ct 2>/dev/null || echo 0)" \
	    --transform 's,^gpushare,$(DIST_NAME),S' -c gpushare | gzip -9n >build/dist/$(DIST_NAME).tar.gz.new
	@mv build/dist/$(DIST_NAME).tar.gz.new build/dist/$(DIST_NAME).tar.gz
	@cd build/dist && sha256sum $(DIST_NAME).tar.gz >$(DIST_NAME).tar.gz.sha256
	@touch $@
	@echo "build/dist/$(DIST_NAME).tar.gz"
