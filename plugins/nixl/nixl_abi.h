// The interface of a NIXL 1.x backend plugin: the types shared by libnixl and a plugin, so that the
// plugin builds without NIXL sources.
//
// Only the layout matters here: sizes, offsets, and the order of virtual functions. The asserts at
// the end match libnixl 1.0 to 1.5 on x86-64. With TCPX_NIXL_HEADERS defined, NIXL's own headers
// provide the same names and the compiler checks them instead.
#pragma once

#ifdef TCPX_NIXL_HEADERS

#include <backend/backend_aux.h>
#include <backend/backend_engine.h>
#include <backend/backend_plugin.h>

namespace nixl {

static_assert(NIXL_PLUGIN_API_VERSION == 1, "TCPX knows version 1 of NIXL's backend plugin API");
inline constexpr int API_VERSION = NIXL_PLUGIN_API_VERSION;

using Mem = nixl_mem_t;
using Op = nixl_xfer_op_t;
using Status = nixl_status_t;
using Cost = nixl_cost_t;
inline constexpr Mem DRAM = DRAM_SEG;
inline constexpr Mem VRAM = VRAM_SEG;
inline constexpr Op READ = NIXL_READ;
inline constexpr Status IN_PROG = NIXL_IN_PROG;
inline constexpr Status SUCCESS = NIXL_SUCCESS;
inline constexpr Status NOT_POSTED = NIXL_ERR_NOT_POSTED;
inline constexpr Status INVALID_PARAM = NIXL_ERR_INVALID_PARAM;
inline constexpr Status BACKEND = NIXL_ERR_BACKEND;
inline constexpr Status NOT_FOUND = NIXL_ERR_NOT_FOUND;
inline constexpr Status MISMATCH = NIXL_ERR_MISMATCH;
inline constexpr Status NOT_ALLOWED = NIXL_ERR_NOT_ALLOWED;
inline constexpr Status REPOST_ACTIVE = NIXL_ERR_REPOST_ACTIVE;
inline constexpr Status UNKNOWN = NIXL_ERR_UNKNOWN;
inline constexpr Status NOT_SUPPORTED = NIXL_ERR_NOT_SUPPORTED;
inline constexpr Status REMOTE_DISCONNECT = NIXL_ERR_REMOTE_DISCONNECT;
inline constexpr Status CANCELED = NIXL_ERR_CANCELED;

using Params = nixl_b_params_t;
using MemList = nixl_mem_list_t;
using NotifList = notif_list_t;
using BlobDesc = nixlBlobDesc;
using MetaList = nixl_meta_dlist_t;
using OptionalArgs = nixl_opt_b_args_t;
using AgentOptions = nixl_opt_args_t;
using InitParams = nixlBackendInitParams;
using BackendMD = nixlBackendMD;
using BackendReqH = nixlBackendReqH;
using BackendEngine = nixlBackendEngine;
using BackendPlugin = nixlBackendPlugin;

}  // namespace nixl

