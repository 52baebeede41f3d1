// Owning wrappers of the C library's handles.
#pragma once

#include <memory>
#include <string>

#include <tcpx_p2p.h>

namespace tcpx {

template <auto Free>
struct Freed {
    template <typename Handle>
    void operator()(Handle *handle) const noexcept
    {
        Free(handle);
    }
};

using Config = std::unique_ptr<tcpx_config, Freed<tcpx_config_free>>;
using Session = std::unique_ptr<tcpx_session, Freed<tcpx_session_free>>;
using Peer = std::unique_ptr<tcpx_peer, Freed<tcpx_peer_free>>;
using Region = std::unique_ptr<tcpx_region, Freed<tcpx_region_free>>;
using RemoteRegion = std::unique_ptr<tcpx_remote_region, Freed<tcpx_remote_region_free>>;
using Transfer = std::unique_ptr<tcpx_transfer, Freed<tcpx_transfer_free>>;

// Receives a handle: an argument for an output of the library, like std::out_ptr of C++23.
template <typename Owner>
class Out {
public:
    explicit Out(Owner &owner) : owner_(owner) {}
    Out(const Out &) = delete;
    Out &operator=(const Out &) = delete;
    ~Out() { owner_.reset(handle_); }

    operator typename Owner::pointer *() { return &handle_; }

private:
    Owner &owner_;
    typename Owner::pointer handle_ = nullptr;
};

template <typename Owner>
Out<Owner> out(Owner &owner)
{
    return Out<Owner>(owner);
}

// Bytes allocated by the library.
class Bytes {
public:
    Bytes() = default;
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;
    ~Bytes() { tcpx_bytes_free(bytes_); }

    tcpx_bytes *out() { return &bytes_; }
    const void *data() const { return bytes_.data; }
    std::size_t size() const { return bytes_.len; }
    std::string str() const { return {reinterpret_cast<const char *>(bytes_.data), bytes_.len}; }

private:
    tcpx_bytes bytes_{nullptr, 0};
};

}  // namespace tcpx
