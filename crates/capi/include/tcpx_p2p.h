/*
 * libtcpx_p2p: moves memory between processes over TCP as if by RDMA.
 *
 * Generated from crates/capi/src by cbindgen: do not edit.
 * Regenerate with: TCPX_BLESS=1 cargo test -p tcpx-capi header
 *
 * A session registers memory and knows peers by their connection info. A transfer reads from or
 * writes to a peer's regions without any action of the peer's application.
 *
 *   config -> session -> region            registered memory
 *                     -> peer              a remote session
 *                     -> transfer          prepared once, posted any number of times
 *   events            <- session, transfer a descriptor for event loops
 *
 * Rules for every function:
 *
 *  - A function that can fail returns a tcpx_status; tcpx_last_error() returns the message.
 *    Outputs are written on TCPX_OK only. A NULL pointer gives TCPX_ERROR_INVALID_ARGUMENT; only a
 *    message or an array of length 0 may be NULL, and the free functions ignore NULL.
 *  - The caller owns every handle that it receives and must free it. Handles may be freed in any
 *    order; they are independent of the handles they were made from: a transfer, for example,
 *    keeps what it needs of its regions and of its peer.
 *  - All functions may be called from any thread, also concurrently on the same handle; only
 *    tcpx_config_set and the free functions need exclusive use of the handle.
 *  - Functions do not block, except those with a timeout (in milliseconds; UINT64_MAX waits
 *    without limit), and those that end a session.
 *  - A forked child creates sessions of its own. Calls on an inherited session, peer, region,
 *    transfer or events handle fail at once with TCPX_ERROR_FORKED, and freeing one does nothing;
 *    configurations and remote regions stay usable. The child keeps no connection and no port of
 *    its parent, whose sessions continue.
 *  - Texts are UTF-8 and end with NUL. Addresses are absolute, in the address space of their owner.
 */

#ifndef TCPX_P2P_H
#define TCPX_P2P_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A notification has arrived; it may have been taken since.
#define TCPX_EVENT_NOTIFIED 1

// A subscribed session was closed.
#define TCPX_EVENT_CLOSED 2

// More transfers have ended than fit the array: the descriptor stays readable.
#define TCPX_EVENT_MORE 4

// The result of a call. The numbers are stable: new ones are added at the end, none is ever
// reused.
typedef enum {
    // Success.
    TCPX_OK = 0,
    // An argument is invalid.
    TCPX_ERROR_INVALID_ARGUMENT = 1,
    // The named object does not exist.
    TCPX_ERROR_NOT_FOUND = 2,
    // The state of the object forbids the call.
    TCPX_ERROR_NOT_ALLOWED = 3,
    // The transfer is still in flight, or the peer does not keep up. Try again later.
    TCPX_ERROR_BUSY = 4,
    // The caller's timeout expired; nothing was cancelled.
    TCPX_ERROR_TIMEOUT = 5,
    // The peer is gone, unreachable or silent.
    TCPX_ERROR_DISCONNECTED = 6,
    // The peer refused.
    TCPX_ERROR_REFUSED = 7,
    // The transfer was aborted by this side.
    TCPX_ERROR_ABORTED = 8,
    // A tagged message was longer than the buffer posted for it.
    TCPX_ERROR_TRUNCATED = 9,
    // This machine lacks a required resource.
    TCPX_ERROR_ENVIRONMENT = 10,
    // The session is closed.
    TCPX_ERROR_CLOSED = 11,
    // The peer broke the protocol.
    TCPX_ERROR_PROTOCOL = 12,
    // Not available in this build or on this machine.
    TCPX_ERROR_NOT_SUPPORTED = 13,
    // A defect of this library: please report it.
    TCPX_ERROR_INTERNAL = 14,
    // The peer no longer has the region: get a new descriptor.
    TCPX_ERROR_REGION_GONE = 15,
    // The handle belongs to the parent of this forked process: create a session in this process.
    TCPX_ERROR_FORKED = 16,
} tcpx_status;

