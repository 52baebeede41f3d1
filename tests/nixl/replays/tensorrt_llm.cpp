// The NIXL calls of TensorRT-LLM's transfer agent, reimplemented for test_tensorrt_llm.py.
//
// Functions that return an int return NIXL's status. The caller is one thread.
#include "nixl_api.h"

namespace {

// A descriptor, as Python passes it.
struct Row {
    uint64_t address, length, device;
};

nixl_xfer_dlist_t transfer_list(int memory, const Row *rows, size_t count)
{
    nixl_xfer_dlist_t list{static_cast<nixl_mem_t>(memory)};
    for (size_t i = 0; i < count; i++) {
        list.addDesc(nixlBasicDesc{rows[i].address, rows[i].length, rows[i].device});
    }
    return list;
}

nixl_reg_dlist_t registration_list(int memory, const Row *rows, size_t count)
{
    nixl_reg_dlist_t list{static_cast<nixl_mem_t>(memory)};
    for (size_t i = 0; i < count; i++) {
        list.addDesc(nixlBlobDesc{rows[i].address, rows[i].length, rows[i].device});
    }
    return list;
}

nixlAgentConfig config_for(uint16_t port)
{
    nixlAgentConfig config;
    config.useProgThread = true;
    config.useListenThread = port != 0;
    config.listenPort = port;
    config.lthrDelay = 10000;
    return config;
}

struct TransferAgent {
    explicit TransferAgent(const char *name, uint16_t port) : agent(name, config_for(port)) {}
    nixlAgent agent;
    nixl_opt_args_t args;
};

}  // namespace

extern "C" {

// Creates an agent, with a listener if there is a port; returns null if the backend cannot be
// created.
TransferAgent *agent_new(const char *name, uint16_t port, const char *backend)
{
    auto *self = new TransferAgent(name, port);
    nixl_b_params_t params;
    nixl_mem_list_t mems;
    nixlBackendH *handle = nullptr;
    // The plugin's defaults, which the user's parameters would override.
    if (self->agent.getPluginParams(backend, mems, params) != NIXL_SUCCESS ||
        self->agent.createBackend(backend, params, handle) != NIXL_SUCCESS || !handle) {
        delete self;
        return nullptr;
    }
    self->args.backends.push_back(handle);
    return self;
}

void agent_free(TransferAgent *self) { delete self; }

int agent_register(TransferAgent *self, int memory, const Row *rows, size_t count)
{
    const auto status = self->agent.registerMem(registration_list(memory, rows, count), &self->args);
    std::string metadata;
    return status == NIXL_SUCCESS ? self->agent.getLocalMD(metadata) : status;
}

int agent_deregister(TransferAgent *self, int memory, const Row *rows, size_t count)
{
    return self->agent.deregisterMem(registration_list(memory, rows, count), &self->args);
}

// Passes metadata to `take`.
int agent_metadata(TransferAgent *self, void (*take)(const char *, size_t))
{
    std::string metadata;
    const auto status = self->agent.getLocalMD(metadata);
    take(metadata.data(), metadata.size());
    return status;
}

// Loads metadata, which must be that of the named agent.
int agent_load(TransferAgent *self, const char *name, const char *metadata, size_t length)
{
    std::string loaded;
    const auto status = self->agent.loadRemoteMD(std::string(metadata, length), loaded);
    return status == NIXL_SUCCESS && loaded != name ? NIXL_ERR_NOT_FOUND : status;
}

int agent_invalidate(TransferAgent *self, const char *name)
{
    return self->agent.invalidateRemoteMD(name);
}

// Requests the metadata of another agent from its listener; agent_knows reports its arrival.
int agent_fetch(TransferAgent *self, const char *name, const char *ip, uint16_t port)
{
    nixl_opt_args_t args;
    args.ipAddr = ip;
    args.port = port;
    return self->agent.fetchRemoteMD(name, &args);
}

// Returns whether an agent is known; with descriptors, whether its memory there is.
int agent_knows(TransferAgent *self, const char *name, int memory, const Row *rows, size_t count)
{
    return self->agent.checkRemoteMD(name, transfer_list(memory, rows, count));
}

int agent_notify(TransferAgent *self, const char *name, const char *message, size_t length)
{
    return self->agent.genNotif(name, std::string(message, length));
}

// Passes each new notification to `take`: the sender, the message.
int agent_notifications(TransferAgent *self, void (*take)(const char *, const char *, size_t))
{
    nixl_notifs_t notifications;
    const auto status = self->agent.getNotifs(notifications);
    for (const auto &[sender, messages] : notifications) {
        for (const auto &message : messages) {
            take(sender.c_str(), message.data(), message.size());
        }
    }
    return status;
}

// Creates and posts a request; returns null if it could not be created. The status is that of the
// post. `message` may be null.
nixlXferReqH *agent_submit(TransferAgent *self, int op, int memory, const Row *local,
                           const Row *remote, size_t count, const char *name, const char *message)
{
    nixl_opt_args_t args = self->args;
    args.hasNotif = message != nullptr;
    if (message) {
        args.notifMsg = message;
    }
    nixlXferReqH *handle = nullptr;
    if (self->agent.createXferReq(static_cast<nixl_xfer_op_t>(op), transfer_list(memory, local, count),
                                  transfer_list(memory, remote, count), name, handle,
                                  &args) != NIXL_SUCCESS) {
        return nullptr;
    }
    (void)self->agent.postXferReq(handle, &args);
    return handle;
}

int agent_status(TransferAgent *self, nixlXferReqH *handle)
{
    return self->agent.getXferStatus(handle);
}

int agent_release(TransferAgent *self, nixlXferReqH *handle)
{
    return self->agent.releaseXferReq(handle);
}
}
