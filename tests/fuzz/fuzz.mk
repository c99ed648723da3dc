# Fuzz targets in C: build/fuzz/NAME is tests/fuzz/c/NAME.c with the tested sources, libFuzzer, AddressSanitizer and UBSan.
# build/fuzz/liblauncher.so: the launcher's parsers, for the targets that compare them with Python's.

FUZZ_CC := clang
# `undefined` also checks that an indirect call matches the function's type; float-cast-overflow adds conversions out of range.
FUZZ_SANITIZE := -fsanitize=fuzzer,address,undefined,float-cast-overflow -fno-sanitize-recover=all
FUZZ_CFLAGS := -std=gnu11 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Werror -Wno-unused-variable -Wno-unused-const-variable \
	-Itests/fuzz/c -Ishim -Ihook/launcher -Ibuild/launcher -Ibuild/shim/gen/cuda -isystem $(CUDA_INCLUDE) -isystem build/zstd
FUZZ_WRAP := -Wl,--wrap=open -Wl,--wrap=nanosleep
FUZZ_FILES := tests/fuzz/c/files.c $(FUZZ_WRAP)

# target: the objects to link, besides the sources that it includes
FUZZ_WITH_image := $(addprefix shim/code/,image.c lz4.c ptx.c) build/shim/obj/cuda/zstd.o $(FUZZ_FILES)
FUZZ_WITH_ptx := shim/code/ptx.c
FUZZ_WITH_lz4 := shim/code/lz4.c
FUZZ_WITH_region := $(addprefix shim/core/,account.c now.c quota.c exports.c slot.c suspend.c) tests/fuzz/c/overhead.c $(FUZZ_FILES)
FUZZ_WITH_law := $(addprefix shim/core/,region.c account.c now.c quota.c exports.c slot.c suspend.c) $(wildcard shim/limiter/*.c) tests/fuzz/c/overhead.c $(FUZZ_FILES)
FUZZ_WITH_args := hook/launcher/args.c
FUZZ_WITH_scan := hook/launcher/scan.c
FUZZ_WITH_state := hook/launcher/state.c hook/launcher/scan.c
FUZZ_WITH_planted :=

FUZZ_TARGETS := $(patsubst FUZZ_WITH_%,%,$(filter FUZZ_WITH_%,$(.VARIABLES)))
FUZZ_PROGRAMS := $(addprefix build/fuzz/,$(sort $(FUZZ_TARGETS)))

.PHONY: fuzz-programs
fuzz-programs: $(FUZZ_PROGRAMS) build/fuzz/liblauncher.so

# Depend on all headers and sources: they change seldom, and all targets build in seconds.
$(FUZZ_PROGRAMS): build/fuzz/%: tests/fuzz/c/%.c $(wildcard tests/fuzz/c/*.[ch] shim/*/*.[ch] hook/launcher/*.[ch] tests/limiter/try.h) \
		$(LAUNCHER_TABLES) build/shim/gen/cuda/symbols.h build/shim/obj/cuda/zstd.o tests/fuzz/fuzz.mk | $(TEST_SETUP)
	@mkdir -p $(@D)
	$(FUZZ_CC) $(FUZZ_CFLAGS) $(FUZZ_SANITIZE) -o $@.new $< $(FUZZ_WITH_$*) -lpthread -lm -ldl
	@mv $@.new $@

build/fuzz/liblauncher.so: tests/fuzz/c/reading.c $(addprefix hook/launcher/,args.c scan.c state.c launcher.h) $(LAUNCHER_TABLES) tests/fuzz/fuzz.mk | $(SETUP)
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O1 -g -Wall -Wextra -Werror -Wno-unused-variable -shared -fPIC -Ihook/launcher -Ibuild/launcher \
		-o $@.new $(filter %.c,$^)
	@mv $@.new $@
