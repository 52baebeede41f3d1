/*
 * libtcpx_p2p: moves memory between processes over TCP as if by RDMA.
 *
 * Generated from crates/capi/src by cbindgen: do not edit (TCPX_BLESS=1 cargo test -p tcpx-capi header).
 *
 * A session registers memory and knows peers by their connection info. A transfer reads from or writes to
 * a peer's regions while the peer's application does nothing.
 *
 *   config -> session -> region            what may be touched
 *                     -> peer              who is at the other end
 *                     -> transfer          prepared once, posted any number of times
 *
 * Rules that hold for every function:
 *
 *  - A function that can fail returns a tcpx_status; tcpx_last_error() has the words. Outputs are written
 *    on TCPX_OK only. A NULL pointer is answered with TCPX_ERROR_INVALID_ARGUMENT; only a message or
 *    an array of length 0 may be NULL, and the free functions ignore NULL.
 *  - A handle belongs to whoever received it and ends with its free function. Handles may be freed in any
 *    order; they are independent of the handles that they were made from: a transfer, for example,
 *    keeps what it needs of its regions and of its peer.
 *  - All functions may be called from any thread, also on the same handle at once; only tcpx_config_set and the
 *    free functions want the handle for themselves.
 *  - Nothing waits except where a timeout is asked for (in milliseconds; UINT64_MAX waits as long as it takes), and
 *    at the end of a session.
 *  - A forked child makes sessions of its own. Calls on a session, peer, region or transfer that it
 *    inherited fail at once with TCPX_ERROR_FORKED, and freeing one does nothing; configurations
 *    and remote regions stay usable. The child keeps no connection and no port of its parent, whose
 *    sessions go on.
 *  - Texts are UTF-8 and end with NUL. Addresses are absolute, in the address space of their owner.
 */

#ifndef TCPX_P2P_H
#define TCPX_P2P_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// How a call ended. The numbers are stable: new ones are added at the end, none is ever reused.
typedef enum {
    // It worked.
    TCPX_OK = 0,
    // The call made no sense: fix the arguments.
    TCPX_ERROR_INVALID_ARGUMENT = 1,
    // What was named does not exist.
    TCPX_ERROR_NOT_FOUND = 2,
    // The state of the object forbids the call.
    TCPX_ERROR_NOT_ALLOWED = 3,
    // Not now: the transfer is still in flight, or the peer does not keep up. Try again later.
    TCPX_ERROR_BUSY = 4,
    // The caller's own time limit ran out; nothing was cancelled.
    TCPX_ERROR_TIMEOUT = 5,
    // The peer is gone, unreachable or silent.
    TCPX_ERROR_DISCONNECTED = 6,
    // The peer answered and said no.
    TCPX_ERROR_REFUSED = 7,
    // The transfer was aborted by this side.
    TCPX_ERROR_ABORTED = 8,
    // A tagged message was longer than the buffer posted for it.
    TCPX_ERROR_TRUNCATED = 9,
    // This machine did not give what was needed.
    TCPX_ERROR_ENVIRONMENT = 10,
    // The session is closed.
    TCPX_ERROR_CLOSED = 11,
    // The peer broke the protocol.
    TCPX_ERROR_PROTOCOL = 12,
    // Not available in this build or on this machine.
    TCPX_ERROR_NOT_SUPPORTED = 13,
    // A defect of this library: please report it.
    TCPX_ERROR_INTERNAL = 14,
    // The peer does not have the region any more: get a new descriptor.
    TCPX_ERROR_REGION_GONE = 15,
    // The handle is of the process that this one was forked from: create a session in this one.
    TCPX_ERROR_FORKED = 16,
} tcpx_status;

// What kind of memory a region is.
typedef enum {
    // Ordinary memory of the process.
    TCPX_MEMORY_HOST = 0,
    // Memory of a CUDA device.
    TCPX_MEMORY_CUDA = 1,
    // Whichever of these the address is; the device is found too.
    TCPX_MEMORY_AUTO = 2,
} tcpx_memory;

