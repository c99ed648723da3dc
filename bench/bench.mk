# Builds what `make bench` measures the shim with: build/bench/shim_bench and the empty driver.

BENCH_CFLAGS := -std=gnu11 -O2 -Wall -Wextra -Werror -Ishim/include -isystem $(CUDA_INCLUDE)

.PHONY: shim_bench
shim_bench: build/bench/shim_bench build/bench/libcuda-stub.so build/shim/libcuda.so ## build the shim's benchmark

build/bench/shim_bench: bench/shim_bench.c shim/include/gpushare_abi.h | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(BENCH_CFLAGS) -o $@ $< -ldl

build/bench/libcuda-stub.so: bench/stub_driver.c | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(BENCH_CFLAGS) -fPIC -shared -Wl,-Bsymbolic -Wl,-soname,libcuda.so.1 -o $@ $<

# For measuring the lock warm-up: the warm-up alone, and the runtime without it
build/bench/warm: bench/warm.c hook/launcher/cgroup_lock_warmup.c $(LAUNCHER_TABLES) | $(SETUP)
	@mkdir -p $(@D)
	$(LAUNCHER_CC) $(LAUNCHER_CFLAGS) $(LAUNCHER_LDFLAGS) -o $@ $(filter %.c,$^)

build/bench/cold/bin/gpushare-runtime: bench/cold.c $(filter-out hook/launcher/cgroup_lock_warmup.c,$(LAUNCHER_SOURCES)) $(LAUNCHER_TABLES) | $(SETUP)
	@mkdir -p $(@D)
	$(LAUNCHER_CC) $(LAUNCHER_CFLAGS) -DIS_HOOK=0 $(LAUNCHER_LDFLAGS) -o $@ $(filter %.c,$^)
	@ln -sfn ../../../bin/gpushare-hook $(@D)/gpushare-hook
	@ln -sfn ../../libexec build/bench/cold/libexec

.PHONY: start_bench
start_bench: build/bench/warm build/bench/cold/bin/gpushare-runtime

ROUNDS ?= 40

.PHONY: bench-start
bench-start: root build start_bench ## measure what a start costs, in ROUNDS (40); RUNTIME=/path/to/wrapper: another wrapper too; BEFORE=/other/build: compare with it
	@ROUNDS="$(ROUNDS)" RUNTIME="$(RUNTIME)" BEFORE="$(BEFORE)" $(VENV_PYTHON) -m bench.start
