# build/libexec/snapshot: hook/snapshot/make. Where it cannot be made there is none, and the build goes on (SNAPSHOT=no).
SNAPSHOT ?= yes
SNAPSHOT_MADE := build/snapshot/.$(SNAPSHOT)

$(SNAPSHOT_MADE): $(wildcard hook/snapshot/*) $(shell find hook/gpushare -name '*.py') tools/train.py | $(SETUP) $(PROGRAMS) $(LAUNCHERS) shim sim simhost
	@mkdir -p $(@D) build/libexec && rm -f build/snapshot/.yes build/snapshot/.no build/libexec/snapshot
	@[ "$(SNAPSHOT)" = no ] || hook/snapshot/make "$(PYTHON)" $(@D) build/libexec/snapshot || [ $$? = 1 ]
	@touch $@
