# What `make bench` measures the shim with: build/bench/shim_bench and the empty driver beside it.

BENCH_CFLAGS := -std=gnu11 -O2 -Wall -Wextra -Werror -Ishim/include -isystem $(CUDA_INCLUDE)

.PHONY: shim_bench
shim_bench: build/bench/shim_bench build/bench/libcuda-stub.so build/shim/libcuda.so ## build the shim's benchmark

build/bench/shim_bench: tests/bench/shim_bench.c shim/include/gpushare_abi.h | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(BENCH_CFLAGS) -o $@ $< -ldl

build/bench/libcuda-stub.so: tests/bench/stub_driver.c | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(BENCH_CFLAGS) -fPIC -shared -Wl,-Bsymbolic -Wl,-soname,libcuda.so.1 -o $@ $<

.PHONY: bench-start
bench-start: root build ## measure what a start costs; RUNTIME=/path/to/wrapper: another wrapper too
	@RUNTIME="$(RUNTIME)" $(VENV_PYTHON) -m tests.bench.start
