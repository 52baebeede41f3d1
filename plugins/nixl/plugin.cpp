// The two functions that libnixl looks for, and the table that the first one returns.
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "engine.h"
#include "host_abi.h"
#include "standin.h"

#ifndef TCPX_NIXL_VERSIONS
#define TCPX_NIXL_VERSIONS "1.x"
#endif

namespace {

// `tcpx nixl` recognises the file of this backend by these bytes, whatever its name.
constexpr char MARK[] = "tcpx-nixl-backend: this file is TCPX";

nixl::BackendEngine *create_engine(const nixl::InitParams *params) noexcept
{
    try {
        if (!params || !params->customParams || params->type.empty()) {
            throw std::runtime_error("this NIXL creates backends in an unknown way: NIXL "
                                     TCPX_NIXL_VERSIONS " is supported");
        }
        return new tcpx::Engine(params);
    } catch (const std::exception &error) {
        // The agent reports only the failure itself.
        const bool as_ucx = tcpx::standin::loaded_as() == tcpx::standin::UCX;
        const char *role = as_ucx ? " UCX, which it stands in for" : "";
        std::fprintf(stderr, "TCPX: cannot create the backend%s: %s\n", role, error.what());
        return nullptr;
    }
}

void destroy_engine(nixl::BackendEngine *engine) noexcept { delete engine; }

const char *name() noexcept { return tcpx::standin::loaded_as(); }

nixl::Params options() noexcept { return tcpx::Engine::options(); }

nixl::MemList memories() noexcept { return tcpx::Engine::memories(); }

nixl::BackendPlugin plugin = {
    nixl::API_VERSION, create_engine, destroy_engine, name, tcpx_version, options, memories,
};

}  // namespace

extern "C" {

[[gnu::visibility("default")]] nixl::BackendPlugin *nixl_plugin_init()
{
    // Keeps the linker from removing an unreferenced constant.
    asm volatile("" : : "r"(MARK));
#ifndef TCPX_NIXL_HEADERS
    // NIXL would call the wrong functions of another table: return no table instead.
    try {
        const auto difference = tcpx::differing_abi(__builtin_return_address(0));
        if (!difference.empty()) {
            std::fprintf(stderr,
                         "TCPX: the backend cannot be used: %s. NIXL " TCPX_NIXL_VERSIONS
                         " is supported: install one of these, or another version of tcpx\n",
                         difference.c_str());
            return nullptr;
        }
    } catch (const std::exception &) {
        // Out of memory: the comparison is inconclusive.
    }
#endif
    return &plugin;
}

// Engines may be alive, and the plugin may be opened again: there is nothing to undo.
[[gnu::visibility("default")]] void nixl_plugin_fini() {}
}