// The state of a transfer.
typedef enum {
    // Never posted.
    TCPX_PREPARED = 0,
    // Posted; bytes may be moving.
    TCPX_IN_PROGRESS = 1,
    // Every byte is in place.
    TCPX_DONE = 2,
    // The transfer failed; tcpx_transfer_error returns the reason.
    TCPX_FAILED = 3,
    // Aborted by this side; bytes already in flight may still land at the peer.
    TCPX_ABORTING = 4,
    // Aborted, and nothing of it is in flight any more.
    TCPX_ABORTED = 5,
} tcpx_state;

// The kind of memory of a region.
typedef enum {
    // Ordinary memory of the process.
    TCPX_MEMORY_HOST = 0,
    // Memory of a CUDA device.
    TCPX_MEMORY_CUDA = 1,
    // Detected from the address, with the device.
    TCPX_MEMORY_AUTO = 2,
} tcpx_memory;

// The direction of a transfer.
typedef enum {
    // From the peer's memory to local memory.
    TCPX_READ = 0,
    // From local memory to the peer's.
    TCPX_WRITE = 1,
} tcpx_op;

// Configuration of a session: defaults of this machine, then the environment, then values set.
typedef struct tcpx_config tcpx_config;

// A descriptor (eventfd) that becomes readable when a transfer has ended or a notification has
// arrived, for programs with an event loop of their own: epoll, libuv, boost::asio. Transfers need
// not be polled meanwhile.
//
// Arm transfers (tcpx_transfer_arm) and subscribe to notifications (tcpx_session_subscribe), wait
// until the descriptor is readable, and call tcpx_events_take. One handle serves any number of
// sessions; use one handle per event loop.
typedef struct tcpx_events tcpx_events;

// A remote session, or the session itself.
typedef struct tcpx_peer tcpx_peer;

// Memory registered by this session.
typedef struct tcpx_region tcpx_region;

// A peer's region: address, length and the key that grants access.
typedef struct tcpx_remote_region tcpx_remote_region;

// Registers memory, knows peers, makes transfers. A session listens, and serves its regions, from
// its creation to its end, without any action of the application.
typedef struct tcpx_session tcpx_session;

// A READ, a WRITE, a tagged send or a tagged receive.
typedef struct tcpx_transfer tcpx_transfer;

// Bytes allocated by the library; the caller frees them with `tcpx_bytes_free`.
typedef struct {
    // Pointer to the first byte.
    uint8_t *data;
    // Number of bytes.
    size_t len;
} tcpx_bytes;

// One setting; valid while the callback that received it runs.
typedef struct {
    // Size of this struct in bytes; later versions add fields at its end.
    size_t size;
    // The key, as passed to `tcpx_config_set`.
    const char *key;
    // The environment variable.
    const char *variable;
    // The value in force.
    const char *value;
    // The origin of the value.
    const char *source;
    // A description of the setting.
    const char *help;
    // The reason for the default.
    const char *reason;
} tcpx_config_row;

// Receives one setting. Must not unwind.
typedef void (*tcpx_config_row_fn)(void *context, const tcpx_config_row *row);

// One network interface; valid while the callback that received it runs.
typedef struct {
    // Size of this struct in bytes; later versions add fields at its end.
    size_t size;
    // Its name, such as "eth0".
    const char *name;
    // The kind of device: "physical", "loopback", or the kernel's name, such as "bond" or
    // "bridge".
    const char *kind;
    // Its addresses with their prefix lengths, separated by commas; "" if it has none.
    const char *addresses;
    // The PCI address of the device, such as "0000:06:00.0"; "" if there is none.
    const char *pci_address;
    // The driver of the device; "" if there is none.
    const char *driver;
    // The reason sessions do not use it unless the setting interfaces names it; NULL if they do.
    const char *why_not;
    // The largest packet, in bytes.
    uint32_t mtu;
    // The link's speed in Mbit/s; 0 if unknown.
    uint32_t speed_mbps;
    // The NUMA node of the device; -1 on machines with only one.
    int32_t numa_node;
} tcpx_device;

