#include "engine.h"

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "standin.h"

namespace tcpx {

// NIXL's description of a region, the same at its owner and at peers.
struct Kind {
    Kind(const nixl::Mem &type, std::uint64_t device)
        : memory(type == nixl::VRAM ? TCPX_MEMORY_CUDA : TCPX_MEMORY_HOST),
          // NIXL's device has no meaning for host memory.
          device(type == nixl::VRAM ? static_cast<std::uint32_t>(device) : 0)
    {
    }
    std::uint32_t memory;
    std::uint32_t device;
};

// Memory of this agent, as a transfer's local side.
class LocalMD final : public nixl::BackendMD {
public:
    LocalMD(Region region, Kind kind)
        : nixl::BackendMD(true), region(std::move(region)), kind(kind)
    {
    }
    static const LocalMD &of(const nixl::BackendMD *md) { return *static_cast<const LocalMD *>(md); }
    const Region region;
    const Kind kind;
};

// Memory of a peer, or of this agent for transfers to itself, as a transfer's remote side.
class RemoteMD final : public nixl::BackendMD {
public:
    explicit RemoteMD(RemoteRegion region) : nixl::BackendMD(false), region(std::move(region)) {}
    static const RemoteMD &of(const nixl::BackendMD *md) { return *static_cast<const RemoteMD *>(md); }
    const RemoteRegion region;
};

class Request final : public nixl::BackendReqH {
public:
    explicit Request(Transfer transfer) : transfer(std::move(transfer)) {}
    static const tcpx_transfer *of(const nixl::BackendReqH *handle)
    {
        return handle ? static_cast<const Request *>(handle)->transfer.get() : nullptr;
    }
    const Transfer transfer;
};

namespace {

// The one setting that NIXL determines: the agent's name.
constexpr const char *NAME = "name";

// Converts the library's status into NIXL's. No other code does.
nixl::Status status(tcpx_status status)
{
    switch (status) {
    case TCPX_OK:
        return nixl::SUCCESS;
    case TCPX_ERROR_INVALID_ARGUMENT:
        return nixl::INVALID_PARAM;
    case TCPX_ERROR_NOT_FOUND:
        return nixl::NOT_FOUND;
    case TCPX_ERROR_NOT_ALLOWED:
    case TCPX_ERROR_FORKED:
        return nixl::NOT_ALLOWED;
    case TCPX_ERROR_BUSY:
        return nixl::REPOST_ACTIVE;
    case TCPX_ERROR_NOT_SUPPORTED:
        return nixl::NOT_SUPPORTED;
    case TCPX_ERROR_ABORTED:
        return nixl::CANCELED;
    case TCPX_ERROR_DISCONNECTED:
    // The peer no longer matches its metadata. An agent that ends deregisters its memory before it
    // disconnects, and NIXL expects one status for both: remove the peer, load its metadata again.
    case TCPX_ERROR_REGION_GONE:
        return nixl::REMOTE_DISCONNECT;
    case TCPX_ERROR_INTERNAL:
        return nixl::UNKNOWN;
    case TCPX_ERROR_TIMEOUT:
    case TCPX_ERROR_REFUSED:
    case TCPX_ERROR_TRUNCATED:
    case TCPX_ERROR_ENVIRONMENT:
    case TCPX_ERROR_CLOSED:
    case TCPX_ERROR_PROTOCOL:
        return nixl::BACKEND;
    }
    return nixl::UNKNOWN;
}

// Converts a status and logs the message, since NIXL returns only the status.
nixl::Status reported(const char *what, tcpx_status result)
{
    if (result != TCPX_OK) {
        tcpx_log_warning(what, tcpx_last_error());
    }
    return status(result);
}

// Reports a failure to use data from a peer. Under the name UCX, NIXL's own UCX may have sent it.
nixl::Status reported_foreign(const char *what, tcpx_status result, bool as_ucx)
{
    if (as_ucx && result == TCPX_ERROR_INVALID_ARGUMENT) {
        tcpx_log_warning(what, standin::MIXED);
        return nixl::MISMATCH;
    }
    return reported(what, result);
}

// Runs a method and catches exceptions of the C++ library (out of memory): the agent catches none.
template <typename Method>
nixl::Status guarded(Method method) noexcept
{
    try {
        return method();
    } catch (...) {
        return nixl::BACKEND;
    }
}

// Returns whether the session belongs to this process, and reports it if not: a forked child must
// not wait for locks that its parent's threads held. Called before any lock is taken.
bool is_here(const tcpx_session *session)
{
    const auto result = tcpx_session_check(session);
    if (result == TCPX_ERROR_FORKED) {
        (void)reported("the backend cannot be used", result);
    }
    return result != TCPX_ERROR_FORKED;
}

void require(tcpx_status status)
{
    if (status != TCPX_OK) {
        throw std::runtime_error(tcpx_last_error());
    }
}

// Creates the session's configuration. Adds UCX parameters without a meaning here to `unused`.
Config config_for(const nixl::InitParams &params, std::string &unused)
{
    Config config;
    require(tcpx_config_from_env(out(config)));
    const bool as_ucx = params.type == standin::UCX;
    if (as_ucx) {
        unused = standin::apply(*params.customParams, config.get());
    }
    for (const auto &[key, value] : *params.customParams) {
        if (as_ucx && standin::knows(key)) {
            continue;
        }
        if (key == NAME) {
            throw std::runtime_error("the parameter \"name\" cannot be set: a session has its agent's name");
        }
        require(tcpx_config_set(config.get(), key.c_str(), value.c_str()));
    }
    require(tcpx_config_set(config.get(), NAME, params.localAgent.c_str()));
    return config;
}

nixl::Params rows_of(const tcpx_config *config)
{
    nixl::Params rows;
    const auto add = [](void *rows, const tcpx_config_row *row) noexcept {
        if (row->key != std::string_view(NAME)) {
            static_cast<nixl::Params *>(rows)->emplace(row->key, row->value);
        }
    };
    require(tcpx_config_each(config, add, &rows));
    return rows;
}

// Creates the remote side of a transfer from a region that was read.
nixl::Status loaded(tcpx_status result, RemoteRegion region, bool as_ucx, nixl::BackendMD *&md)
{
    if (result == TCPX_OK) {
        md = new RemoteMD(std::move(region));
    }
    return reported_foreign("cannot load a peer's memory", result, as_ucx);
}

}  // namespace

Engine::Engine(const nixl::InitParams *params)
    : nixl::BackendEngine(params), as_ucx_(params->type == standin::UCX)
{
    std::string unused;
    const Config config = config_for(*params, unused);
    require(tcpx_session_new(config.get(), out(session_)));
    standin::report_unused(unused);
    Peer self;
    require(tcpx_session_own_peer(session_.get(), out(self)));
    self_ = std::move(self);
    // The agent shows these as the backend's parameters.
    for (const auto &[key, value] : rows_of(config.get())) {
        (void)setInitParam(key, value);
    }
}

Engine::~Engine() = default;

nixl::Params Engine::options()
{
    // Includes the environment, so that passing the options back does not undo it. Creating an
    // engine reports an invalid environment.
    Config config;
    if (tcpx_config_from_env(out(config)) != TCPX_OK) {
        require(tcpx_config_defaults(out(config)));
    }
    nixl::Params rows = rows_of(config.get());
    if (standin::loaded_as() == standin::UCX) {
        rows.merge(standin::options());
    }
    return rows;
}

// Memory

nixl::Status Engine::registerMem(const nixl::BlobDesc &mem, const nixl::Mem &type,
                                 nixl::BackendMD *&out)
{
    return guarded([&] {
        if (type != nixl::DRAM && type != nixl::VRAM) {
            return nixl::NOT_SUPPORTED;
        }
        const Kind kind(type, mem.devId);
        Region region;
        const auto result =
            tcpx_session_register(session_.get(), reinterpret_cast<void *>(mem.addr), mem.len,
                                  kind.memory, kind.device, tcpx::out(region));
        if (result == TCPX_OK) {
            out = new LocalMD(std::move(region), kind);
        }
        return reported("cannot register memory", result);
    });
}

nixl::Status Engine::deregisterMem(nixl::BackendMD *md)
{
    delete md;
    return nixl::SUCCESS;
}

nixl::Status Engine::getPublicData(const nixl::BackendMD *md, std::string &out) const
{
    return guarded([&] {
        Bytes descriptor;
        // The short descriptor: address, length and kind are in NIXL's own part of the metadata.
        const auto &local = LocalMD::of(md);
        const auto result = tcpx_region_short_descriptor(local.region.get(), local.kind.memory,
                                                         local.kind.device, descriptor.out());
        if (result == TCPX_OK) {
            out = descriptor.str();
        }
        return reported("cannot describe memory", result);
    });
}

nixl::Status Engine::loadLocalMD(nixl::BackendMD *in, nixl::BackendMD *&out)
{
    return guarded([&] {
        RemoteRegion region;
        const auto result = tcpx_region_as_remote(LocalMD::of(in).region.get(), tcpx::out(region));
        return loaded(result, std::move(region), as_ucx_, out);
    });
}

nixl::Status Engine::loadRemoteMD(const nixl::BlobDesc &in, const nixl::Mem &type,
                                  const std::string &, nixl::BackendMD *&out)
{
    return guarded([&] {
        const Kind kind(type, in.devId);
        RemoteRegion region;
        const auto result =
            tcpx_remote_region_from_short(in.metaInfo.data(), in.metaInfo.size(), in.addr, in.len,
                                          kind.memory, kind.device, tcpx::out(region));
        return loaded(result, std::move(region), as_ucx_, out);
    });
}

nixl::Status Engine::unloadMD(nixl::BackendMD *md)
{
    delete md;
    return nixl::SUCCESS;
}

// Peers

nixl::Status Engine::getConnInfo(std::string &out) const
{
    return guarded([&] {
        Bytes info;
        const auto result = tcpx_session_connection_info(session_.get(), info.out());
        if (result == TCPX_OK) {
            out = as_ucx_ ? standin::wrap(info.str()) : info.str();
        }
        return reported("cannot describe the session", result);
    });
}

nixl::Status Engine::loadRemoteConnInfo(const std::string &agent, const std::string &info)
{
    return guarded([&] {
        Peer peer;
        const auto own = as_ucx_ ? standin::unwrap(info) : std::string_view(info);
        const auto result =
            tcpx_session_add_peer(session_.get(), own.data(), own.size(), out(peer));
        if (result == TCPX_OK) {
            const std::unique_lock lock(peers_lock_);
            peers_.insert_or_assign(agent, std::move(peer));
        }
        return reported_foreign("cannot load a peer", result, as_ucx_);
    });
}

Engine::SharedPeer Engine::peer(const std::string &agent) const
{
    if (agent == localAgent) {
        return self_;
    }
    {
        const std::shared_lock lock(peers_lock_);
        if (const auto known = peers_.find(agent); known != peers_.end()) {
            return known->second;
        }
    }
    // The application may have loaded the agent's memory without its connection info: the agent has
    // then connected to this one, or will.
    Peer found;
    (void)tcpx_session_find_peer(session_.get(), agent.c_str(), out(found));
    return found;
}

nixl::Status Engine::connect(const std::string &agent)
{
    return guarded([&] {
        if (!is_here(session_.get())) {
            return nixl::NOT_ALLOWED;
        }
        const SharedPeer peer = this->peer(agent);
        if (!peer) {
            return nixl::NOT_FOUND;
        }
        // Limited by the setting connect_timeout.
        constexpr auto forever = std::numeric_limits<std::uint64_t>::max();
        return reported("cannot connect", tcpx_peer_connect(peer.get(), forever));
    });
}

nixl::Status Engine::disconnect(const std::string &agent)
{
    return guarded([&] {
        if (!is_here(session_.get())) {
            return nixl::NOT_ALLOWED;
        }
        SharedPeer peer;
        {
            const std::unique_lock lock(peers_lock_);
            if (auto known = peers_.extract(agent)) {
                peer = std::move(known.mapped());
            }
        }
        return peer ? status(tcpx_session_remove_peer(session_.get(), peer.get())) : nixl::NOT_FOUND;
    });
}

// Transfers

nixl::Status Engine::prepXfer(const nixl::Op &op, const nixl::MetaList &local,
                              const nixl::MetaList &remote, const std::string &agent,
                              nixl::BackendReqH *&handle, const nixl::OptionalArgs *) const
{
    return guarded([&] {
        if (!is_here(session_.get())) {
            return nixl::NOT_ALLOWED;
        }
        const SharedPeer peer = this->peer(agent);
        if (!peer) {
            return nixl::NOT_FOUND;
        }
        const auto count = static_cast<std::size_t>(local.descCount());
        if (static_cast<std::size_t>(remote.descCount()) != count) {
            return nixl::INVALID_PARAM;
        }
        std::vector<tcpx_segment> segments(count);
        for (std::size_t i = 0; i < count; i++) {
            segments[i] = {
                .local = LocalMD::of(local[i].metadataP).region.get(),
                .local_address = local[i].addr,
                .remote = RemoteMD::of(remote[i].metadataP).region.get(),
                .remote_address = remote[i].addr,
                .length = local[i].len,
            };
        }
        Transfer transfer;
        const auto result =
            tcpx_session_prepare(session_.get(), op == nixl::READ ? TCPX_READ : TCPX_WRITE,
                                 peer.get(), segments.data(), count, out(transfer));
        if (result == TCPX_OK) {
            auto request = std::make_unique<Request>(std::move(transfer));
            nixl::BackendReqH *const token = request.get();
            const std::lock_guard lock(requests_lock_);
            requests_.emplace(token, std::move(request));
            handle = token;
        }
        return reported("cannot prepare a transfer", result);
    });
}

nixl::Status Engine::postXfer(const nixl::Op &, const nixl::MetaList &, const nixl::MetaList &,
                              const std::string &, nixl::BackendReqH *&handle,
                              const nixl::OptionalArgs *args) const
{
    const tcpx_transfer *transfer = Request::of(handle);
    const bool notify = args && args->hasNotif;
    const auto result = notify ? tcpx_transfer_post_with_notification(
                                     transfer, args->notifMsg.data(), args->notifMsg.size())
                               : tcpx_transfer_post(transfer);
    return result == TCPX_OK ? nixl::IN_PROG : reported("cannot post a transfer", result);
}

nixl::Status Engine::checkXfer(nixl::BackendReqH *handle) const
{
    const tcpx_transfer *transfer = Request::of(handle);
    tcpx_state state{};
    if (const auto result = tcpx_transfer_poll(transfer, &state); result != TCPX_OK) {
        return reported("cannot look at a transfer", result);
    }
    switch (state) {
    case TCPX_PREPARED:
        return nixl::NOT_POSTED;
    case TCPX_IN_PROGRESS:
        return nixl::IN_PROG;
    case TCPX_DONE:
        return nixl::SUCCESS;
    case TCPX_FAILED:
        return reported("a transfer failed", tcpx_transfer_error(transfer));
    case TCPX_ABORTING:
    case TCPX_ABORTED:
        return nixl::CANCELED;
    }
    return nixl::UNKNOWN;
}

nixl::Status Engine::releaseReqH(nixl::BackendReqH *handle) const
{
    (void)guarded([&] {
        // Objects inherited by a forked child belong to its parent.
        if (tcpx_session_check(session_.get()) == TCPX_ERROR_FORKED) {
            return nixl::SUCCESS;
        }
        // Destroy the request, which aborts it if needed, after the lock is released.
        const auto request = [&] {
            const std::lock_guard lock(requests_lock_);
            return requests_.extract(handle);
        }();
        return nixl::SUCCESS;
    });
    return nixl::SUCCESS;
}

nixl::Status Engine::estimateXferCost(const nixl::Op &, const nixl::MetaList &,
                                      const nixl::MetaList &, const std::string &,
                                      nixl::BackendReqH *const &handle,
                                      std::chrono::microseconds &duration,
                                      std::chrono::microseconds &margin, nixl::Cost &method,
                                      const nixl::AgentOptions *) const
{
    std::uint64_t duration_us = 0, margin_us = 0;
    const auto result = tcpx_transfer_estimate(Request::of(handle), &duration_us, &margin_us);
    if (result == TCPX_OK) {
        duration = std::chrono::microseconds(duration_us);
        margin = std::chrono::microseconds(margin_us);
        method = nixl::Cost::ANALYTICAL_BACKEND;
    }
    return reported("cannot estimate a transfer", result);
}

// Notifications

nixl::Status Engine::getNotifs(nixl::NotifList &out)
{
    const auto add = [](void *list, const char *from, std::size_t from_len, const std::uint8_t *message,
                        std::size_t message_len) {
        // Out of memory: the message is lost, the process continues.
        (void)guarded([&] {
            static_cast<nixl::NotifList *>(list)->emplace_back(
                std::string(from, from_len),
                std::string(reinterpret_cast<const char *>(message), message_len));
            return nixl::SUCCESS;
        });
    };
    return reported("cannot take notifications",
                    tcpx_session_take_notifications(session_.get(), add, &out));
}

nixl::Status Engine::genNotif(const std::string &agent, const std::string &message) const
{
    return guarded([&] {
        if (!is_here(session_.get())) {
            return nixl::NOT_ALLOWED;
        }
        const SharedPeer peer = this->peer(agent);
        if (!peer) {
            return nixl::NOT_FOUND;
        }
        const auto result =
            tcpx_session_notify(session_.get(), peer.get(), message.data(), message.size());
        const auto answer = reported("cannot send a notification", result);
        // The peer does not keep up; no transfer is involved.
        return result == TCPX_ERROR_BUSY ? nixl::NOT_ALLOWED : answer;
    });
}

}  // namespace tcpx