// Where a transfer stands.
typedef enum {
    // Never posted.
    TCPX_PREPARED = 0,
    // Posted; bytes may be moving.
    TCPX_IN_PROGRESS = 1,
    // Every byte is where it belongs.
    TCPX_DONE = 2,
    // It failed; tcpx_transfer_error says why.
    TCPX_FAILED = 3,
    // Aborted by this side; bytes that were already on their way may still land at the peer.
    TCPX_ABORTING = 4,
    // Aborted, and nothing of it is on its way any more.
    TCPX_ABORTED = 5,
} tcpx_state;

// The direction of a transfer.
typedef enum {
    // From the peer's memory into ours.
    TCPX_READ = 0,
    // From our memory into the peer's.
    TCPX_WRITE = 1,
} tcpx_op;

// How a session behaves: defaults of this machine, then the environment, then what is set.
typedef struct tcpx_config tcpx_config;

// A remote session, or the session itself.
typedef struct tcpx_peer tcpx_peer;

// Memory that this session has registered.
typedef struct tcpx_region tcpx_region;

// A peer's region: address, length and the key that grants access.
typedef struct tcpx_remote_region tcpx_remote_region;

// Registers memory, knows peers, makes transfers. It listens, and serves its regions, from its
// start to its end, whether or not the application does anything.
typedef struct tcpx_session tcpx_session;

// A READ, a WRITE, a tagged send or a tagged receive.
typedef struct tcpx_transfer tcpx_transfer;

// Bytes that the library made; whoever received them ends them with `tcpx_bytes_free`.
typedef struct {
    // The first byte.
    uint8_t *data;
    // How many there are.
    size_t len;
} tcpx_bytes;

// One setting; valid while the callback that received it runs.
typedef struct {
    // Bytes in this struct; later versions add fields at its end.
    size_t size;
    // The key, as `tcpx_config_set` takes it.
    const char *key;
    // The environment variable.
    const char *variable;
    // The value in force.
    const char *value;
    // Where the value came from.
    const char *source;
    // What the setting does.
    const char *help;
    // Why the default is what it is.
    const char *reason;
} tcpx_config_row;

// Receives one setting. Must not unwind.
typedef void (*tcpx_config_row_fn)(void *context, const tcpx_config_row *row);

// One network interface; valid while the callback that received it runs.
typedef struct {
    // Bytes in this struct; later versions add fields at its end.
    size_t size;
    // Its name, such as "eth0".
    const char *name;
    // What stands behind the name: "physical", "loopback", or the kernel's word, such as "bond" or "bridge".
    const char *kind;
    // Its addresses with their prefix lengths, separated by commas; "" when it has none.
    const char *addresses;
    // The PCI address of the device, such as "0000:06:00.0"; "" where there is none.
    const char *pci_address;
    // The driver of the device; "" where there is none.
    const char *driver;
    // Why sessions do not use it unless the setting interfaces names it; NULL when they do.
    const char *why_not;
    // The largest packet, in bytes.
    uint32_t mtu;
    // The link's speed in Mbit/s; 0 where the driver does not know it.
    uint32_t speed_mbps;
    // The NUMA node that the device hangs off; -1 on machines that have one only.
    int32_t numa_node;
} tcpx_device;

// Receives one interface. Must not unwind.
typedef void (*tcpx_device_fn)(void *context, const tcpx_device *device);

// One lane of a connected peer; valid while the callback that received it runs.
typedef struct {
    // Bytes in this struct; later versions add fields at its end.
    size_t size;
    // This end's address and port, such as "10.0.0.1:40312".
    const char *local;
    // The peer's.
    const char *remote;
    // Bytes that left on it, framing included.
    uint64_t bytes_sent;
    // Bytes that came on it, framing included.
    uint64_t bytes_received;
} tcpx_lane;

// Receives one lane. Must not unwind.
typedef void (*tcpx_lane_fn)(void *context, const tcpx_lane *lane);

// How memory of a peer on the same host is moved; valid while the callback that received it runs.
typedef struct {
    // Bytes in this struct; later versions add fields at its end.
    size_t size;
    // Why lanes carry everything; NULL where memory is copied directly.
    const char *why_not;
    // Bytes that this session has copied directly, both ways, over the current connection.
    uint64_t bytes;
} tcpx_same_host;

// Receives how memory of a peer is moved. Must not unwind.
typedef void (*tcpx_same_host_fn)(void *context, const tcpx_same_host *same_host);