// Receives one interface. Must not unwind.
typedef void (*tcpx_device_fn)(void *context, const tcpx_device *device);

// One lane of a connected peer; valid while the callback that received it runs.
typedef struct {
    // Size of this struct in bytes; later versions add fields at its end.
    size_t size;
    // This end's address and port, such as "10.0.0.1:40312".
    const char *local;
    // The peer's address and port.
    const char *remote;
    // Bytes sent on this lane, framing included.
    uint64_t bytes_sent;
    // Bytes received on this lane, framing included.
    uint64_t bytes_received;
} tcpx_lane;

// Receives one lane. Must not unwind.
typedef void (*tcpx_lane_fn)(void *context, const tcpx_lane *lane);

// The path to a peer on the same host; valid while the callback that received it runs.
typedef struct {
    // Size of this struct in bytes; later versions add fields at its end.
    size_t size;
    // The reason lanes carry everything; NULL if memory is copied directly.
    const char *why_not;
    // Bytes that this session has copied directly, in both directions, over the current
    // connection.
    uint64_t bytes;
} tcpx_same_host;

// Receives the path to a peer. Must not unwind.
typedef void (*tcpx_same_host_fn)(void *context, const tcpx_same_host *same_host);

// One piece of a transfer. A READ copies from remote to local, a WRITE from local to remote. The
// segments of a transfer move in any order: where the targets of two overlap, or a target and the
// source of another, the content of the overlapping bytes is unspecified.
typedef struct {
    // Memory of this session.
    const tcpx_region *local;
    // Address in the local region.
    uint64_t local_address;
    // Memory of the peer.
    const tcpx_remote_region *remote;
    // Address in the remote region, at the peer.
    uint64_t remote_address;
    // Length in bytes; 0 is legal and moves nothing.
    uint64_t length;
} tcpx_segment;

// Receives one notification: its sender, and the message, which may be empty and contain any
// bytes. The pointers are valid while the callback runs. Must not unwind.
typedef void (*tcpx_notification_fn)(void *context,
                                     const char *from,
                                     size_t from_len,
                                     const uint8_t *message,
                                     size_t message_len);

// Statistics of a session since its creation, over all peers. Transfers are counted by the session
// that posted them; tcpx_session_metrics has the values per peer, lane and path.
//
// The caller sets `size` to sizeof(tcpx_stats) before the call, so that a library with more fields
// does not write those that the caller does not know; one with fewer sets `size` to the size it
// has filled in.
typedef struct {
    // Size of this struct in bytes.
    size_t size;
    // Payload bytes sent and in place: WRITEs of this session, and READs of peers.
    uint64_t bytes_sent;
    // Payload bytes received and in place: READs of this session, and WRITEs of peers.
    uint64_t bytes_received;
    // Transfers posted, tagged messages included.
    uint64_t transfers_started;
    // Transfers completed.
    uint64_t transfers_completed;
    // Transfers failed.
    uint64_t transfers_failed;
    // Transfers aborted.
    uint64_t transfers_aborted;
    // Transfers in flight.
    uint64_t transfers_in_flight;
    // Bytes of completed transfers.
    uint64_t transfer_bytes;
    // Notifications sent.
    uint64_t notifications_sent;
    // Notifications received.
    uint64_t notifications_received;
    // Connections established.
    uint64_t connections;
    // Connections ended.
    uint64_t connections_lost;
    // Streams lost while their connection continued.
    uint64_t lanes_lost;
    // Bytes sent again after their lane was lost.
    uint64_t retried_bytes;
    // Number of times that chunks waited for the window.
    uint64_t window_waits;
    // Number of times that payload waited for a pinned slot.
    uint64_t slot_waits;
} tcpx_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Frees bytes allocated by the library. Ignores a zeroed struct.
void tcpx_bytes_free(tcpx_bytes bytes);

