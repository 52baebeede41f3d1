# The main commands. `make demo` and `make test` are all a newcomer needs.
#
# PROFILE=dev   the build that the tests of the C library, the NIXL backend and the Python package
#               load: `dev` (the default) is built with the Rust tests, `release` is shipped
# PARTS="…"     the parts that `make test` runs (scripts/test-all --list)
# JOBS=1        how many of them run at once (default: 2)

CARGO ?= cargo
DIST  := dist

# Paths of the libraries that tests load.
PROFILE   ?= dev
TEST_DIST := $(if $(filter release,$(PROFILE)),$(DIST),target/test-dist)
export PROFILE JOBS

# Everything is compiled once: incremental compilation would only take time.
export CARGO_INCREMENTAL ?= 0

.PHONY: help demo test test-variants test-quick test-build dist docs bench soak lint fuzz loom clean need-cargo

help:
	@echo 'make demo           build what is missing and measure this machine (two processes)'
	@echo 'make test           run the tests; ends with the time of each part and what was skipped'
	@echo 'make test-quick     run unit tests and a choice of stories: about a minute once built'
	@echo 'make test-variants  repeat stories on other carriers, and tests with the oldest NIXL'
	@echo 'make lint           check formatting, clippy and documentation, warnings denied'
	@echo 'make docs           build the documentation site in dist/site'
	@echo 'make dist           fill dist/ with what is shipped'
	@echo 'make bench          run the benchmark suite, with an HTML report in dist/bench.html'
	@echo 'make soak           run ten minutes of mixed verified transfers, watching memory'
	@echo 'make fuzz           run each fuzz target for a minute (needs nightly Rust and cargo-fuzz)'
	@echo 'make loom           check the lock-free parts under every interleaving'
	@echo 'make clean          remove everything that was built'

need-cargo:
	@command -v $(CARGO) >/dev/null || { \
	  echo 'error: no Rust toolchain found: install Rust 1.95 or later (https://rustup.rs) and try again' >&2; exit 1; }
	@command -v cc >/dev/null || { \
	  echo 'error: no C compiler found (Rust needs it to link): install gcc or clang and try again' >&2; exit 1; }

demo: $(DIST)/bin/tcpx
	$(DIST)/bin/tcpx bench --quick --path lanes
	-$(DIST)/bin/tcpx bench --quick --path same-host # reports why, if it is impossible

test: need-cargo
	@scripts/test-all $(PARTS)

test-variants: need-cargo
	@scripts/test-all --variants

test-quick: need-cargo
	@scripts/test-all quick

# Compiles the tests, then the libraries for other languages. Cargo has built the command and the C
# library for the Rust tests: only the NIXL backend and the Python module are left.
test-build: need-cargo
	$(CARGO) test --workspace --exclude=tcpx-python --locked --no-run
ifeq ($(PROFILE),release)
	$(MAKE) dist
else
	@mkdir -p $(TEST_DIST)/bin
	@cp target/debug/tcpx $(TEST_DIST)/bin/
	@crates/capi/install.sh target/debug/deps $(TEST_DIST)
	plugins/nixl/build.sh $(TEST_DIST)/lib/libtcpx_p2p.a $(TEST_DIST)/nixl/libplugin_TCPX.so
	BUILT=$(TEST_DIST)/bin PLUGIN=$(TEST_DIST)/nixl/libplugin_TCPX.so scripts/wheel $(TEST_DIST)/python
endif

dist: $(DIST)/bin/tcpx $(DIST)/nixl/libplugin_TCPX.so $(DIST)/plugins/libnccl-net-tcpx-emu.so $(DIST)/python

# Always runs cargo, which knows what is stale.
.PHONY: $(DIST)/bin/tcpx $(DIST)/lib/libtcpx_p2p.a $(DIST)/nixl/libplugin_TCPX.so \
	$(DIST)/plugins/libnccl-net-tcpx-emu.so $(DIST)/python
$(DIST)/bin/tcpx: need-cargo
	$(CARGO) build --release --locked --package tcpx-cli
	@mkdir -p $(@D)
	@cp target/release/tcpx $@

# Without the Rust library, which only tests use: its object code would be built in addition to what
# the command's link time optimisation uses, for every dependency.
$(DIST)/lib/libtcpx_p2p.a: need-cargo
	$(CARGO) rustc --release --locked --package tcpx-capi --lib --crate-type cdylib,staticlib
	@crates/capi/install.sh target/release $(DIST)

$(DIST)/nixl/libplugin_TCPX.so: $(DIST)/lib/libtcpx_p2p.a
	plugins/nixl/build.sh $< $@

$(DIST)/plugins/libnccl-net-tcpx-emu.so: need-cargo
	$(CARGO) build --release --locked --package tcpx-emu
	@mkdir -p $(@D)
	@cp target/release/libnccl_net_tcpx_emu.so $@

$(DIST)/python: $(DIST)/bin/tcpx $(DIST)/nixl/libplugin_TCPX.so
	PROFILE=release BUILT=$(DIST)/bin PLUGIN=$(DIST)/nixl/libplugin_TCPX.so scripts/wheel $@

bench: $(DIST)/bin/tcpx
	$(DIST)/bin/tcpx bench --report $(DIST)/bench.html

soak: $(DIST)/bin/tcpx
	$(DIST)/bin/tcpx bench --soak 10m

lint: need-cargo
	scripts/lint

docs:
	scripts/docs --site $(DIST)/site

loom: need-cargo
	scripts/test-loom

fuzz: need-cargo
	scripts/fuzz 60

clean:
	$(CARGO) clean
	rm -rf $(DIST) fuzz/target models/target