// One piece of a transfer. A READ copies from remote to local, a WRITE from local to remote.
typedef struct {
    // Memory of this session.
    const tcpx_region *local;
    // Where in it, as an address.
    uint64_t local_address;
    // Memory of the peer.
    const tcpx_remote_region *remote;
    // Where in it, as an address at the peer.
    uint64_t remote_address;
    // How many bytes; 0 is legal and moves nothing.
    uint64_t length;
} tcpx_segment;

// Receives one notification: who sent it, and the message, which may be empty and may hold any bytes. The
// pointers are valid while the callback runs. Must not unwind.
typedef void (*tcpx_notification_fn)(void *context,
                                     const char *from,
                                     size_t from_len,
                                     const uint8_t *message,
                                     size_t message_len);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Frees bytes that the library made. Zeroed ones are ignored.
void tcpx_bytes_free(tcpx_bytes bytes);

// The defaults of this machine; the environment is not looked at.
tcpx_status tcpx_config_defaults(tcpx_config **config);

// The defaults, overridden by the `TCPX_` variables of the environment.
tcpx_status tcpx_config_from_env(tcpx_config **config);

// Sets one value by its key, such as "lanes", or by the name of its variable, such as "TCPX_LANES".
tcpx_status tcpx_config_set(tcpx_config *config, const char *key, const char *value);

// Hands every setting to `callback`, with `context`.
tcpx_status tcpx_config_each(const tcpx_config *config, tcpx_config_row_fn callback, void *context);

// Frees a configuration; sessions made from it are not affected.
void tcpx_config_free(tcpx_config *config);

// Hands every network interface of this machine to `callback`, with `context`.
tcpx_status tcpx_devices_each(tcpx_device_fn callback, void *context);

// Adds a warning to the library's log, for layers above it that can pass on a number only: what could not be
// done, and why. Goes to stderr as the setting log says; nowhere before the first session.
void tcpx_log_warning(const char *what,
                      const char *why);

// What the peer calls itself; valid until the handle is freed. NULL for NULL.
const char *tcpx_peer_name(const tcpx_peer *peer);

// Whether a connection is there now.
bool tcpx_peer_is_connected(const tcpx_peer *peer);

// Connects now rather than with the first transfer. Returns at once when a connection is there.
// When `timeout_ms` runs out first the attempt goes on by itself, up to the setting connect_timeout.
tcpx_status tcpx_peer_connect(const tcpx_peer *peer,
                              uint64_t timeout_ms);

// Ends all connections to the peer; its transfers fail. A later transfer connects anew.
tcpx_status tcpx_peer_disconnect(const tcpx_peer *peer);

// Hands every lane of the current connection to `callback`, with `context`; none when there is no connection.
tcpx_status tcpx_peer_each_lane(const tcpx_peer *peer,
                                tcpx_lane_fn callback,
                                void *context);

// Tells `callback`, with `context`, whether memory of the peer is copied directly, since it is on
// this host, and otherwise why not. Calls it once, or not at all when there is no connection.
tcpx_status tcpx_peer_same_host(const tcpx_peer *peer, tcpx_same_host_fn callback, void *context);

// Frees the handle; the session goes on to know the peer.
void tcpx_peer_free(tcpx_peer *peer);

// The registration's number within its session, from 1 up; 0 for NULL.
uint64_t tcpx_region_id(const tcpx_region *region);

// The address of the first byte; NULL for NULL.
void *tcpx_region_address(const tcpx_region *region);

// Bytes in the region; 0 for NULL.
uint64_t tcpx_region_size(const tcpx_region *region);

// What a peer needs to address this region, for `tcpx_remote_region_from_bytes` over there. The same range
// always has the same descriptor, whenever it is registered with this session.
tcpx_status tcpx_region_descriptor(const tcpx_region *region,
                                   tcpx_bytes *descriptor);

// Ends the registration before its handle is freed, for handles that are shared. When this returns, the
// memory is no longer touched and may be freed; transfers that were using it fail. TCPX_ERROR_NOT_ALLOWED when
// it had ended already.
tcpx_status tcpx_region_deregister(const tcpx_region *region);

// Frees the handle, and ends the registration as tcpx_region_deregister does.
void tcpx_region_free(tcpx_region *region);

