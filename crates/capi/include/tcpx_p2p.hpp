/**
 * @file tcpx_p2p.hpp
 * C++17 over tcpx_p2p.h: sessions, transfers and memory descriptors as objects. Header only.
 *
 * A server and a client, each in its own process:
 *
 * @code
 * // server                                          // client
 * tcpx::Session session("server");                   tcpx::Session session("client");
 * std::string info = session.listen();               session.loadRemoteConnInfo("server", info);
 * // info travels by the application's own means     session.connect("server");
 * session.accept("client");                          uint64_t mem = session.registerMemory(source, size);
 * uint64_t mem = session.registerMemory(target, size);
 * auto transfer = session.createTransfer("client");  auto transfer = session.createTransfer("server");
 * transfer.postRecv(mem, 0, size, 99);               transfer.postSend(mem, 0, size, 99);
 * transfer.wait();                                   transfer.wait();
 * @endcode
 *
 * Failures are thrown as tcpx::Error. Objects may be used from any thread; one Transfer by one
 * thread at a time. Destructors release everything; none throws, and only the Session's waits for
 * peers, as Session::close() does.
 */
#ifndef TCPX_P2P_HPP
#define TCPX_P2P_HPP

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tcpx_p2p.h"

namespace tcpx {

/** A duration or timeout. */
using Milliseconds = std::chrono::milliseconds;

/** No time limit. */
inline constexpr Milliseconds forever{-1};

/** A failed call: the status to branch on, and the message. */
class Error : public std::exception {
public:
    /** Creates an error from a status; the message is the calling thread's last error. */
    explicit Error(tcpx_status status) : Error(status, tcpx_last_error()) {}
    /** Creates an error from a status and a message. */
    Error(tcpx_status status, std::string words)
        : status_(status), words_(std::make_shared<std::string>(std::move(words)))
    {
    }
    /** Returns the message. */
    const char *what() const noexcept override { return words_->c_str(); }
    /** Returns the status. */
    tcpx_status status() const noexcept { return status_; }

private:
    tcpx_status status_;
    std::shared_ptr<const std::string> words_;  // shared: copying an exception must not throw
};

namespace detail {

inline void check(tcpx_status status)
{
    if (status != TCPX_OK) {
        throw Error(status);
    }
}

inline std::uint64_t millis(Milliseconds time)
{
    return time < Milliseconds::zero() ? UINT64_MAX : static_cast<std::uint64_t>(time.count());
}

struct Free {
    void operator()(tcpx_config *handle) const noexcept { tcpx_config_free(handle); }
    void operator()(tcpx_session *handle) const noexcept { tcpx_session_free(handle); }
    void operator()(tcpx_peer *handle) const noexcept { tcpx_peer_free(handle); }
    void operator()(tcpx_region *handle) const noexcept { tcpx_region_free(handle); }
    void operator()(tcpx_remote_region *handle) const noexcept { tcpx_remote_region_free(handle); }
    void operator()(tcpx_transfer *handle) const noexcept { tcpx_transfer_free(handle); }
};

template <class T>
using Handle = std::unique_ptr<T, Free>;

inline std::string take(tcpx_bytes bytes)
{
    struct Guard {
        tcpx_bytes bytes;
        ~Guard() { tcpx_bytes_free(bytes); }
    } guard{bytes};
    return std::string(reinterpret_cast<const char *>(bytes.data), bytes.len);
}

/** State shared by a session and its transfers. Handles end in reverse order: the session last. */
struct State {
    Handle<tcpx_session> session;
    std::mutex mutex;
    std::unordered_map<std::string, std::shared_ptr<tcpx_peer>> peers;
    std::unordered_map<std::uint64_t, std::shared_ptr<tcpx_region>> regions;

    std::shared_ptr<tcpx_peer> peer(const std::string &name)
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = peers.find(name);
        if (found == peers.end()) {
            throw Error(TCPX_ERROR_NOT_FOUND,
                        "no remote named \"" + name + "\": load its connection info or accept it first");
        }
        return found->second;
    }

