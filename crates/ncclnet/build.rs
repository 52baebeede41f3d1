//! Compiles the logger that plugins call (see `src/log.rs`).

fn main() {
    println!("cargo::rerun-if-changed=src/log_shim.c");
    cc::Build::new()
        .file("src/log_shim.c")
        .std("c11")
        .warnings(true)
        .extra_warnings(true)
        .compile("tcpx_ncclnet_log");
}