// Reads the descriptor of a peer's region.
tcpx_status tcpx_remote_region_from_bytes(const void *descriptor,
                                          size_t descriptor_len,
                                          tcpx_remote_region **region);

// The address of the first byte, in its owner's address space; 0 for NULL.
uint64_t tcpx_remote_region_address(const tcpx_remote_region *region);

// Bytes in the region; 0 for NULL.
uint64_t tcpx_remote_region_size(const tcpx_remote_region *region);

// What kind of memory it is at its owner, and on which CUDA device (0 for host memory).
tcpx_status tcpx_remote_region_memory(const tcpx_remote_region *region,
                                      tcpx_memory *kind,
                                      uint32_t *device);

// Frees what is known of a peer's region; prepared transfers keep what they need.
void tcpx_remote_region_free(tcpx_remote_region *region);

// Starts a session. The configuration remains the caller's.
tcpx_status tcpx_session_new(const tcpx_config *config, tcpx_session **session);

// Says whether calls on the session may succeed: TCPX_ERROR_FORKED in a child of the process that
// made it, TCPX_ERROR_CLOSED once it is closed. Never waits. Layers that hold locks of their own
// ask before they take one.
tcpx_status tcpx_session_check(const tcpx_session *session);

// Ends a session, and leaves the handle to be freed: calls that wait in it, on other threads, return TCPX_ERROR_CLOSED, and so do
// all calls from now on. Waits as tcpx_session_free does. When it returns, memory that was registered is no longer touched. May
// be called more than once.
tcpx_status tcpx_session_close(const tcpx_session *session);

// Ends a session: its connections and its threads. Waits until the peers have their notifications and know how their transfers
// have ended, at most 5 seconds (or `peer_timeout` where that is less; on a plugin, a connection that is being made for them has
// `connect_timeout` first). Transfers in flight fail, here and at the peers.
void tcpx_session_free(tcpx_session *session);

// What the session calls itself; valid until the handle is freed. NULL for NULL.
const char *tcpx_session_name(const tcpx_session *session);

// What a peer needs to connect to this session. It contains the session's secret: whoever has it may
// connect, nobody else can.
tcpx_status tcpx_session_connection_info(const tcpx_session *session,
                                         tcpx_bytes *info);

// Makes a peer known by its connection info; connecting happens later. The same info again gives another
// handle to the same peer; info of a new session under a known name replaces the old session.
tcpx_status tcpx_session_add_peer(const tcpx_session *session,
                                  const void *info,
                                  size_t info_len,
                                  tcpx_peer **peer);

// The peer of that name: one that was added, or one that has connected to us.
tcpx_status tcpx_session_find_peer(const tcpx_session *session, const char *name, tcpx_peer **peer);

// The peer that stands for the session itself, for transfers within it.
tcpx_status tcpx_session_own_peer(const tcpx_session *session, tcpx_peer **peer);

// Forgets a peer and ends its connections. Its transfers fail. It may be added again; the handle remains
// to be freed.
tcpx_status tcpx_session_remove_peer(const tcpx_session *session,
                                     const tcpx_peer *peer);

// The next peer that has connected to us.
tcpx_status tcpx_session_accept(const tcpx_session *session, uint64_t timeout_ms, tcpx_peer **peer);

// Registers memory: `kind` is a tcpx_memory, `device` the number of the CUDA device for
// TCPX_MEMORY_CUDA and not looked at otherwise. Overlapping and
// repeated registrations are legal. The memory must stay mapped until tcpx_region_free has
// returned: peers who have its descriptor read and write it at any time.
tcpx_status tcpx_session_register(const tcpx_session *session,
                                  void *address,
                                  size_t len,
                                  uint32_t kind,
                                  uint32_t device,
                                  tcpx_region **region);

// Plans a transfer over any number of segments; `op` is a tcpx_op. Nothing moves until it is posted. The
// array, and the handles that it points to, are not needed any more when this returns.
tcpx_status tcpx_session_prepare(const tcpx_session *session,
                                 uint32_t op,
                                 const tcpx_peer *peer,
                                 const tcpx_segment *segments,
                                 size_t segment_count,
                                 tcpx_transfer **transfer);