// Creates a configuration with the defaults of this machine; ignores the environment.
tcpx_status tcpx_config_defaults(tcpx_config **config);

// Creates a configuration with the defaults, overridden by the `TCPX_` variables of the
// environment.
tcpx_status tcpx_config_from_env(tcpx_config **config);

// Sets one value by its key, such as "lanes", or by its variable, such as "TCPX_LANES".
tcpx_status tcpx_config_set(tcpx_config *config, const char *key, const char *value);

// Passes every setting to `callback`, with `context`.
tcpx_status tcpx_config_each(const tcpx_config *config, tcpx_config_row_fn callback, void *context);

// Frees a configuration; sessions made from it are not affected.
void tcpx_config_free(tcpx_config *config);

// Passes every network interface of this machine to `callback`, with `context`.
tcpx_status tcpx_devices_each(tcpx_device_fn callback, void *context);

// Creates a descriptor with nothing armed.
tcpx_status tcpx_events_new(tcpx_events **events);

// Returns the descriptor, to wait for until it is readable: neither read from it nor close it.
// Valid until the handle is freed; remove it from the event loop before. -1 for NULL and in a
// forked child.
int tcpx_events_fd(const tcpx_events *events);

// Takes the events since the last call, and makes the descriptor unreadable. Writes the keys of up
// to `capacity` ended transfers to `keys`, and their number to `count`; sets `flags` to any of
// TCPX_EVENT_NOTIFIED, TCPX_EVENT_CLOSED and TCPX_EVENT_MORE. Never blocks. No event is lost: one
// that comes meanwhile is returned, or makes the descriptor readable again.
tcpx_status tcpx_events_take(const tcpx_events *events,
                             uint64_t *keys,
                             size_t capacity,
                             size_t *count,
                             uint32_t *flags);

// Frees the handle and closes its descriptor, at the latest when armed transfers in flight have
// ended.
void tcpx_events_free(tcpx_events *events);

// Reports each notification that arrives from now on, and the end of the session, to `events`.
// Call tcpx_session_take_notifications afterwards for notifications that have arrived already.
// TCPX_ERROR_CLOSED once the session is closed.
tcpx_status tcpx_session_subscribe(const tcpx_session *session, const tcpx_events *events);

// Reports the end of this posting of the transfer to `events`, once and with `key`, however it
// ends. Sets `state` to the state of the transfer: no event comes if it has already ended or was
// never posted.
tcpx_status tcpx_transfer_arm(const tcpx_transfer *transfer,
                              const tcpx_events *events,
                              uint64_t key,
                              tcpx_state *state);

// Adds a warning to the library's log, for layers above it that can return only a status: what
// failed, and why. Goes to stderr as the setting log says; nowhere before the first session. The
// rate is limited per `what`: ten lines at once, then one per second; `left_out` counts the
// suppressed lines.
void tcpx_log_warning(const char *what, const char *why);

// Returns the peer's name; valid until the handle is freed. NULL for NULL.
const char *tcpx_peer_name(const tcpx_peer *peer);

// Returns whether the peer is connected now.
bool tcpx_peer_is_connected(const tcpx_peer *peer);

// Connects now instead of with the first transfer. Returns at once if a connection exists. If
// `timeout_ms` expires first, the attempt continues in the background, up to the setting
// connect_timeout.
tcpx_status tcpx_peer_connect(const tcpx_peer *peer, uint64_t timeout_ms);

// Ends all connections to the peer; its transfers fail. A later transfer reconnects.
tcpx_status tcpx_peer_disconnect(const tcpx_peer *peer);

// Passes every lane of the current connection to `callback`, with `context`; none without a
// connection.
tcpx_status tcpx_peer_each_lane(const tcpx_peer *peer, tcpx_lane_fn callback, void *context);

