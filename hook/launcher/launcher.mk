# build/bin/gpushare-runtime and build/bin/gpushare-hook: one static C program, built twice (hook/launcher/launcher.h).
# build/bin/gpushare-runtime-cri: another name of the first, for engines that are a CRI.

LAUNCHERS := build/bin/gpushare-runtime build/bin/gpushare-hook
LAUNCHER_SOURCES := $(addprefix hook/launcher/,args.c cgroup_lock_warmup.c runtime_cache.c launcher.c scan.c state.c)
LAUNCHER_TABLES := build/launcher/launcher_tables.h
LAUNCHER_CFLAGS := -std=gnu11 -O2 -g -Wall -Wextra -Wshadow -Werror -fstack-protector-strong -Ibuild/launcher -Wno-unused-variable -ffile-prefix-map=$(CURDIR)=.
LAUNCHERS_ANALYZED := $(LAUNCHERS:build/bin/%=build/launcher/analyzed/%)
# Static: it starts in a third of the time, and on any distribution. With musl: glibc asks the processor for the sizes of
# its caches before main, and in a virtual machine each such question goes to the hypervisor (0.3 ms of a start's 0.4).
# Asked of the compiler where it is used: make installs it first.
LAUNCHER_CC = musl-gcc -idirafter /usr/include -idirafter /usr/include/$(or $(shell $(CC) -print-multiarch 2>/dev/null),$(shell gcc -print-multiarch))
LAUNCHER_LDFLAGS := -static -Wl,-z,relro -Wl,-z,now

$(LAUNCHER_TABLES): hook/launcher/tables.py $(shell find hook/gpushare -name '*.py') | $(SETUP)
	@mkdir -p $(@D)
	$(PYTHON) -B hook/launcher/tables.py >$@.new
	@cmp -s $@.new $@ && rm $@.new && touch $@ || mv $@.new $@

# Those of make check: gcc looks through them
$(LAUNCHERS_ANALYZED): LAUNCHER_CFLAGS += -fanalyzer
%/gpushare-runtime: LAUNCHER_IS_HOOK := 0
%/gpushare-hook: LAUNCHER_IS_HOOK := 1
$(LAUNCHERS) $(LAUNCHERS_ANALYZED): $(LAUNCHER_SOURCES) hook/launcher/launcher.h $(LAUNCHER_TABLES) hook/launcher/launcher.mk | $(SETUP)
	@mkdir -p $(@D)
	$(LAUNCHER_CC) $(LAUNCHER_CFLAGS) -DIS_HOOK=$(LAUNCHER_IS_HOOK) $(LAUNCHER_LDFLAGS) -o $@.new $(LAUNCHER_SOURCES)
	@mv $@.new $@

build/bin/gpushare-runtime-cri: build/bin/gpushare-runtime
	@ln -sfn gpushare-runtime $@
