// The behaviour of the backend under the name UCX, for applications that support no other.
#pragma once

#include <string>
#include <string_view>

#include "handles.h"
#include "nixl_abi.h"

namespace tcpx::standin {

// The name of the backend that TCPX can stand in for. NIXL names backends by their files.
inline constexpr std::string_view UCX = "UCX";

// Returns the name by which NIXL has loaded this library.
const char *loaded_as();

// Returns the parameters that NIXL's own UCX backend lists, with its defaults.
nixl::Params options();

// Returns whether `key` is a parameter of NIXL's own UCX backend.
bool knows(const std::string &key);

// Applies UCX's parameters among `params` to `config`. Settings of the environment or of `params`
// itself take precedence. Returns the others, as `key=value, …`, that differ from UCX's default and
// have no meaning here. Throws std::runtime_error for an invalid value.
std::string apply(const nixl::Params &params, tcpx_config *config);

// Logs parameters that have no effect, each list once per process.
void report_unused(const std::string &unused);

// Wraps connection info so that NIXL's own UCX backend refuses it with an error. UCX trusts its
// input: it would abort on bytes that are no UCX address.
std::string wrap(const std::string &info);

// Undoes `wrap`; returns anything else unchanged.
std::string_view unwrap(std::string_view info);

// Tells the user what to do about a peer that runs NIXL's own UCX.
inline constexpr const char *MIXED =
    "this peer runs NIXL's real UCX backend, and here TCPX stands in for it: run "
    "`tcpx nixl install --as UCX` on its side too, or `tcpx nixl uninstall` on this one";

}  // namespace tcpx::standin
