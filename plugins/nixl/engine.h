// A NIXL backend engine over one tcpx session. It only converts calls: the library decides what
// they mean and when they are allowed.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "handles.h"
#include "nixl_abi.h"

namespace tcpx {

class Request;

class Engine final : public nixl::BackendEngine {
public:
    // Throws std::runtime_error with a message for the user.
    explicit Engine(const nixl::InitParams *params);
    ~Engine() override;

    // Returns the settings with their defaults; loaded as UCX, UCX's too.
    static nixl::Params options();
    static nixl::MemList memories() { return {nixl::DRAM, nixl::VRAM}; }

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl::MemList getSupportedMems() const override { return memories(); }

    nixl::Status registerMem(const nixl::BlobDesc &mem, const nixl::Mem &type,
                             nixl::BackendMD *&out) override;
    nixl::Status deregisterMem(nixl::BackendMD *md) override;
    nixl::Status getPublicData(const nixl::BackendMD *md, std::string &out) const override;
    nixl::Status loadLocalMD(nixl::BackendMD *in, nixl::BackendMD *&out) override;
    nixl::Status loadRemoteMD(const nixl::BlobDesc &in, const nixl::Mem &type,
                              const std::string &agent, nixl::BackendMD *&out) override;
    nixl::Status unloadMD(nixl::BackendMD *md) override;

    nixl::Status getConnInfo(std::string &out) const override;
    nixl::Status loadRemoteConnInfo(const std::string &agent, const std::string &info) override;
    nixl::Status connect(const std::string &agent) override;
    nixl::Status disconnect(const std::string &agent) override;

    nixl::Status prepXfer(const nixl::Op &op, const nixl::MetaList &local,
                          const nixl::MetaList &remote, const std::string &agent,
                          nixl::BackendReqH *&handle,
                          const nixl::OptionalArgs *args) const override;
    nixl::Status postXfer(const nixl::Op &op, const nixl::MetaList &local,
                          const nixl::MetaList &remote, const std::string &agent,
                          nixl::BackendReqH *&handle,
                          const nixl::OptionalArgs *args) const override;
    nixl::Status checkXfer(nixl::BackendReqH *handle) const override;
    nixl::Status releaseReqH(nixl::BackendReqH *handle) const override;
    nixl::Status estimateXferCost(const nixl::Op &op, const nixl::MetaList &local,
                                  const nixl::MetaList &remote, const std::string &agent,
                                  nixl::BackendReqH *const &handle,
                                  std::chrono::microseconds &duration,
                                  std::chrono::microseconds &margin, nixl::Cost &method,
                                  const nixl::AgentOptions *options) const override;

    nixl::Status getNotifs(nixl::NotifList &out) override;
    nixl::Status genNotif(const std::string &agent, const std::string &message) const override;

private:
    using SharedPeer = std::shared_ptr<tcpx_peer>;

    // Returns the current peer of an agent's name; null if there is none.
    SharedPeer peer(const std::string &agent) const;

    // True if created under the name UCX: the engine stands in for NIXL's UCX backend.
    const bool as_ucx_;
    Session session_;
    SharedPeer self_;

    mutable std::shared_mutex peers_lock_;
    std::unordered_map<std::string, SharedPeer> peers_;

    // Requests that were not released. Agents that end do not release theirs: the engine does.
    mutable std::mutex requests_lock_;
    mutable std::unordered_map<nixl::BackendReqH *, std::unique_ptr<Request>> requests_;
};

}  // namespace tcpx
