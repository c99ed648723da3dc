# `make gpu-check`: build/gpu/latency, the only part of it that is compiled. It needs no CUDA headers.

build/gpu/latency: tests/gpu/latency.c | $(SETUP)
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O2 -Wall -Wextra -Werror -o $@.new $< -ldl
	@mv $@.new $@