    std::shared_ptr<tcpx_region> region(std::uint64_t mem_id)
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = regions.find(mem_id);
        if (found == regions.end()) {
            throw Error(TCPX_ERROR_NOT_FOUND,
                        "no memory with id " + std::to_string(mem_id) + ": register it first");
        }
        return found->second;
    }
};

}  // namespace detail

/** Returns the version of the library, such as "0.1.0". */
inline std::string version()
{
    return tcpx_version();
}

/** The kind of registered memory. */
enum class Memory : std::uint32_t {
    Host = TCPX_MEMORY_HOST,  ///< Ordinary memory of the process.
    Cuda = TCPX_MEMORY_CUDA,  ///< Memory of a CUDA device.
    Auto = TCPX_MEMORY_AUTO,  ///< Whichever of these the address is.
};

/** The direction of a one-sided transfer. */
enum class Op : std::uint32_t {
    Read = TCPX_READ,    ///< From the peer's memory into ours.
    Write = TCPX_WRITE,  ///< From our memory into the peer's.
};

/** Configuration of a session: defaults of this machine, then the environment, then values set. */
class Config {
public:
    /** Creates the defaults, overridden by the `TCPX_` variables of the environment. */
    Config()
    {
        tcpx_config *config = nullptr;
        detail::check(tcpx_config_from_env(&config));
        config_.reset(config);
    }
    /** Sets one value by its key, such as "lanes". */
    Config &set(const std::string &key, const std::string &value) &
    {
        detail::check(tcpx_config_set(config_.get(), key.c_str(), value.c_str()));
        return *this;
    }
    /** Does the same on a temporary, for building in one expression. */
    Config &&set(const std::string &key, const std::string &value) &&
    {
        return std::move(set(key, value));
    }
    /** Returns the handle for calls of the C interface. */
    const tcpx_config *get() const noexcept { return config_.get(); }

private:
    detail::Handle<tcpx_config> config_;
};

/** A peer's memory: address, size and the key that grants access, in a portable form. */
class MemoryDescriptor {
public:
    /** Reads a descriptor that serialize() wrote. */
    static MemoryDescriptor deserialize(std::string_view bytes)
    {
        tcpx_remote_region *region = nullptr;
        detail::check(tcpx_remote_region_from_bytes(bytes.data(), bytes.size(), &region));
        return MemoryDescriptor(region, std::string(bytes));
    }
    /** Returns the descriptor as bytes; not text. */
    const std::string &serialize() const noexcept { return bytes_; }
    /** Returns the address of the first byte, in its owner's address space. */
    std::uint64_t address() const noexcept { return tcpx_remote_region_address(region_.get()); }
    /** Returns the size in bytes. */
    std::uint64_t size() const noexcept { return tcpx_remote_region_size(region_.get()); }
    /** Returns the handle for calls of the C interface. */
    const tcpx_remote_region *get() const noexcept { return region_.get(); }

private:
    MemoryDescriptor(tcpx_remote_region *region, std::string bytes)
        : region_(region, detail::Free{}), bytes_(std::move(bytes))
    {
    }
    std::shared_ptr<tcpx_remote_region> region_;
    std::string bytes_;
};

/** One piece of a one-sided transfer. */
struct Segment {
    std::uint64_t mem_id;            ///< Our memory.
    std::uint64_t offset;            ///< Where in it.
    const MemoryDescriptor &remote;  ///< The peer's memory.
    std::uint64_t remote_offset;     ///< Where in it.
    std::uint64_t size;              ///< How many bytes; 0 is legal and moves nothing.
};

/** A message from a peer. */
struct Notification {
    std::string from;     ///< What the sending session calls itself.
    std::string message;  ///< Any bytes, possibly none.
};

/** Operations with one peer that complete together. Each call adds one or more operations and
 * starts them; wait() and isComplete() cover all of them.
 */
class Transfer {
public:
    Transfer(Transfer &&) noexcept = default;
    Transfer &operator=(Transfer &&) noexcept = default;

