# The shim: build/shim/libcuda.so and build/shim/libnvidia-ml.so, and variants of both.
#
#   shim            system compiler, for development and tests
#   shim-asan       the same with AddressSanitizer and UBSan, in build/shim-asan
#   shim-tsan       the same with ThreadSanitizer, in build/shim-tsan
#   shim-release    what is handed out: against glibc 2.17, for each machine, in build/shim-release/<machine>
#   shim-analyzed   the same, looked through by gcc -fanalyzer for make check, in build/shim-analyzed
#
# A name that symbols.tsv calls intercepted and that has no wrapper fails the link.

# Lowest first: a folder includes and calls those before it (tools/shim_layers.py). Both libraries contain only the
# files that do not use CUDA.
SHIM_LAYERS := core limiter accounting oversubscription memory code launch driver
SHIM_COMMON := $(addprefix core/,account.c busy.c driver_count.c lending.c now.c overhead.c quota.c real.c region.c exports.c slot.c suspend.c)
SHIM_CUDA_SOURCES := $(patsubst shim/%,%,$(wildcard $(SHIM_LAYERS:%=shim/%/*.c)))
SHIM_NVML_SOURCES := $(SHIM_COMMON) $(patsubst shim/%,%,$(wildcard shim/nvml/*.c))

SHIM_CFLAGS := -std=gnu11 -O2 -g -fPIC -fvisibility=hidden -ftls-model=initial-exec -fno-semantic-interposition \
	-fstack-protector-strong -Wall -Wextra -Wshadow -Werror -MMD -MP
SHIM_LDFLAGS := -shared -Wl,--hash-style=both -Wl,-Bsymbolic -Wl,-z,defs -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,--gc-sections -Wl,--no-as-needed
SHIM_LIBS := -ldl -lpthread
# Decompresses images. Only what that needs is linked.
ZSTD_CFLAGS := -std=gnu11 -Os -fPIC -fvisibility=hidden -ftls-model=initial-exec -ffunction-sections -fdata-sections -w \
	-DZSTD_DISABLE_ASM=1 -DZSTD_TRACE=0 -DZSTD_LEGACY_SUPPORT=0 \
	-DZSTDLIB_VISIBLE='__attribute__((visibility("hidden")))' -DZSTDERRORLIB_VISIBLE='__attribute__((visibility("hidden")))' \
	-DZDICTLIB_VISIBLE='__attribute__((visibility("hidden")))'
build/zstd/zstd.c: | $(SETUP)

SHIM_SONAME_cuda := libcuda.so.1
SHIM_SONAME_nvml := libnvidia-ml.so.1
SHIM_REAL_cuda := /usr/lib/gpushare/driver/libcuda-real.so.1
SHIM_REAL_nvml := /usr/lib/gpushare/driver/libnvidia-ml-real.so.1
SHIM_FILE_cuda := libcuda.so
SHIM_FILE_nvml := libnvidia-ml.so
SHIM_SOURCES_cuda := $(SHIM_CUDA_SOURCES)
SHIM_SOURCES_nvml := $(SHIM_NVML_SOURCES)
SHIM_INCLUDE_cuda := $(CUDA_INCLUDE)
SHIM_INCLUDE_nvml := $(NVML_INCLUDE)
SHIM_OTHERS_cuda := symbols.o layout.o linkable.o
SHIM_OTHERS_nvml := symbols.o layout.o linkable.o

# The library itself is neither sanitized nor analyzed, which takes as long as all of the shim.
SHIM_ZSTD_cuda = $(if $(filter %/aarch64,$(1)),$(1),build/shim)/obj/cuda/zstd.o

# shim_library(library, directory, compiler, flags, link flags)
define shim_library
$(2)/$(SHIM_FILE_$(1)): $$(addprefix $(2)/obj/$(1)/,$$(SHIM_SOURCES_$(1):.c=.o) $$(SHIM_OTHERS_$(1))) \
		$$(call SHIM_ZSTD_$(1),$(2)) $(2)/stub/$(1).so shim/shim.mk
	$(3) $$(SHIM_LDFLAGS) $(5) -Wl,-soname,$$(SHIM_SONAME_$(1)) -Wl,--version-script=$(2)/gen/$(1)/exports.map \
		-o $$@.new $$(filter %.o,$$^) $(2)/stub/$(1).so $$(SHIM_LIBS)
	@$$(PYTHON) shim/gen_symbols.py linkable $$@.new
	@mv $$@.new $$@

# The real library under its private path: a dependency by absolute name, found without any search.
$(2)/stub/$(1).so: shim/shim.mk | $$(SETUP)
	@mkdir -p $$(@D)
	echo | $(3) $(5) -shared -nostdlib -Wl,-soname,$$(SHIM_REAL_$(1)) -o $$@ -x c -

$(2)/gen/$(1)/symbols.h: shim/symbols.tsv shim/gen_symbols.py hook/gpushare/state/shm_abi.py hook/gpushare/state/usage_reader.py | $$(SETUP)
	$$(PYTHON) shim/gen_symbols.py c $(1) $$(@D)
$(2)/gen/$(1)/symbols.c $(2)/gen/$(1)/layout.c $(2)/gen/$(1)/exports.map $(2)/gen/$(1)/linkable.s: $(2)/gen/$(1)/symbols.h ;

$(2)/obj/$(1)/symbols.o $(2)/obj/$(1)/layout.o: $(2)/obj/$(1)/%.o: $(2)/gen/$(1)/%.c
	@mkdir -p $$(@D)
	$(3) $$(SHIM_CFLAGS) $(4) -Ishim -I$(2)/gen/$(1) -c -o $$@ $$<

$(2)/obj/$(1)/linkable.o: $(2)/gen/$(1)/linkable.s
	@mkdir -p $$(@D)
	$(3) -c -o $$@ $$<

$(2)/obj/$(1)/zstd.o: build/zstd/zstd.c shim/shim.mk
	@mkdir -p $$(@D)
	$$(call progress,CC $$<)
	$(3) $$(ZSTD_CFLAGS) $(4) -c -o $$@ $$<

$(2)/obj/$(1)/%.o: shim/%.c $(2)/gen/$(1)/symbols.h shim/shim.mk
	@mkdir -p $$(@D)
	$$(call progress,CC $$<)
	$(3) $$(SHIM_CFLAGS) $(4) -Ishim -I$(2)/gen/$(1) -isystem $$(SHIM_INCLUDE_$(1)) -isystem build/zstd -c -o $$@ $$<

-include $$(wildcard $(2)/obj/$(1)/*.d $(2)/obj/$(1)/*/*.d)
endef

# shim_build(directory, compiler, flags, link flags)
define shim_build
$(call shim_library,cuda,$(1),$(2),$(3),$(4))
$(call shim_library,nvml,$(1),$(2),$(3),$(4))
endef

# clang with the headers and symbols of any glibc, from a Python package; its cache stays in build/.
SHIM_ZIG = ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/build/zig ZIG_LOCAL_CACHE_DIR=$(CURDIR)/build/zig $(VENV_PYTHON) -m ziglang cc
SHIM_RELEASE_FLAGS := -ffile-prefix-map=$(CURDIR)=.
SHIM_MACHINES := x86_64 aarch64
$(foreach machine,$(SHIM_MACHINES),$(eval SHIM_RELEASE_$(machine) := $$(addprefix build/shim-release/$(machine)/,libcuda.so libnvidia-ml.so)))
comma := ,
SHIM_SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# -Wno-tsan: it does not understand atomic_thread_fence; see tests/shim/sanitized.py.
SHIM_THREADS := -fsanitize=thread -fno-omit-frame-pointer -Wno-tsan

$(eval $(call shim_build,build/shim,$$(CC),,))
$(eval $(call shim_build,build/shim-asan,$$(CC),$$(SHIM_SANITIZE),$$(SHIM_SANITIZE)))
$(eval $(call shim_build,build/shim-tsan,$$(CC),$$(SHIM_THREADS),-fsanitize=thread))
$(eval $(call shim_build,build/shim-analyzed,$$(CC),-fanalyzer,))

# Of x86-64 it is the same code as in build/shim, linked to an older C library: what that has not, fails the link.
# For other machines clang compiles it.
define shim_release
build/shim-release/x86_64/$(SHIM_FILE_$(1)): build/shim/$(SHIM_FILE_$(1)) build/.setup-dist
	@mkdir -p $$(@D)
	$$(SHIM_ZIG) -target x86_64-linux-gnu.2.17 $$(SHIM_LDFLAGS) -Wl,-s -Wl,-soname,$$(SHIM_SONAME_$(1)) \
		-Wl,--version-script=build/shim/gen/$(1)/exports.map -o $$@.new \
		$$(addprefix build/shim/obj/$(1)/,$$(SHIM_SOURCES_$(1):.c=.o) $$(SHIM_OTHERS_$(1))) \
		$$(call SHIM_ZSTD_$(1),build/shim) build/shim/stub/$(1).so $$(SHIM_LIBS)
	@$$(PYTHON) shim/gen_symbols.py linkable $$@.new
	@mv $$@.new $$@
endef
$(eval $(call shim_release,cuda))
$(eval $(call shim_release,nvml))
$(eval $(call shim_build,build/shim-release/aarch64,$$(SHIM_ZIG) -target aarch64-linux-gnu.2.17,$$(SHIM_RELEASE_FLAGS),-Wl$$(comma)-s))
$(addprefix build/shim-release/aarch64/,stub/cuda.so stub/nvml.so gen/cuda/symbols.h gen/nvml/symbols.h): | build/.setup-dist

.PHONY: shim shim-asan shim-tsan shim-analyzed shim-release
shim: build/shim/libcuda.so build/shim/libnvidia-ml.so ## build the shim
shim-asan: build/shim-asan/libcuda.so build/shim-asan/libnvidia-ml.so ## build the shim with AddressSanitizer
shim-tsan: build/shim-tsan/libcuda.so build/shim-tsan/libnvidia-ml.so ## build the shim with ThreadSanitizer
shim-analyzed: build/shim-analyzed/libcuda.so build/shim-analyzed/libnvidia-ml.so ## look through the shim with gcc -fanalyzer
shim-release: $(foreach machine,$(SHIM_MACHINES),$(SHIM_RELEASE_$(machine))) ## build the shim against glibc 2.17
