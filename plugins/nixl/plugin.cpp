// The two functions that libnixl looks for, and the table that the first one gives it.
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "engine.h"

namespace {

nixl::BackendEngine *create_engine(const nixl::InitParams *params) noexcept
{
    try {
        if (!params || !params->customParams || params->type.empty()) {
            throw std::runtime_error("this NIXL creates backends in a way that is not known here (version 1 is)");
        }
        return new tcpx::Engine(params);
    } catch (const std::exception &error) {
        // The agent says only that it failed.
        std::fprintf(stderr, "TCPX: cannot create the backend: %s\n", error.what());
        return nullptr;
    }
}

void destroy_engine(nixl::BackendEngine *engine) noexcept { delete engine; }

const char *name() noexcept { return "TCPX"; }

nixl::Params options() noexcept { return tcpx::Engine::options(); }

nixl::MemList memories() noexcept { return tcpx::Engine::memories(); }

nixl::BackendPlugin plugin = {
    nixl::API_VERSION, create_engine, destroy_engine, name, tcpx_version, options, memories,
};

}  // namespace

extern "C" {

[[gnu::visibility("default")]] nixl::BackendPlugin *nixl_plugin_init() { return &plugin; }

// Engines may be alive, and the plugin may be opened again: there is nothing to undo.
[[gnu::visibility("default")]] void nixl_plugin_fini() {}
}