// Reports to `callback`, with `context`, whether memory of a peer on this host is copied directly,
// and otherwise why not. Calls it once, or not at all without a connection.
tcpx_status tcpx_peer_same_host(const tcpx_peer *peer, tcpx_same_host_fn callback, void *context);

// Frees the handle; the session still knows the peer.
void tcpx_peer_free(tcpx_peer *peer);

// Returns the registration's number within its session, from 1 up; 0 for NULL.
uint64_t tcpx_region_id(const tcpx_region *region);

// Returns the address of the first byte; NULL for NULL.
void *tcpx_region_address(const tcpx_region *region);

// Returns the size of the region in bytes; 0 for NULL.
uint64_t tcpx_region_size(const tcpx_region *region);

// Returns the descriptor that a peer needs to address this region, for its
// `tcpx_remote_region_from_bytes`. The same range always has the same descriptor, whenever it is
// registered with this session.
tcpx_status tcpx_region_descriptor(const tcpx_region *region, tcpx_bytes *descriptor);

// Does what `tcpx_region_descriptor` does, in 15 bytes instead of 38, for
// `tcpx_remote_region_from_short` at peers that learn the region's address, size, kind and device
// by other means. If the region has another kind or device than given here, returns the full
// descriptor, which that function accepts too.
tcpx_status tcpx_region_short_descriptor(const tcpx_region *region,
                                         uint32_t kind,
                                         uint32_t device,
                                         tcpx_bytes *descriptor);

// Returns this session's region as its peers see it, for transfers of the session to itself: the
// result of `tcpx_remote_region_from_bytes` for its descriptor.
tcpx_status tcpx_region_as_remote(const tcpx_region *region, tcpx_remote_region **remote);

// Ends the registration before its handle is freed, for handles that are shared. When this
// returns, the memory is no longer accessed and may be freed; transfers that use it fail.
// TCPX_ERROR_NOT_ALLOWED if it has already ended.
tcpx_status tcpx_region_deregister(const tcpx_region *region);

// Frees the handle, and ends the registration as tcpx_region_deregister does.
void tcpx_region_free(tcpx_region *region);

// Reads the descriptor of a peer's region.
tcpx_status tcpx_remote_region_from_bytes(const void *descriptor,
                                          size_t descriptor_len,
                                          tcpx_remote_region **region);

// Reads a descriptor of `tcpx_region_short_descriptor` for a region of this address, size, kind
// and device.
tcpx_status tcpx_remote_region_from_short(const void *descriptor,
                                          size_t descriptor_len,
                                          uint64_t address,
                                          uint64_t size,
                                          uint32_t kind,
                                          uint32_t device,
                                          tcpx_remote_region **region);

// Returns the address of the first byte, in its owner's address space; 0 for NULL.
uint64_t tcpx_remote_region_address(const tcpx_remote_region *region);

// Returns the size of the region in bytes; 0 for NULL.
uint64_t tcpx_remote_region_size(const tcpx_remote_region *region);

// Returns the kind of memory at its owner, and its CUDA device (0 for host memory).
tcpx_status tcpx_remote_region_memory(const tcpx_remote_region *region,
                                      tcpx_memory *kind,
                                      uint32_t *device);

// Frees a remote region; prepared transfers keep what they need.
void tcpx_remote_region_free(tcpx_remote_region *region);

// Starts a session. The caller keeps the configuration.
tcpx_status tcpx_session_new(const tcpx_config *config, tcpx_session **session);

// Returns whether calls on the session may succeed: TCPX_ERROR_FORKED in a child of the process
// that created it, TCPX_ERROR_CLOSED once it is closed. Never blocks. Layers with locks of their
// own call it before they take one.
tcpx_status tcpx_session_check(const tcpx_session *session);

