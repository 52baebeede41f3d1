//! Names the shared library, so that programs linked with it ask the loader for this name and not
//! for its build path. Keeps the library loaded: its log thread outlives the last session.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtcpx_p2p.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