    /** Sends `size` bytes under a tag; complete when the peer has received them. */
    void postSend(std::uint64_t mem_id, std::uint64_t offset, std::size_t size, std::uint64_t tag)
    {
        const auto region = state_->region(mem_id);
        tcpx_transfer *made = nullptr;
        detail::check(tcpx_session_send(state_->session.get(), peer_.get(), region.get(),
                                        address(region, offset), size, tag, &made));
        operations_.emplace_back(made);
    }

    /** Receives the next message of that tag, of at most `size` bytes. */
    void postRecv(std::uint64_t mem_id, std::uint64_t offset, std::size_t size, std::uint64_t tag)
    {
        const auto region = state_->region(mem_id);
        tcpx_transfer *made = nullptr;
        detail::check(tcpx_session_recv(state_->session.get(), peer_.get(), region.get(),
                                        address(region, offset), size, tag, &made));
        operations_.emplace_back(made);
    }

    /** Reads from the peer's memory into local memory, without any action of the peer's
     * application. */
    void read(std::uint64_t mem_id, std::uint64_t offset, const MemoryDescriptor &remote,
              std::uint64_t remote_offset, std::uint64_t size)
    {
        start(Op::Read, {{mem_id, offset, remote, remote_offset, size}}, std::nullopt);
    }

    /** Writes from local memory into the peer's, without any action of the peer's application. */
    void write(std::uint64_t mem_id, std::uint64_t offset, const MemoryDescriptor &remote,
               std::uint64_t remote_offset, std::uint64_t size)
    {
        start(Op::Write, {{mem_id, offset, remote, remote_offset, size}}, std::nullopt);
    }

    /** Reads many pieces as one operation; may notify the peer once every byte has arrived. */
    void read(const std::vector<Segment> &segments, std::optional<std::string_view> notification = std::nullopt)
    {
        start(Op::Read, segments, notification);
    }

    /** Writes many pieces as one operation; may notify the peer once every byte has arrived. */
    void write(const std::vector<Segment> &segments, std::optional<std::string_view> notification = std::nullopt)
    {
        start(Op::Write, segments, notification);
    }

    /** Starts the one-sided operations again, at no set-up cost. All must have ended, and none
     * may be a send or a receive. */
    void repost(std::optional<std::string_view> notification = std::nullopt)
    {
        for (const auto &operation : operations_) {
            post(operation.get(), notification);
        }
    }

    /** Returns whether every operation has completed. Never blocks, and may move bytes itself.
     * Throws if one has failed. */
    bool isComplete()
    {
        bool complete = true;
        for (const auto &operation : operations_) {
            tcpx_state state = TCPX_PREPARED;
            detail::check(tcpx_transfer_poll(operation.get(), &state));
            if (state == TCPX_FAILED) {
                detail::check(tcpx_transfer_error(operation.get()));
            }
            if (state == TCPX_ABORTED || state == TCPX_ABORTING) {
                throw Error(TCPX_ERROR_ABORTED, "the transfer was aborted");
            }
            complete = complete && state == TCPX_DONE;
        }
        return complete;
    }

    /** Waits until every operation has completed; throws if one has failed, or
     * (TCPX_ERROR_TIMEOUT) if the timeout expires, in which case they continue. */
    void wait(Milliseconds timeout = forever)
    {
        const auto begin = std::chrono::steady_clock::now();
        for (const auto &operation : operations_) {
            auto left = timeout;
            if (timeout >= Milliseconds::zero()) {
                const auto gone = std::chrono::duration_cast<Milliseconds>(std::chrono::steady_clock::now() - begin);
                left = gone < timeout ? timeout - gone : Milliseconds::zero();
            }
            detail::check(tcpx_transfer_wait(operation.get(), detail::millis(left)));
        }
    }

    /** Returns the length of the message that the last postRecv() received; 0 until it is known. */
    std::uint64_t received() const noexcept
    {
        return operations_.empty() ? 0 : tcpx_transfer_received(operations_.back().get());
    }

