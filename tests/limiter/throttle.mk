# The rate limiter in virtual time: build/throttle/vt, and vt-asan with AddressSanitizer and UBSan.

comma := ,
VT_SOURCES := $(wildcard tests/limiter/*.c shim/limiter/*.c)
VT_HEADERS := $(wildcard tests/limiter/*.h shim/limiter/*.h)
VT_CFLAGS := -std=gnu11 -O2 -g -ffp-contract=off -Wall -Wextra -Werror -Ishim

.PHONY: vt vt-asan
vt: build/throttle/vt ## build the virtual-time test of the compute law
vt-asan: build/throttle/vt-asan

build/throttle/vt build/throttle/vt-asan: $(VT_SOURCES) $(VT_HEADERS) tests/limiter/throttle.mk | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(VT_CFLAGS) $(if $(filter %-asan,$@),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all) \
		-o $@.new $(VT_SOURCES) -lm
	@mv $@.new $@
