#!/usr/bin/env bash
# Builds the NIXL backend plugin: build.sh LIBTCPX_P2P.a OUT/libplugin_TCPX.so
#
# CXX, CXXFLAGS      the compiler (C++20, GCC 11 or later) and more flags for it
# NIXL_INCLUDE_DIR   build against NIXL's own headers instead of nixl_abi.h: one or more folders,
#                    separated by colons, that contain nixl_types.h and its includes (with abseil)
set -euo pipefail

if [ $# -ne 2 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
archive=$(realpath "$1") out=$(realpath -m "$2")
here=$(cd "$(dirname "$0")" && pwd)
read -ra cxx <<<"${CXX:-g++}"
command -v "${cxx[0]}" >/dev/null || {
  echo "error: no C++ compiler found (${cxx[0]}): install g++ 11 or later, or set CXX" >&2
  exit 1
}

flags=(-std=c++20 -O2 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra -Werror)
if [ -n "${NIXL_INCLUDE_DIR:-}" ]; then
  flags+=(-DTCPX_NIXL_HEADERS)
  IFS=: read -ra folders <<<"$NIXL_INCLUDE_DIR"
  for folder in "${folders[@]}"; do flags+=(-isystem "$folder"); done
fi
read -ra more <<<"${CXXFLAGS:-}"
versions=$(grep -v '^#' "$here/versions")
flags+=("-DTCPX_NIXL_VERSIONS=\"${versions%%$'\n'*} to ${versions##*$'\n'}\"")

mkdir -p "$(dirname "$out")"
# Keeps the plugin loaded for the lifetime of the process: its threads may outlive a dlclose.
"${cxx[@]}" "${flags[@]}" "${more[@]}" -I "$here/../../crates/capi/include" \
  "$here"/{plugin,engine,standin,host_abi}.cpp "$archive" -shared -o "$out" \
  -Wl,-z,nodelete -Wl,-z,relro -Wl,-z,now -Wl,--version-script="$here/plugin.map" -Wl,--exclude-libs,ALL \
  -Wl,--gc-sections -Wl,--as-needed -Wl,--no-undefined -Wl,--strip-debug -lm
