// The parts of NIXL's C++ API that the replays use: names, layouts and the order of virtual
// functions, as in libnixl 1.0 to 1.5 on x86-64. The wheels contain the libraries, but no headers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

// NIXL 1.0 and 1.1 have an int here, later ones 16 bits.
#ifndef NIXL_LISTEN_PORT
#error "define NIXL_LISTEN_PORT as the type of the listener's port"
#endif

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum nixl_status_t { NIXL_IN_PROG = 1, NIXL_SUCCESS = 0, NIXL_ERR_NOT_FOUND = -4 };
enum class nixl_thread_sync_t { NONE, STRICT, RW };

class nixlAgentData;
class nixlBackendH;
class nixlXferReqH;

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_notifs_t = std::unordered_map<std::string, std::vector<std::string>>;

class nixlBasicDesc {
public:
    nixlBasicDesc(const uintptr_t &addr, const size_t &len, const uint64_t &devId);
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};

class nixlBlobDesc : public nixlBasicDesc {
public:
    using nixlBasicDesc::nixlBasicDesc;
    std::string metaInfo;
};

template <class T>
class nixlDescList {
public:
    nixlDescList(const nixl_mem_t &type, const int &size = 0);
    virtual ~nixlDescList();
    virtual void resize(const size_t &count);
    virtual void addDesc(const T &desc);
    virtual int getIndex(const nixlBasicDesc &query) const;

protected:
    nixl_mem_t type;
    std::vector<T> descs;
};
extern template class nixlDescList<nixlBasicDesc>;
extern template class nixlDescList<nixlBlobDesc>;
using nixl_xfer_dlist_t = nixlDescList<nixlBasicDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;

struct nixlAgentConfig {
    bool useProgThread = false;
    bool useListenThread = false;
    NIXL_LISTEN_PORT listenPort = 0;
    nixl_thread_sync_t syncMode = nixl_thread_sync_t::NONE;
    bool captureTelemetry = false;
    uint64_t pthrDelay = 0;
    uint64_t lthrDelay = 100000;
    std::chrono::microseconds etcdWatchTimeout{5000000};
};

struct nixlAgentOptionalArgs {
    std::vector<nixlBackendH *> backends;
    std::optional<std::string> notif;
    std::string notifMsg;
    bool hasNotif = false;
    bool skipDescMerge = false;
    bool includeConnInfo = false;
    std::string ipAddr;
    int port = 8888;
    std::string metadataLabel;
    std::string customParam;
};
using nixl_opt_args_t = nixlAgentOptionalArgs;

class nixlAgent {
public:
    nixlAgent(const std::string &name, const nixlAgentConfig &config);
    ~nixlAgent();
    nixlAgent(const nixlAgent &) = delete;
    nixlAgent &operator=(const nixlAgent &) = delete;

    nixl_status_t getPluginParams(const std::string &type, nixl_mem_list_t &mems,
                                  nixl_b_params_t &params) const;
    nixl_status_t createBackend(const std::string &type, const nixl_b_params_t &params,
                                nixlBackendH *&backend);
    nixl_status_t registerMem(const nixl_reg_dlist_t &descs, const nixl_opt_args_t *args = nullptr);
    nixl_status_t deregisterMem(const nixl_reg_dlist_t &descs, const nixl_opt_args_t *args = nullptr);
    nixl_status_t createXferReq(const nixl_xfer_op_t &op, const nixl_xfer_dlist_t &local,
                                const nixl_xfer_dlist_t &remote, const std::string &agent,
                                nixlXferReqH *&handle, const nixl_opt_args_t *args = nullptr) const;
    nixl_status_t postXferReq(nixlXferReqH *handle, const nixl_opt_args_t *args = nullptr) const;
    nixl_status_t getXferStatus(nixlXferReqH *handle) const;
    nixl_status_t releaseXferReq(nixlXferReqH *handle) const;
    nixl_status_t getNotifs(nixl_notifs_t &notifs, const nixl_opt_args_t *args = nullptr);
    nixl_status_t genNotif(const std::string &agent, const std::string &message,
                           const nixl_opt_args_t *args = nullptr) const;
    nixl_status_t getLocalMD(std::string &metadata) const;
    nixl_status_t loadRemoteMD(const std::string &metadata, std::string &agent);
    nixl_status_t invalidateRemoteMD(const std::string &agent);
    nixl_status_t fetchRemoteMD(const std::string agent, const nixl_opt_args_t *args = nullptr);
    nixl_status_t checkRemoteMD(const std::string agent, const nixl_xfer_dlist_t &descs) const;

private:
    nixlAgentData *data;  // owned, by a std::unique_ptr there
};
