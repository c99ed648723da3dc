# Compiles the programs of `make gpu-check` into build/gpu. None of them needs CUDA headers.

GPU_BUSY := $(wildcard tests/integration/programs/busy*.c)
GPU_PROGRAMS := build/gpu/latency build/gpu/busy

build/gpu/latency: tests/hardware/latency.c | $(SETUP)
build/gpu/busy: $(GPU_BUSY) tests/integration/programs/busy.h | $(SETUP)
$(GPU_PROGRAMS):
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O2 -Wall -Wextra -Werror -Wno-deprecated-non-prototype -o $@.new $(filter %.c,$^) -ldl -lpthread -lm
	@mv $@.new $@

.PHONY: gpu-programs
gpu-programs: $(GPU_PROGRAMS)
