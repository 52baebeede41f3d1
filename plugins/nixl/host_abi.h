// Checks that the NIXL which loads the plugin calls engines by the table that the plugin was built
// for.
#pragma once

#include <string>

namespace tcpx {

// Compares the engine table of the NIXL that contains the address `caller`. Returns the difference,
// in words for the user; empty if the tables are the same, or no table was found.
//
// libnixl calls an engine by position in its virtual table and does not identify the table: the
// version of its plugin API has stayed 1 while the table changed. But every backend that NIXL ships
// contains the tables of the base class and of its own engine as symbols, with one relocation per
// function. They are compared by name and signature.
std::string differing_abi(const void *caller);

}  // namespace tcpx