// Ends a session, but does not free the handle: blocked calls on other threads return
// TCPX_ERROR_CLOSED, and so do all calls from now on. Waits as tcpx_session_free does. When it
// returns, registered memory is no longer accessed. May be called more than once.
tcpx_status tcpx_session_close(const tcpx_session *session);

// Ends a session with its connections and threads, and frees the handle. Waits until the peers
// have their notifications and know how their transfers have ended, at most 5 seconds (or
// `peer_timeout` if that is less; on a plugin, a connection being made for them has
// `connect_timeout` first). Transfers in flight fail, here and at the peers.
void tcpx_session_free(tcpx_session *session);

// Returns the session's name; valid until the handle is freed. NULL for NULL.
const char *tcpx_session_name(const tcpx_session *session);

// Returns the connection info that a peer needs to connect. It contains the session's secret: its
// holders may connect, nobody else can.
tcpx_status tcpx_session_connection_info(const tcpx_session *session, tcpx_bytes *info);

// Adds a peer by its connection info; connecting happens later. The same info again gives another
// handle to the same peer; info of a new session under a known name replaces the old session.
tcpx_status tcpx_session_add_peer(const tcpx_session *session,
                                  const void *info,
                                  size_t info_len,
                                  tcpx_peer **peer);

// Returns the peer of that name: added before, or connected to this session.
tcpx_status tcpx_session_find_peer(const tcpx_session *session, const char *name, tcpx_peer **peer);

// Returns the peer that represents the session itself, for transfers within it.
tcpx_status tcpx_session_own_peer(const tcpx_session *session, tcpx_peer **peer);

// Removes a peer and ends its connections. Its transfers fail. It may be added again; the handle
// must still be freed.
tcpx_status tcpx_session_remove_peer(const tcpx_session *session, const tcpx_peer *peer);

// Waits for the next peer that connects to this session.
tcpx_status tcpx_session_accept(const tcpx_session *session, uint64_t timeout_ms, tcpx_peer **peer);

// Registers memory: `kind` is a tcpx_memory, `device` the number of the CUDA device for
// TCPX_MEMORY_CUDA and ignored otherwise. Overlapping and repeated registrations are legal. The
// memory must stay mapped until tcpx_region_free has returned: peers with its descriptor read and
// write it at any time.
tcpx_status tcpx_session_register(const tcpx_session *session,
                                  void *address,
                                  size_t len,
                                  uint32_t kind,
                                  uint32_t device,
                                  tcpx_region **region);

// Prepares a transfer over any number of segments; `op` is a tcpx_op. Nothing moves until it is
// posted. The array, and the handles in it, are not needed after this returns.
tcpx_status tcpx_session_prepare(const tcpx_session *session,
                                 uint32_t op,
                                 const tcpx_peer *peer,
                                 const tcpx_segment *segments,
                                 size_t segment_count,
                                 tcpx_transfer **transfer);

// Sends `len` bytes to the peer under a tag. Done when the peer has received them. Messages of one
// tag are received in the order of sending.
tcpx_status tcpx_session_send(const tcpx_session *session,
                              const tcpx_peer *peer,
                              const tcpx_region *region,
                              uint64_t address,
                              size_t len,
                              uint64_t tag,
                              tcpx_transfer **transfer);

// Receives the peer's next message under a tag, up to `len` bytes; tcpx_transfer_received returns
// its length. A longer one fails on both sides.
tcpx_status tcpx_session_recv(const tcpx_session *session,
                              const tcpx_peer *peer,
                              const tcpx_region *region,
                              uint64_t address,
                              size_t len,
                              uint64_t tag,
                              tcpx_transfer **transfer);

// Sends a notification; it is queued when this returns. Notifications to one peer arrive in order.
// An empty message is legal. TCPX_ERROR_BUSY, and nothing is sent, if the peer does not keep up
// and half of queue_bytes waits to be sent to it: try again later.
tcpx_status tcpx_session_notify(const tcpx_session *session,
                                const tcpx_peer *peer,
                                const void *message,
                                size_t message_len);

