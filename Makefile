# The main commands. `make demo` and `make test` are all a newcomer needs.

CARGO ?= cargo
DIST  := dist

.PHONY: help demo test dist bench soak lint fuzz clean need-cargo

help:
	@echo 'make demo   build what is missing and measure this machine (two processes: lanes, then direct copies)'
	@echo 'make test   run every test'
	@echo 'make dist   fill dist/ with what is shipped'
	@echo 'make bench  the full benchmark suite with an HTML report in dist/bench.html'
	@echo 'make soak   ten minutes of mixed verified transfers, watching memory'
	@echo 'make lint   formatting, clippy and documentation, warnings denied'
	@echo 'make fuzz   each fuzz target for a minute (needs nightly Rust and cargo-fuzz)'
	@echo 'make clean  remove everything that was built'

need-cargo:
	@command -v $(CARGO) >/dev/null || { \
	  echo 'error: no Rust toolchain found: install Rust 1.95 or later (https://rustup.rs) and try again' >&2; exit 1; }
	@command -v cc >/dev/null || { \
	  echo 'error: no C compiler found (Rust needs it to link): install gcc or clang and try again' >&2; exit 1; }

demo: $(DIST)/bin/tcpx
	$(DIST)/bin/tcpx bench --quick --path lanes
	-$(DIST)/bin/tcpx bench --quick --path same-host # says why, where it is impossible

test: need-cargo dist
	scripts/test
	scripts/test-kernels
	scripts/test-capi
	scripts/test-python
	scripts/test-nixl

dist: $(DIST)/bin/tcpx $(DIST)/nixl/libplugin_TCPX.so $(DIST)/plugins/libnccl-net-tcpx-emu.so $(DIST)/python

# Always asks cargo, which knows what is stale.
.PHONY: $(DIST)/bin/tcpx $(DIST)/lib/libtcpx_p2p.a $(DIST)/nixl/libplugin_TCPX.so \
	$(DIST)/plugins/libnccl-net-tcpx-emu.so $(DIST)/python
$(DIST)/bin/tcpx: need-cargo
	$(CARGO) build --release --locked --package tcpx-cli
	@mkdir -p $(@D)
	@cp target/release/tcpx $@

# Without the Rust library, which tests alone use: its object code would be built beside what the command's link time
# optimisation uses, for every dependency.
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
	BUILT=$(DIST)/bin PLUGIN=$(DIST)/nixl/libplugin_TCPX.so scripts/wheel $@

bench: $(DIST)/bin/tcpx
	$(DIST)/bin/tcpx bench --report $(DIST)/bench.html

soak: $(DIST)/bin/tcpx
	$(DIST)/bin/tcpx bench --soak 10m

lint: need-cargo
	scripts/lint

fuzz: need-cargo
	scripts/fuzz 60

clean:
	$(CARGO) clean
	rm -rf $(DIST) fuzz/target
