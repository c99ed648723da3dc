# The simulated driver and host: `make sim`, `make simhost`. Needs CC, PYTHON, CUDA_INCLUDE, NVML_INCLUDE.

BUILD ?= build
SIM_DIR := simulator
SIM_VERSION := 535.261.03
# The same and the checkpoint API, for simhost.py --driver
SIM_NEWER := 580.159.04
SIM_OUT := $(BUILD)/sim
SIM_ZSTD ?= build/shim/obj/cuda/zstd.o
SIM_PYTHON ?= $(if $(PYTHON),$(PYTHON),python3)
SIM_CFLAGS := -std=c11 -D_GNU_SOURCE -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
	-Wno-deprecated-declarations -I$(SIM_DIR) -I$(SIM_DIR)/cuda -isystem $(CUDA_INCLUDE) -isystem $(NVML_INCLUDE) -isystem build/zstd

SIM_SHARED := device memory shared scheduler
SIM_CUDA := $(SIM_SHARED) $(patsubst $(SIM_DIR)/cuda/%.c,cuda/%,$(wildcard $(SIM_DIR)/cuda/*.c))
SIM_NVML := $(SIM_SHARED) $(patsubst $(SIM_DIR)/nvml/%.c,nvml/%,$(wildcard $(SIM_DIR)/nvml/*.c))
SIM_CUDA_OBJECTS := $(SIM_CUDA:%=$(SIM_OUT)/obj/%.o)
SIM_NVML_OBJECTS := $(SIM_NVML:%=$(SIM_OUT)/obj/%.o)
SIM_HEADERS := $(wildcard $(SIM_DIR)/*.h $(SIM_DIR)/*/*.h)
SIM_LIBCUDA := $(SIM_OUT)/libcuda.so.$(SIM_VERSION)
SIM_LIBCUDA_NEWER := $(SIM_OUT)/libcuda.so.$(SIM_NEWER)
SIM_LIBNVML := $(SIM_OUT)/libnvidia-ml.so.$(SIM_VERSION)
SIM_PROGRAMS := $(SIM_OUT)/nvidia-smi $(SIM_OUT)/nvidia-cuda-mps-control

.PHONY: sim simhost
sim: $(SIM_LIBCUDA) $(SIM_LIBCUDA_NEWER) $(SIM_LIBNVML) $(SIM_PROGRAMS) $(SIM_OUT)/libempty.so ## build the simulated driver

simhost: $(BUILD)/simhost/.gpushare-sim ## build a simulated host root with one 16 GiB GPU

$(BUILD)/simhost/.gpushare-sim: $(SIM_LIBCUDA) $(SIM_LIBNVML) $(SIM_PROGRAMS) $(SIM_OUT)/libempty.so \
		$(SIM_DIR)/simhost.py $(SIM_DIR)/layout.py $(SIM_DIR)/hostfiles.py $(SIM_DIR)/models.py
	@$(SIM_PYTHON) $(SIM_DIR)/simhost.py $(BUILD)/simhost

$(SIM_OUT)/obj/%.o: $(SIM_DIR)/%.c $(SIM_HEADERS)
	@mkdir -p $(@D)
	$(call progress,CC $<)
	@$(CC) $(SIM_CFLAGS) -c -o $@ $<

$(SIM_OUT)/cuda.i: $(CUDA_INCLUDE)/cuda.h
	@mkdir -p $(@D)
	@printf '#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n' | $(CC) -E -P -x c -isystem $(CUDA_INCLUDE) -o $@ -

$(SIM_OUT)/%/generated.c $(SIM_OUT)/%/generated_stubs.c $(SIM_OUT)/%/libcuda.map: $(SIM_CUDA_OBJECTS) $(SIM_OUT)/cuda.i \
		$(SIM_DIR)/generate.py $(wildcard $(SIM_DIR)/exports/*)
	@mkdir -p $(@D)
	@$(SIM_PYTHON) $(SIM_DIR)/generate.py cuda $* $(@D)/generated.c $(@D)/libcuda.map $(SIM_OUT)/cuda.i $(SIM_CUDA_OBJECTS)

$(SIM_OUT)/nvml_stubs.c $(SIM_OUT)/libnvidia-ml.map &: $(SIM_NVML_OBJECTS) $(SIM_DIR)/generate.py $(wildcard $(SIM_DIR)/exports/*)
	@$(SIM_PYTHON) $(SIM_DIR)/generate.py nvml $(SIM_OUT)/nvml_stubs.c $(SIM_OUT)/libnvidia-ml.map $(SIM_NVML_OBJECTS)

$(SIM_OUT)/%.o: $(SIM_OUT)/%.c $(SIM_HEADERS)
	@$(CC) $(SIM_CFLAGS) -Wno-unknown-warning-option -Wno-builtin-declaration-mismatch -Wno-unused-parameter -c -o $@ $<

# Like the real ones: libcuda is bound to itself, NVML calls its own exports through its PLT.
$(SIM_LIBCUDA) $(SIM_LIBCUDA_NEWER): $(SIM_OUT)/libcuda.so.%: \
		$(SIM_CUDA_OBJECTS) $(SIM_OUT)/%/generated.o $(SIM_OUT)/%/generated_stubs.o $(SIM_ZSTD) | $(SIM_OUT)/%/libcuda.map
	@$(CC) -shared -Wl,-soname,libcuda.so.1 -Wl,-Bsymbolic -Wl,-z,nodelete -Wl,--gc-sections -Wl,--version-script=$(SIM_OUT)/$*/libcuda.map -o $@ $^ -lpthread -lrt -lm

$(SIM_LIBNVML): $(SIM_NVML_OBJECTS) $(SIM_OUT)/nvml_stubs.o
	@$(CC) -shared -Wl,-soname,libnvidia-ml.so.1 -Wl,-z,nodelete -Wl,--version-script=$(SIM_OUT)/libnvidia-ml.map -o $@ $^ -lpthread

$(SIM_OUT)/nvidia-smi: $(SIM_DIR)/nvidia-smi.c $(SIM_HEADERS)
	@mkdir -p $(@D)
	@$(CC) -std=c11 -O2 -Wall -Wextra -Werror -isystem $(NVML_INCLUDE) -o $@ $< -ldl

$(SIM_OUT)/nvidia-cuda-mps-control: $(SIM_DIR)/mps-control.c
	@mkdir -p $(@D)
	@$(CC) -std=c11 -O2 -Wall -Wextra -Werror -o $@ $<

# Driver libraries that are only carried along: simhost.py gives each its own soname.
$(SIM_OUT)/libempty.so:
	@mkdir -p $(@D)
	@$(CC) -shared -nostdlib -Wl,-soname,libgpushare-sim-placeholder.so.000000000000 -o $@ -x c /dev/null