// Passes every notification that has arrived to `callback`, with `context`, oldest first. Never
// blocks.
tcpx_status tcpx_session_take_notifications(const tcpx_session *session,
                                            tcpx_notification_fn callback,
                                            void *context);

// Waits for the next notification and passes it to `callback`, with `context`.
tcpx_status tcpx_session_wait_notification(const tcpx_session *session,
                                           uint64_t timeout_ms,
                                           tcpx_notification_fn callback,
                                           void *context);

// Reads the statistics of a session. `stats->size` must be set.
tcpx_status tcpx_session_stats(const tcpx_session *session, tcpx_stats *stats);

// Writes the statistics of a session as OpenMetrics text, per peer, lane and path, with the
// kernel's statistics of each lane. The text is UTF-8, does not end with NUL and is freed by
// tcpx_bytes_free.
tcpx_status tcpx_session_metrics(const tcpx_session *session, tcpx_bytes *text);

// Returns the name of a status, such as "DISCONNECTED"; "UNKNOWN" for an undefined number.
const char *tcpx_status_name(int32_t status);

// Returns the message of the last failed call of this thread; never NULL. The text is valid until
// the thread's next failed call.
const char *tcpx_last_error(void);

// Returns the version of this library, such as "0.1.0".
const char *tcpx_version(void);

// Starts the transfer, connecting first if needed, and returns without waiting. Once it has ended
// it may be posted again at no set-up cost. Tagged sends and receives are posted when they are
// created.
tcpx_status tcpx_transfer_post(const tcpx_transfer *transfer);

// Does what tcpx_transfer_post does; the peer receives `message` once every byte is in place,
// exactly once if the transfer completes while the connection lives, and not at all if it fails. A
// transfer that fails with TCPX_ERROR_DISCONNECTED may have delivered its message, if only the
// last acknowledgement was lost; the message is never delivered twice for one posting. It may be
// empty. TCPX_ERROR_BUSY as for tcpx_session_notify.
tcpx_status tcpx_transfer_post_with_notification(const tcpx_transfer *transfer,
                                                 const void *message,
                                                 size_t message_len);

// Returns the state of the transfer. Never blocks, and may move bytes itself.
tcpx_status tcpx_transfer_poll(const tcpx_transfer *transfer, tcpx_state *state);

// Waits until the transfer has ended, and returns its state. TCPX_ERROR_TIMEOUT if it has not
// ended by then: it continues.
tcpx_status tcpx_transfer_wait(const tcpx_transfer *transfer, uint64_t timeout_ms);

// Aborts the transfer. Never waits for the peer. When this returns, local memory is no longer read
// or written for the transfer. Bytes of a WRITE that were in flight may still land at the peer, but
// not after the bytes of a WRITE that this session posts to the same addresses of this peer
// later, unless the connection is lost.
tcpx_status tcpx_transfer_abort(const tcpx_transfer *transfer);

// Returns the reason the transfer failed; tcpx_last_error has the message. TCPX_OK if it has not
// failed (yet).
tcpx_status tcpx_transfer_error(const tcpx_transfer *transfer);

// Returns the number of bytes that the transfer moves; 0 for NULL.
uint64_t tcpx_transfer_bytes(const tcpx_transfer *transfer);

// Returns the length of the message that a tagged receive got; 0 until it is known.
uint64_t tcpx_transfer_received(const tcpx_transfer *transfer);

// Estimates the duration of a posting from earlier transfers to the same peer, with the error of
// the estimate; in microseconds.
tcpx_status tcpx_transfer_estimate(const tcpx_transfer *transfer,
                                   uint64_t *duration_us,
                                   uint64_t *margin_us);

// Releases the transfer: aborts it if it is in flight, and frees it. Never waits for the peer.
void tcpx_transfer_free(tcpx_transfer *transfer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TCPX_P2P_H */