// Sends `len` bytes to the peer under a tag. Done when the peer has received them. Messages of one
// tag are received in the order in which they were sent.
tcpx_status tcpx_session_send(const tcpx_session *session,
                              const tcpx_peer *peer,
                              const tcpx_region *region,
                              uint64_t address,
                              size_t len,
                              uint64_t tag,
                              tcpx_transfer **transfer);

// Receives the next message that the peer sends under a tag, up to `len` bytes; tcpx_transfer_received
// tells how many it had. A longer one fails on both sides.
tcpx_status tcpx_session_recv(const tcpx_session *session,
                              const tcpx_peer *peer,
                              const tcpx_region *region,
                              uint64_t address,
                              size_t len,
                              uint64_t tag,
                              tcpx_transfer **transfer);

// Sends a message on its own; it is queued when this returns. Messages to one peer arrive in order. An
// empty message is legal. TCPX_ERROR_BUSY where the peer does not keep up, and half of queue_bytes
// waits to be sent to it: nothing was sent then, try again later.
tcpx_status tcpx_session_notify(const tcpx_session *session,
                                const tcpx_peer *peer,
                                const void *message,
                                size_t message_len);

// Hands every notification that has arrived to `callback`, with `context`, oldest first. Never waits.
tcpx_status tcpx_session_take_notifications(const tcpx_session *session,
                                            tcpx_notification_fn callback,
                                            void *context);

// Waits for the next notification and hands it to `callback`, with `context`.
tcpx_status tcpx_session_wait_notification(const tcpx_session *session,
                                           uint64_t timeout_ms,
                                           tcpx_notification_fn callback,
                                           void *context);

// The name of a status, such as "DISCONNECTED"; "UNKNOWN" for a number that is none.
const char *tcpx_status_name(int32_t status);

// What went wrong in the last call of this thread that failed; never NULL. The text stays until the
// thread's next call that fails.
const char *tcpx_last_error(void);

// The version of this library, such as "0.1.0".
const char *tcpx_version(void);

// Starts the transfer, connecting first if need be, and returns without waiting. Once it has ended it may be
// posted again at no set-up cost. Tagged sends and receives are posted when they are made.
tcpx_status tcpx_transfer_post(const tcpx_transfer *transfer);

// As tcpx_transfer_post; the peer receives `message` once every byte is in place, exactly once if the
// transfer ends as done while the connection lives, and not at all if it fails. A transfer that fails
// with TCPX_ERROR_DISCONNECTED may have delivered its message, where only the last acknowledgement was
// lost; the message is never delivered twice for one posting. It may be empty. TCPX_ERROR_BUSY as for
// tcpx_session_notify.
tcpx_status tcpx_transfer_post_with_notification(const tcpx_transfer *transfer,
                                                 const void *message,
                                                 size_t message_len);

// Where the transfer stands. Never waits, and may move bytes itself.
tcpx_status tcpx_transfer_poll(const tcpx_transfer *transfer, tcpx_state *state);

// Waits until the transfer has ended; says how it did. TCPX_ERROR_TIMEOUT when it has not by then: it goes on.
tcpx_status tcpx_transfer_wait(const tcpx_transfer *transfer,
                               uint64_t timeout_ms);

// Gives the transfer up. Never waits for the peer. When this returns, local memory is no longer read or
// written on behalf of the transfer.
tcpx_status tcpx_transfer_abort(const tcpx_transfer *transfer);

// Why the transfer failed; tcpx_last_error has the words. TCPX_OK when it has not failed (yet).
tcpx_status tcpx_transfer_error(const tcpx_transfer *transfer);

// Bytes that the transfer moves; 0 for NULL.
uint64_t tcpx_transfer_bytes(const tcpx_transfer *transfer);

// Bytes of the message that a tagged receive got; 0 until that is known.
uint64_t tcpx_transfer_received(const tcpx_transfer *transfer);

// How long a posting is going to take, judged by earlier transfers to the same peer, and how far off that
// may be; in microseconds.
tcpx_status tcpx_transfer_estimate(const tcpx_transfer *transfer,
                                   uint64_t *duration_us,
                                   uint64_t *margin_us);

// Releases the transfer: aborts it if it is in flight, and frees it. Never waits for the peer.
void tcpx_transfer_free(tcpx_transfer *transfer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TCPX_P2P_H */