    /** Drops all operations; aborts those in flight, without waiting. The object can be used
     * again. */
    void release() noexcept { operations_.clear(); }

private:
    friend class Session;
    Transfer(std::shared_ptr<detail::State> state, std::shared_ptr<tcpx_peer> peer)
        : state_(std::move(state)), peer_(std::move(peer))
    {
    }

    static std::uint64_t address(const std::shared_ptr<tcpx_region> &region, std::uint64_t offset)
    {
        return reinterpret_cast<std::uintptr_t>(tcpx_region_address(region.get())) + offset;
    }

    static void post(const tcpx_transfer *operation, std::optional<std::string_view> notification)
    {
        detail::check(notification ? tcpx_transfer_post_with_notification(operation, notification->data(),
                                                                          notification->size())
                                   : tcpx_transfer_post(operation));
    }

    void start(Op op, const std::vector<Segment> &segments, std::optional<std::string_view> notification)
    {
        std::vector<std::shared_ptr<tcpx_region>> keep;
        std::vector<tcpx_segment> pieces;
        pieces.reserve(segments.size());
        std::uint64_t known = 0;  // mem ids begin at 1
        for (const Segment &segment : segments) {
            if (segment.mem_id != known) {
                keep.push_back(state_->region(segment.mem_id));
                known = segment.mem_id;
            }
            pieces.push_back({keep.back().get(), address(keep.back(), segment.offset), segment.remote.get(),
                              segment.remote.address() + segment.remote_offset, segment.size});
        }
        tcpx_transfer *made = nullptr;
        detail::check(tcpx_session_prepare(state_->session.get(), static_cast<std::uint32_t>(op), peer_.get(),
                                           pieces.data(), pieces.size(), &made));
        detail::Handle<tcpx_transfer> operation(made);
        post(made, notification);
        operations_.push_back(std::move(operation));
    }

    std::shared_ptr<detail::State> state_;
    std::shared_ptr<tcpx_peer> peer_;
    std::vector<detail::Handle<tcpx_transfer>> operations_;
};

namespace detail {

/** Closes a session with the last Session object, even while transfers still refer to it. */
struct Open {
    std::shared_ptr<State> state;

    explicit Open(std::shared_ptr<State> of) : state(std::move(of)) {}
    Open(const Open &) = delete;
    Open &operator=(const Open &) = delete;
    ~Open() { tcpx_session_close(state->session.get()); }
};

}  // namespace detail

/** Registers memory, knows remotes by the names that the application gives them, makes
 * transfers. It listens, and serves its memory, from its creation to its end. */
class Session {
public:
    /** Starts a session with a name of its own; an empty name takes the configured one. */
    explicit Session(const std::string &name = "", Config config = Config())
        : state_(std::make_shared<detail::State>())
    {
        if (!name.empty()) {
            config.set("name", name);
        }
        tcpx_session *session = nullptr;
        detail::check(tcpx_session_new(config.get(), &session));
        state_->session.reset(session);
        open_ = std::make_shared<detail::Open>(state_);
    }

    /** Ends the session: blocked calls on other threads throw with TCPX_ERROR_CLOSED, and
     * registered memory is no longer accessed. Waits until peers have received what was sent to
     * them, at most 5 seconds unless configured otherwise. Destroying the last copy of this
     * object does the same. */
    void close() { detail::check(tcpx_session_close(state_->session.get())); }

    /** Returns the connection info that a remote needs to connect. It contains the session's
     * secret. */
    std::string listen() const
    {
        tcpx_bytes info{};
        detail::check(tcpx_session_connection_info(state_->session.get(), &info));
        return detail::take(info);
    }

    /** Waits for the next remote that connects, and assigns it `remote_name`. Returns the
     * remote's own name. */
    std::string accept(const std::string &remote_name, Milliseconds timeout = forever)
    {
        tcpx_peer *peer = nullptr;
        detail::check(tcpx_session_accept(state_->session.get(), detail::millis(timeout), &peer));
        const std::string own = tcpx_peer_name(peer);
        remember(remote_name, peer);
        return own;
    }

