#!/usr/bin/env bash
# Installs the C library for use by programs: install.sh BUILT PREFIX
#
# BUILT is Cargo's output folder (target/release). PREFIX gets lib/libtcpx_p2p.{so,a},
# lib/pkgconfig/tcpx_p2p.pc and include/tcpx_p2p.{h,hpp}; it may be moved afterwards.
set -euo pipefail

if [ $# -ne 2 ]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
built=$1 prefix=$2
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/../../Cargo.toml" | head -1)

mkdir -p "$prefix/lib/pkgconfig" "$prefix/include"
install -m 644 "$built/libtcpx_p2p.a" "$prefix/lib/"
install -m 755 "$built/libtcpx_p2p.so" "$prefix/lib/"
install -m 644 "$here/include/tcpx_p2p.h" "$here/include/tcpx_p2p.hpp" "$prefix/include/"
sed "s/@VERSION@/$version/" "$here/tcpx_p2p.pc.in" >"$prefix/lib/pkgconfig/tcpx_p2p.pc"
