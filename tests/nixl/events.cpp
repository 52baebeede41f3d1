// A backend that offers telemetry events and nothing else. As it ends it says how many of them nobody has taken.
#include <array>
#include <cstdio>

#include "nixl_abi.h"

namespace {

constexpr std::size_t OFFERED = 100;

// An event of NIXL 1.0, the largest there is.
using Event = std::array<unsigned char, 56>;

class Engine final : public nixl::BackendEngine {
public:
    explicit Engine(const nixl::InitParams *params) : nixl::BackendEngine(params)
    {
        events().resize(OFFERED);
    }
    ~Engine() override { std::fprintf(stderr, "EVENTS LEFT %zu OF %zu\n", events().size(), OFFERED); }

    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return false; }
    nixl::MemList getSupportedMems() const override { return {nixl::DRAM}; }

    nixl::Status registerMem(const nixl::BlobDesc &, const nixl::Mem &, nixl::BackendMD *&out) override
    {
        out = new nixl::BackendMD(true);
        return nixl::SUCCESS;
    }
    nixl::Status deregisterMem(nixl::BackendMD *md) override
    {
        delete md;
        return nixl::SUCCESS;
    }
    nixl::Status loadLocalMD(nixl::BackendMD *in, nixl::BackendMD *&out) override
    {
        out = in;
        return nixl::SUCCESS;
    }
    nixl::Status unloadMD(nixl::BackendMD *) override { return nixl::SUCCESS; }
    nixl::Status connect(const std::string &) override { return nixl::SUCCESS; }
    nixl::Status disconnect(const std::string &) override { return nixl::SUCCESS; }
    nixl::Status prepXfer(const nixl::Op &, const nixl::MetaList &, const nixl::MetaList &,
                          const std::string &, nixl::BackendReqH *&handle,
                          const nixl::OptionalArgs *) const override
    {
        handle = new nixl::BackendReqH;
        return nixl::SUCCESS;
    }
    nixl::Status postXfer(const nixl::Op &, const nixl::MetaList &, const nixl::MetaList &,
                          const std::string &, nixl::BackendReqH *&, const nixl::OptionalArgs *) const override
    {
        return nixl::SUCCESS;
    }
    nixl::Status checkXfer(nixl::BackendReqH *) const override { return nixl::SUCCESS; }
    nixl::Status releaseReqH(nixl::BackendReqH *handle) const override
    {
        delete handle;
        return nixl::SUCCESS;
    }

private:
    // The base keeps events at this place (nixl_abi.h asserts it).
    std::vector<Event> &events()
    {
        return *reinterpret_cast<std::vector<Event> *>(reinterpret_cast<char *>(this) + 96);
    }
};

nixl::BackendEngine *create(const nixl::InitParams *params) { return new Engine(params); }
void destroy(nixl::BackendEngine *engine) { delete engine; }
const char *name() { return "EVENTS"; }
const char *version() { return "1"; }
nixl::Params options() { return {}; }
nixl::MemList memories() { return {nixl::DRAM}; }

nixl::BackendPlugin plugin = {nixl::API_VERSION, create, destroy, name, version, options, memories};

}  // namespace

extern "C" {
nixl::BackendPlugin *nixl_plugin_init() { return &plugin; }
void nixl_plugin_fini() {}
}