    /** Adds a remote by the connection info from its listen(). */
    void loadRemoteConnInfo(const std::string &remote_name, std::string_view info)
    {
        tcpx_peer *peer = nullptr;
        detail::check(tcpx_session_add_peer(state_->session.get(), info.data(), info.size(), &peer));
        remember(remote_name, peer);
    }

    /** Connects now instead of with the first transfer. */
    void connect(const std::string &remote_name, Milliseconds timeout = forever)
    {
        detail::check(tcpx_peer_connect(state_->peer(remote_name).get(), detail::millis(timeout)));
    }

    /** Ends all connections to a remote; its transfers fail. A later transfer reconnects. */
    void disconnect(const std::string &remote_name)
    {
        detail::check(tcpx_peer_disconnect(state_->peer(remote_name).get()));
    }

    /** Registers memory, which must stay mapped until deregisterMemory() or the session's end.
     * Returns its mem_id, never 0. */
    std::uint64_t registerMemory(void *address, std::size_t size, Memory kind = Memory::Auto,
                                 std::uint32_t device = 0)
    {
        tcpx_region *made = nullptr;
        detail::check(tcpx_session_register(state_->session.get(), address, size,
                                            static_cast<std::uint32_t>(kind), device, &made));
        const std::shared_ptr<tcpx_region> region(made, detail::Free{});
        const std::uint64_t mem_id = tcpx_region_id(made);
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->regions.emplace(mem_id, region);
        return mem_id;
    }

    /** Ends a registration. When this returns the memory is no longer accessed and may be freed;
     * transfers that use it fail. */
    void deregisterMemory(std::uint64_t mem_id)
    {
        const auto region = state_->region(mem_id);
        detail::check(tcpx_region_deregister(region.get()));
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->regions.erase(mem_id);
    }

    /** Returns the descriptor that a remote needs to read and write this memory. */
    MemoryDescriptor describe(std::uint64_t mem_id) const
    {
        tcpx_bytes descriptor{};
        detail::check(tcpx_region_descriptor(state_->region(mem_id).get(), &descriptor));
        return MemoryDescriptor::deserialize(detail::take(descriptor));
    }

    /** Creates an empty transfer with a remote. It may outlive this object, whose end ends it. */
    Transfer createTransfer(const std::string &remote_name)
    {
        return Transfer(state_, state_->peer(remote_name));
    }

    /** Sends a notification; notifications to one remote arrive in order. */
    void notify(const std::string &remote_name, std::string_view message)
    {
        detail::check(tcpx_session_notify(state_->session.get(), state_->peer(remote_name).get(),
                                          message.data(), message.size()));
    }

    /** Returns every notification that has arrived, oldest first. Never blocks. */
    std::vector<Notification> takeNotifications()
    {
        std::vector<Notification> all;
        detail::check(tcpx_session_take_notifications(state_->session.get(), &Session::collect, &all));
        return all;
    }

    /** Waits for the next notification. */
    Notification waitNotification(Milliseconds timeout = forever)
    {
        std::vector<Notification> one;
        detail::check(tcpx_session_wait_notification(state_->session.get(), detail::millis(timeout),
                                                     &Session::collect, &one));
        return std::move(one.front());
    }

    /** Returns the name of this session. */
    std::string name() const { return tcpx_session_name(state_->session.get()); }

private:
    void remember(const std::string &remote_name, tcpx_peer *handle)
    {
        const std::shared_ptr<tcpx_peer> peer(handle, detail::Free{});
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->peers[remote_name] = peer;
    }

    static void collect(void *context, const char *from, std::size_t from_len, const std::uint8_t *message,
                        std::size_t message_len) noexcept
    {
        static_cast<std::vector<Notification> *>(context)->push_back(
            {std::string(from, from_len), std::string(reinterpret_cast<const char *>(message), message_len)});
    }

    std::shared_ptr<detail::State> state_;
    std::shared_ptr<detail::Open> open_;
};

}  // namespace tcpx

#endif  // TCPX_P2P_HPP