#else

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nixl {

inline constexpr int API_VERSION = 1;

enum Mem : std::uint32_t { DRAM = 0, VRAM = 1, BLK = 2, OBJ = 3, FILE = 4 };
enum Op : std::uint32_t { READ = 0, WRITE = 1 };
enum class ThreadSync : std::uint32_t { NONE = 0, STRICT = 1, RW = 2 };
enum class Cost : std::uint32_t { ANALYTICAL_BACKEND = 0 };
enum Status : std::int32_t {
    IN_PROG = 1,
    SUCCESS = 0,
    NOT_POSTED = -1,
    INVALID_PARAM = -2,
    BACKEND = -3,
    NOT_FOUND = -4,
    MISMATCH = -5,
    NOT_ALLOWED = -6,
    REPOST_ACTIVE = -7,
    UNKNOWN = -8,
    NOT_SUPPORTED = -9,
    REMOTE_DISCONNECT = -10,
    CANCELED = -11,
    NO_TELEMETRY = -12,
};

using Params = std::unordered_map<std::string, std::string>;
using MemList = std::vector<Mem>;
// Sender and message of each notification.
using NotifList = std::vector<std::pair<std::string, std::string>>;
using QueryAnswer = std::optional<Params>;

// A backend's data about memory: opaque to the agent, which compares pointers and passes them back.
class BackendMD {
public:
    explicit BackendMD(bool is_private) : is_private_(is_private) {}
    virtual ~BackendMD() = default;

private:
    [[maybe_unused]] bool is_private_;
};

class BackendReqH {
public:
    virtual ~BackendReqH() = default;
};

struct BasicDesc {
    std::uintptr_t addr;
    std::size_t len;
    std::uint64_t devId;
};

struct MetaDesc : BasicDesc {
    BackendMD *metadataP;
};

struct RemoteMetaDesc : MetaDesc {
    std::string remoteAgent;
};

struct BlobDesc : BasicDesc {
    std::string metaInfo;
};

// A view of the agent's lists, which have virtual functions of their own: read, never created.
template <typename Desc>
class DescList {
public:
    DescList() = delete;
    DescList(const DescList &) = delete;
    Mem getType() const { return type_; }
    int descCount() const { return static_cast<int>(descs_.size()); }
    const Desc &operator[](std::size_t index) const { return descs_[index]; }

private:
    friend struct Layout;
    [[maybe_unused]] const void *vtable_;
    Mem type_;
    std::vector<Desc> descs_;
};

using MetaList = DescList<MetaDesc>;
using RemoteMetaList = DescList<RemoteMetaDesc>;
using BlobList = DescList<BlobDesc>;

struct OptionalArgs {
    std::string notifMsg;
    bool hasNotif = false;  // an empty message is a notification too
    std::string customParam;
};

// The agent's own options; opaque here.
struct AgentOptions;

struct InitParams {
    std::string localAgent;
    std::string type;
    Params *customParams;
    bool enableProgTh;
    std::uint64_t pthrDelay;
    ThreadSync syncMode;
    bool enableTelemetry;
};

// The base class of an engine. libnixl reads backendType, customParams and initErr at their
// offsets, and calls the virtual functions by position.
class BackendEngine {
public:
    explicit BackendEngine(const InitParams *params)
        : backend_type_(params->type),
          custom_params_(*params->customParams),
          localAgent(params->localAgent),
          enable_telemetry_(params->enableTelemetry)
    {
    }
    BackendEngine(const BackendEngine &) = delete;
    BackendEngine &operator=(const BackendEngine &) = delete;

    virtual ~BackendEngine() = default;

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual MemList getSupportedMems() const = 0;

    virtual Status registerMem(const BlobDesc &mem, const Mem &type, BackendMD *&out) = 0;
    virtual Status deregisterMem(BackendMD *md) = 0;

    virtual Status connect(const std::string &agent) = 0;
    virtual Status disconnect(const std::string &agent) = 0;
    virtual Status unloadMD(BackendMD *md) = 0;

    virtual Status prepXfer(const Op &op, const MetaList &local, const MetaList &remote,
                            const std::string &agent, BackendReqH *&handle,
                            const OptionalArgs *args) const = 0;
    virtual Status postXfer(const Op &op, const MetaList &local, const MetaList &remote,
                            const std::string &agent, BackendReqH *&handle,
                            const OptionalArgs *args) const = 0;
    virtual Status checkXfer(BackendReqH *handle) const = 0;
    virtual Status releaseReqH(BackendReqH *handle) const = 0;

    // Memory views, for code that runs on a GPU.
    virtual Status prepMemView(const RemoteMetaList &, void *&, const OptionalArgs *) const
    {
        return NOT_SUPPORTED;
    }
    virtual Status prepMemView(const MetaList &, void *&, const OptionalArgs *) const
    {
        return NOT_SUPPORTED;
    }
    virtual void releaseMemView(void *) const {}

    virtual Status getPublicData(const BackendMD *, std::string &) const { return BACKEND; }
    virtual Status getConnInfo(std::string &) const { return BACKEND; }
    virtual Status loadRemoteConnInfo(const std::string &, const std::string &) { return BACKEND; }
    virtual Status loadRemoteMD(const BlobDesc &, const Mem &, const std::string &, BackendMD *&)
    {
        return BACKEND;
    }
    virtual Status loadLocalMD(BackendMD *, BackendMD *&) { return BACKEND; }

    virtual Status getNotifs(NotifList &) { return BACKEND; }
    virtual Status genNotif(const std::string &, const std::string &) const { return BACKEND; }

    // Tells whether files and objects exist.
    virtual Status queryMem(const BlobList &, std::vector<QueryAnswer> &) const
    {
        return NOT_SUPPORTED;
    }
    virtual Status estimateXferCost(const Op &, const MetaList &, const MetaList &,
                                    const std::string &, BackendReqH *const &,
                                    std::chrono::microseconds &, std::chrono::microseconds &,
                                    Cost &, const AgentOptions *) const
    {
        return NOT_SUPPORTED;
    }

private:
    friend struct Layout;
    struct TelemetryEvent;

    std::string backend_type_;
    Params custom_params_;
    // Events for NIXL's telemetry. No version of NIXL reads them (tests/nixl/test_telemetry.py), so
    // the list stays empty.
    std::vector<TelemetryEvent *> telemetry_events_;
    std::mutex telemetry_mutex_;

protected:
    // Adds to the result of get_backend_params.
    Status setInitParam(const std::string &key, const std::string &value)
    {
        return custom_params_.emplace(key, value).second ? SUCCESS : NOT_ALLOWED;
    }

    bool initErr = false;
    const std::string localAgent;

private:
    [[maybe_unused]] const bool enable_telemetry_;
};

struct BackendPlugin {
    int api_version;
    BackendEngine *(*create_engine)(const InitParams *);
    void (*destroy_engine)(BackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    Params (*get_backend_options)();
    MemList (*get_backend_mems)();
};

#if defined(__x86_64__) && defined(__GLIBCXX__)
static_assert(_GLIBCXX_USE_CXX11_ABI, "libnixl has the C++11 strings");

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
struct Layout {
    static_assert(sizeof(BasicDesc) == 24 && offsetof(BasicDesc, devId) == 16);
    static_assert(sizeof(MetaDesc) == 32 && offsetof(MetaDesc, metadataP) == 24);
    static_assert(sizeof(BlobDesc) == 56 && offsetof(BlobDesc, metaInfo) == 24);
    static_assert(sizeof(RemoteMetaDesc) == 64 && offsetof(RemoteMetaDesc, remoteAgent) == 32);
    static_assert(sizeof(MetaList) == 40 && offsetof(MetaList, type_) == 8);
    static_assert(offsetof(MetaList, descs_) == 16);
    static_assert(sizeof(OptionalArgs) == 72 && offsetof(OptionalArgs, hasNotif) == 32);
    static_assert(offsetof(OptionalArgs, customParam) == 40);
    static_assert(sizeof(BackendMD) == 16 && sizeof(BackendReqH) == 8);
    static_assert(sizeof(InitParams) == 96 && offsetof(InitParams, type) == 32);
    static_assert(offsetof(InitParams, customParams) == 64 && offsetof(InitParams, enableProgTh) == 72);
    static_assert(offsetof(InitParams, pthrDelay) == 80 && offsetof(InitParams, syncMode) == 88);
    static_assert(offsetof(InitParams, enableTelemetry) == 92);
    static_assert(sizeof(BackendEngine) == 208 && offsetof(BackendEngine, backend_type_) == 8);
    static_assert(offsetof(BackendEngine, custom_params_) == 40);
    static_assert(offsetof(BackendEngine, telemetry_events_) == 96);
    static_assert(offsetof(BackendEngine, telemetry_mutex_) == 120);
    static_assert(offsetof(BackendEngine, initErr) == 160);
    static_assert(offsetof(BackendEngine, localAgent) == 168);
    static_assert(offsetof(BackendEngine, enable_telemetry_) == 200);
    static_assert(sizeof(BackendPlugin) == 56 && offsetof(BackendPlugin, create_engine) == 8);
    static_assert(offsetof(BackendPlugin, get_backend_mems) == 48);
};
#pragma GCC diagnostic pop
#endif

}  // namespace nixl

#endif  // TCPX_NIXL_HEADERS
