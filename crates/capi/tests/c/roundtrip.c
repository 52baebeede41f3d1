/* Two sessions in one process: uses every function of the header as a C program would. */
#define _POSIX_C_SOURCE 200809L
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tcpx_p2p.h"

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s\nlast error: %s\n", __FILE__, __LINE__, #condition, \
                    tcpx_last_error());                                                   \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)
#define OK(call) CHECK((call) == TCPX_OK)

/* A child inherits AddressSanitizer's allocator, locked if another thread was in it. */
#ifdef __SANITIZE_ADDRESS__
enum { CHILDREN = 0 };
#else
enum { CHILDREN = 10 };
#endif
enum { SIZE = 1 << 20, MANY = 100000, WAIT_MS = 20000 };

typedef struct {
    char from[64];
    uint8_t message[64];
    size_t message_len;
    int count;
} Mail;

static void on_notification(void *context, const char *from, size_t from_len, const uint8_t *message,
                            size_t message_len)
{
    Mail *mail = context;
    CHECK(from_len < sizeof mail->from && message_len <= sizeof mail->message);
    memcpy(mail->from, from, from_len);
    mail->from[from_len] = '\0';
    memcpy(mail->message, message, message_len);
    mail->message_len = message_len;
    mail->count++;
}

static void on_row(void *context, const tcpx_config_row *row)
{
    CHECK(row->size == sizeof *row && row->key[0] && strncmp(row->variable, "TCPX_", 5) == 0 && row->help[0] && row->reason[0]);
    if (strcmp(row->key, "lanes") == 0) {
        snprintf(context, 16, "%s", row->value);
        CHECK(strcmp(row->source, "set by the program") == 0);
    }
}

static tcpx_session *start_with(const char *name, const char *same_host)
{
    tcpx_config *config;
    tcpx_session *session;
    OK(tcpx_config_from_env(&config));
    OK(tcpx_config_set(config, "name", name));
    OK(tcpx_config_set(config, "same_host", same_host));
    OK(tcpx_session_new(config, &session));
    tcpx_config_free(config);
    CHECK(strcmp(tcpx_session_name(session), name) == 0);
    return session;
}

static tcpx_session *start(const char *name)
{
    return start_with(name, "auto");
}

static void fill(uint8_t *bytes, size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++) {
        seed = seed * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(seed >> 24);
    }
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static uint64_t at(const void *address)
{
    return (uint64_t)(uintptr_t)address;
}

static void configuration(void)
{
    tcpx_config *config;
    char lanes[16] = "";
    OK(tcpx_config_defaults(&config));
    OK(tcpx_config_set(config, "lanes", "3"));
    OK(tcpx_config_each(config, on_row, lanes));
    CHECK(strcmp(lanes, "3") == 0);
    OK(tcpx_config_set(config, "listen_port", "18000-18015"));
    OK(tcpx_config_set(config, "advertise", "+node.example:30000-30015"));
    CHECK(tcpx_config_set(config, "listen_port", "18015-18000") == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_config_set(config, "lane", "3") == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(tcpx_last_error(), "\"lane\""));
    CHECK(tcpx_config_set(config, "lanes", "many") == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(tcpx_last_error(), "many"));
    CHECK(tcpx_config_set(config, "lanes", "\xff") == TCPX_ERROR_INVALID_ARGUMENT);
    tcpx_config_free(config);
}

static void on_device(void *context, const tcpx_device *device)
{
    CHECK(device->size == sizeof *device && device->name[0] && device->kind[0] && device->mtu > 0);
    if (strcmp(device->kind, "loopback") == 0) {
        CHECK(strstr(device->addresses, "127.0.0.1/8") && device->why_not && !device->pci_address[0]);
        ++*(int *)context;
    }
}

static void on_lane(void *context, const tcpx_lane *lane)
{
    CHECK(lane->size == sizeof *lane && strncmp(lane->local, "127.0.0.1:", 10) == 0);
    CHECK(strncmp(lane->remote, "127.0.0.1:", 10) == 0);
    ++*(int *)context;
}

typedef struct {
    int count;
    uint64_t bytes;
    char why_not[128];
} Direct;

static void on_same_host(void *context, const tcpx_same_host *same_host)
{
    Direct *direct = context;
    CHECK(same_host->size == sizeof *same_host);
    direct->count++;
    direct->bytes = same_host->bytes;
    snprintf(direct->why_not, sizeof direct->why_not, "%s", same_host->why_not ? same_host->why_not : "");
}

/* Lanes carry everything to a session that copies no memory directly, and the reason is
 * reported. */
static void by_lanes(tcpx_session *bob, tcpx_remote_region *target, const uint8_t *there)
{
    tcpx_session *carol = start_with("carol", "off");
    tcpx_bytes info;
    tcpx_peer *to_bob;
    tcpx_region *local;
    tcpx_transfer *read;
    uint8_t *here = calloc(1, SIZE);
    CHECK(here);
    OK(tcpx_session_connection_info(bob, &info));
    OK(tcpx_session_add_peer(carol, info.data, info.len, &to_bob));
    tcpx_bytes_free(info);
    Direct direct = {0};
    OK(tcpx_peer_same_host(to_bob, on_same_host, &direct));
    CHECK(direct.count == 0);
    OK(tcpx_session_register(carol, here, SIZE, TCPX_MEMORY_HOST, 0, &local));
    tcpx_segment whole = {local, at(here), target, at(there), SIZE};
    OK(tcpx_session_prepare(carol, TCPX_READ, to_bob, &whole, 1, &read));
    OK(tcpx_transfer_post(read));
    OK(tcpx_transfer_wait(read, WAIT_MS));
    CHECK(memcmp(here, there, SIZE) == 0);
    OK(tcpx_peer_same_host(to_bob, on_same_host, &direct));
    CHECK(direct.count == 1 && direct.bytes == 0 && strcmp(direct.why_not, "same_host is off") == 0);
    CHECK(tcpx_peer_same_host(to_bob, NULL, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    tcpx_transfer_free(read);
    tcpx_region_free(local);
    tcpx_peer_free(to_bob);
    tcpx_session_free(carol);
    free(here);
}

static bool is_readable(tcpx_events *events, int timeout_ms)
{
    struct pollfd fd = {.fd = tcpx_events_fd(events), .events = POLLIN};
    return poll(&fd, 1, timeout_ms) == 1;
}

/* Waits in an event loop: nothing polls the transfer. */
static void in_an_event_loop(tcpx_session *alice, tcpx_session *bob, tcpx_transfer *write)
{
    tcpx_events *events;
    tcpx_state state;
    uint64_t keys[4];
    size_t count;
    uint32_t flags;
    bool ended = false;
    Mail mail = {0};
    OK(tcpx_events_new(&events));
    OK(tcpx_session_subscribe(bob, events));
    CHECK(!is_readable(events, 0));
    OK(tcpx_transfer_post_with_notification(write, "loop", 4));
    OK(tcpx_transfer_arm(write, events, 7, &state));
    ended = state == TCPX_DONE;
    while (!ended || !mail.count) {
        CHECK(is_readable(events, WAIT_MS));
        OK(tcpx_events_take(events, keys, 4, &count, &flags));
        CHECK(!(flags & (TCPX_EVENT_CLOSED | TCPX_EVENT_MORE)) && count <= 1);
        CHECK(count == 0 || (keys[0] == 7 && !ended));
        ended = ended || count == 1;
        if (flags & TCPX_EVENT_NOTIFIED) {
            OK(tcpx_session_take_notifications(bob, on_notification, &mail));
        }
    }
    CHECK(!is_readable(events, 0));
    CHECK(mail.count == 1 && memcmp(mail.message, "loop", 4) == 0);
    OK(tcpx_transfer_arm(write, events, 7, &state));
    CHECK(state == TCPX_DONE && !is_readable(events, 0));

    for (int children = 0; children < CHILDREN; children++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            CHECK(tcpx_transfer_arm(write, events, 1, &state) == TCPX_ERROR_FORKED);
            CHECK(tcpx_session_subscribe(alice, events) == TCPX_ERROR_FORKED);
            CHECK(tcpx_events_take(events, keys, 4, &count, &flags) == TCPX_ERROR_FORKED);
            CHECK(tcpx_events_fd(events) == -1);
            tcpx_events_free(events);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }

    CHECK(tcpx_events_new(NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_events_fd(NULL) == -1);
    CHECK(tcpx_events_take(events, NULL, 4, &count, &flags) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_subscribe(bob, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_transfer_arm(write, NULL, 1, &state) == TCPX_ERROR_INVALID_ARGUMENT);
    tcpx_events_free(NULL);

    tcpx_session *carol = start("carol");
    OK(tcpx_session_subscribe(carol, events));
    tcpx_session_free(carol);
    CHECK(is_readable(events, WAIT_MS));
    OK(tcpx_events_take(events, NULL, 0, &count, &flags));
    CHECK(flags == TCPX_EVENT_CLOSED && count == 0);
    tcpx_events_free(events);
}

/* A forked child may not use what it inherited, may free it, and may start a session of its own. */
static void in_a_child(tcpx_session *session, tcpx_region *region, tcpx_peer *peer,
                       tcpx_transfer *transfer)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        tcpx_state state;
        tcpx_bytes bytes;
        tcpx_peer *own;
        CHECK(tcpx_session_check(session) == TCPX_ERROR_FORKED);
        CHECK(strstr(tcpx_last_error(), "create a session in this process"));
        CHECK(tcpx_session_notify(session, peer, "never", 5) == TCPX_ERROR_FORKED);
        CHECK(tcpx_session_own_peer(session, &own) == TCPX_ERROR_FORKED);
        CHECK(tcpx_session_connection_info(session, &bytes) == TCPX_ERROR_FORKED);
        CHECK(tcpx_peer_connect(peer, WAIT_MS) == TCPX_ERROR_FORKED);
        CHECK(!tcpx_peer_is_connected(peer));
        CHECK(tcpx_peer_same_host(peer, on_same_host, NULL) == TCPX_ERROR_FORKED);
        CHECK(tcpx_region_deregister(region) == TCPX_ERROR_FORKED);
        CHECK(tcpx_transfer_post(transfer) == TCPX_ERROR_FORKED);
        CHECK(tcpx_transfer_poll(transfer, &state) == TCPX_ERROR_FORKED);
        CHECK(tcpx_transfer_wait(transfer, WAIT_MS) == TCPX_ERROR_FORKED);
        CHECK(tcpx_session_close(session) == TCPX_ERROR_FORKED);
        tcpx_transfer_free(transfer);
        tcpx_peer_free(peer);
        tcpx_region_free(region);
        tcpx_session_free(session);
        tcpx_session_free(start("child"));
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Every NULL argument is refused, and outputs are not written. */
static void nothing(tcpx_session *session)
{
    tcpx_peer *peer = (tcpx_peer *)"untouched";
    tcpx_peer *const before = peer;
    tcpx_state state = TCPX_DONE;
    CHECK(tcpx_config_from_env(NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_new(NULL, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_add_peer(session, NULL, 1, &peer) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(strcmp(tcpx_last_error(), "info is NULL") == 0);
    CHECK(tcpx_session_add_peer(session, "junk", 4, &peer) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_find_peer(session, "nobody", &peer) == TCPX_ERROR_NOT_FOUND);
    CHECK(strstr(tcpx_last_error(), "nobody"));
    CHECK(tcpx_session_take_notifications(session, NULL, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_transfer_poll(NULL, &state) == TCPX_ERROR_INVALID_ARGUMENT && state == TCPX_DONE);
    CHECK(peer == before);
    CHECK(tcpx_session_name(NULL) == NULL && tcpx_transfer_bytes(NULL) == 0);
    CHECK(tcpx_session_accept(session, 1, &peer) == TCPX_ERROR_TIMEOUT && peer == before);
    tcpx_region *region = NULL;
    CHECK(tcpx_session_register(session, &state, 0, TCPX_MEMORY_HOST, 0, &region) ==
          TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_register(session, &state, 4, 9, 0, &region) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_register(session, NULL, 4, TCPX_MEMORY_HOST, 0, &region) ==
          TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_region_deregister(NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_region_id(NULL) == 0 && tcpx_region_size(NULL) == 0 && !tcpx_region_address(NULL));
    CHECK(tcpx_devices_each(NULL, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_peer_same_host(NULL, on_same_host, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    tcpx_log_warning(NULL, NULL);
    tcpx_session_free(NULL);
    tcpx_peer_free(NULL);
    tcpx_region_free(NULL);
    tcpx_remote_region_free(NULL);
    tcpx_transfer_free(NULL);
    tcpx_config_free(NULL);
    tcpx_bytes_free((tcpx_bytes){NULL, 0});
    CHECK(strcmp(tcpx_status_name(TCPX_ERROR_DISCONNECTED), "DISCONNECTED") == 0);
    CHECK(strcmp(tcpx_status_name(-7), "UNKNOWN") == 0);
}

int main(void)
{
    configuration();
    tcpx_session *alice = start("alice");
    tcpx_session *bob = start("bob");
    nothing(alice);

    /* Bob offers memory; info and descriptor would travel by the application's own means. */
    uint8_t *here = malloc(SIZE), *there = calloc(1, SIZE);
    CHECK(here && there);
    tcpx_region *local, *remote;
    tcpx_bytes info, descriptor;
    OK(tcpx_session_register(alice, here, SIZE, TCPX_MEMORY_HOST, 0, &local));
    OK(tcpx_session_register(bob, there, SIZE, TCPX_MEMORY_AUTO, 0, &remote));
    CHECK(tcpx_region_id(local) > 0 && tcpx_region_address(local) == here && tcpx_region_size(local) == SIZE);
    OK(tcpx_session_connection_info(bob, &info));
    OK(tcpx_region_descriptor(remote, &descriptor));
    tcpx_remote_region *target;
    OK(tcpx_remote_region_from_bytes(descriptor.data, descriptor.len, &target));
    tcpx_memory kind = TCPX_MEMORY_CUDA;
    uint32_t device = 7;
    OK(tcpx_remote_region_memory(target, &kind, &device));
    CHECK(kind == TCPX_MEMORY_HOST && device == 0);
    CHECK(tcpx_remote_region_address(target) == at(there) && tcpx_remote_region_size(target) == SIZE);
    tcpx_peer *to_bob;
    OK(tcpx_session_add_peer(alice, info.data, info.len, &to_bob));
    tcpx_bytes_free(info);
    tcpx_bytes_free(descriptor);
    CHECK(strcmp(tcpx_peer_name(to_bob), "bob") == 0);
    OK(tcpx_peer_connect(to_bob, WAIT_MS));
    CHECK(tcpx_peer_is_connected(to_bob));
    tcpx_peer *to_alice, *found;
    OK(tcpx_session_accept(bob, WAIT_MS, &to_alice));
    CHECK(strcmp(tcpx_peer_name(to_alice), "alice") == 0);
    OK(tcpx_session_find_peer(bob, "alice", &found));
    tcpx_peer_free(found);

    int devices = 0, lanes = 0;
    OK(tcpx_devices_each(on_device, &devices));
    OK(tcpx_peer_each_lane(to_bob, on_lane, &lanes));
    CHECK(devices == 1 && lanes > 0);

    /* WRITE of two pieces with a notification, polled; posted twice. */
    fill(here, SIZE, 1);
    tcpx_segment pieces[2] = {
        {local, at(here), target, at(there) + SIZE / 2, SIZE / 4},
        {local, at(here) + SIZE / 2, target, at(there), SIZE / 4},
    };
    tcpx_transfer *write;
    tcpx_state state;
    uint64_t duration, margin;
    OK(tcpx_session_prepare(alice, TCPX_WRITE, to_bob, pieces, 2, &write));
    CHECK(tcpx_transfer_bytes(write) == SIZE / 2);
    OK(tcpx_transfer_poll(write, &state));
    CHECK(state == TCPX_PREPARED);
    for (int children = 0; children < CHILDREN; children++) {
        in_a_child(alice, local, to_bob, write);
    }
    for (int round = 0; round < 2; round++) {
        memset(there, 0, SIZE);
        OK(tcpx_transfer_post_with_notification(write, "a\0b", 3));
        do {
            OK(tcpx_transfer_poll(write, &state));
        } while (state == TCPX_IN_PROGRESS);
        CHECK(state == TCPX_DONE);
        OK(tcpx_transfer_error(write));
        CHECK(memcmp(there + SIZE / 2, here, SIZE / 4) == 0);
        CHECK(memcmp(there, here + SIZE / 2, SIZE / 4) == 0);
        Mail mail = {0};
        OK(tcpx_session_wait_notification(bob, WAIT_MS, on_notification, &mail));
        CHECK(mail.count == 1 && strcmp(mail.from, "alice") == 0);
        CHECK(mail.message_len == 3 && memcmp(mail.message, "a\0b", 3) == 0);
    }
    OK(tcpx_transfer_estimate(write, &duration, &margin));
    CHECK(duration > 0);

    /* The statistics cover everything, and fit the caller's struct. */
    tcpx_stats stats = {0};
    CHECK(tcpx_session_stats(alice, &stats) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(tcpx_session_stats(alice, NULL) == TCPX_ERROR_INVALID_ARGUMENT);
    stats.size = offsetof(tcpx_stats, bytes_received);
    stats.bytes_received = 77;
    OK(tcpx_session_stats(alice, &stats));
    CHECK(stats.bytes_sent == SIZE && stats.bytes_received == 77);
    CHECK(stats.size == offsetof(tcpx_stats, bytes_received));
    stats.size = 2 * sizeof stats;
    OK(tcpx_session_stats(alice, &stats));
    CHECK(stats.size == sizeof stats && stats.bytes_received == 0);
    CHECK(stats.transfers_started == 2 && stats.transfers_completed == 2);
    CHECK(stats.transfer_bytes == SIZE && stats.notifications_sent == 2 && stats.connections == 1);
    in_an_event_loop(alice, bob, write);
    tcpx_bytes metrics;
    OK(tcpx_session_metrics(alice, &metrics));
    CHECK(metrics.len > 6 && memcmp(metrics.data + metrics.len - 6, "# EOF\n", 6) == 0);
    tcpx_bytes_free(metrics);
    tcpx_transfer_free(write);

    /* READ of everything. */
    fill(there, SIZE, 2);
    tcpx_segment whole = {local, at(here), target, at(there), SIZE};
    tcpx_transfer *read;
    OK(tcpx_session_prepare(alice, TCPX_READ, to_bob, &whole, 1, &read));
    OK(tcpx_transfer_post(read));
    OK(tcpx_transfer_wait(read, WAIT_MS));
    CHECK(memcmp(here, there, SIZE) == 0);

    /* Everything was copied directly, unless this machine forbids that and reports why. */
    Direct direct = {0};
    OK(tcpx_peer_same_host(to_bob, on_same_host, &direct));
    CHECK(direct.count == 1);
    if (direct.why_not[0]) {
        printf("not copied directly: %s\n", direct.why_not);
        CHECK(direct.bytes == 0);
    } else {
        CHECK(direct.bytes == 2 * SIZE + SIZE / 2);
    }
    by_lanes(bob, target, there);

    /* Invalid segments. */
    tcpx_transfer *none = NULL;
    tcpx_segment bad = {local, at(here) - 1, target, at(there), 1};
    CHECK(tcpx_session_prepare(alice, TCPX_READ, to_bob, &bad, 1, &none) ==
          TCPX_ERROR_INVALID_ARGUMENT);
    bad = (tcpx_segment){local, at(here), target, at(there) + SIZE, 1};
    CHECK(tcpx_session_prepare(alice, TCPX_READ, to_bob, &bad, 1, &none) ==
          TCPX_ERROR_INVALID_ARGUMENT);
    bad = (tcpx_segment){local, at(here), NULL, at(there), 1};
    CHECK(tcpx_session_prepare(alice, TCPX_READ, to_bob, &bad, 1, &none) ==
          TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(tcpx_last_error(), "segment 0"));
    CHECK(tcpx_session_prepare(alice, 7, to_bob, &whole, 1, &none) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(none == NULL);

    /* Many segments cost little. */
    tcpx_segment *many = malloc(MANY * sizeof *many);
    CHECK(many);
    for (size_t i = 0; i < MANY; i++) {
        many[i] = (tcpx_segment){local, at(here) + i * 7, target, at(there) + i * 9, 5};
    }
    tcpx_transfer *scattered;
    double begin = now_ms();
    OK(tcpx_session_prepare(alice, TCPX_WRITE, to_bob, many, MANY, &scattered));
    printf("%d segments prepared in %.2f ms\n", MANY, now_ms() - begin);
    free(many);
    OK(tcpx_transfer_post(scattered));
    OK(tcpx_transfer_wait(scattered, WAIT_MS));
    for (size_t i = 0; i < MANY; i++) {
        CHECK(memcmp(here + i * 7, there + i * 9, 5) == 0);
    }
    tcpx_transfer_free(scattered);

    /* Tagged messages, the buffer larger than the message. */
    fill(here, 5000, 3);
    tcpx_transfer *send, *receive;
    OK(tcpx_session_send(alice, to_bob, local, at(here), 5000, 42, &send));
    OK(tcpx_session_recv(bob, to_alice, remote, at(there), 8000, 42, &receive));
    OK(tcpx_transfer_wait(receive, WAIT_MS));
    OK(tcpx_transfer_wait(send, WAIT_MS));
    CHECK(tcpx_transfer_received(receive) == 5000 && memcmp(here, there, 5000) == 0);
    CHECK(tcpx_transfer_post(send) == TCPX_ERROR_NOT_ALLOWED);
    tcpx_transfer_free(send);
    tcpx_transfer_free(receive);

    /* Notifications, an empty one first. */
    Mail mail = {0};
    OK(tcpx_session_notify(alice, to_bob, NULL, 0));
    OK(tcpx_session_notify(alice, to_bob, "hello", 5));
    OK(tcpx_session_wait_notification(bob, WAIT_MS, on_notification, &mail));
    CHECK(mail.message_len == 0);
    while (mail.count < 2) {
        OK(tcpx_session_take_notifications(bob, on_notification, &mail));
    }
    CHECK(mail.message_len == 5);

    /* Within one session. */
    tcpx_peer *self;
    tcpx_remote_region *own;
    tcpx_transfer *copy;
    OK(tcpx_session_own_peer(bob, &self));
    OK(tcpx_region_descriptor(remote, &descriptor));
    OK(tcpx_remote_region_from_bytes(descriptor.data, descriptor.len, &own));
    tcpx_bytes_free(descriptor);
    fill(there, SIZE / 2, 4);
    tcpx_segment half = {remote, at(there), own, at(there) + SIZE / 2, SIZE / 2};
    OK(tcpx_session_prepare(bob, TCPX_WRITE, self, &half, 1, &copy));
    OK(tcpx_transfer_post(copy));
    OK(tcpx_transfer_wait(copy, WAIT_MS));
    CHECK(memcmp(there, there + SIZE / 2, SIZE / 2) == 0);
    tcpx_transfer_free(copy);
    tcpx_remote_region_free(own);
    tcpx_peer_free(self);

    /* A region that the peer has deregistered. */
    OK(tcpx_region_deregister(remote));
    CHECK(tcpx_region_deregister(remote) == TCPX_ERROR_NOT_ALLOWED);
    tcpx_region_free(remote);
    OK(tcpx_transfer_post(read));
    CHECK(tcpx_transfer_wait(read, WAIT_MS) == TCPX_ERROR_REGION_GONE);
    CHECK(tcpx_transfer_error(read) == TCPX_ERROR_REGION_GONE);

    /* A peer that has left. */
    tcpx_peer_free(to_alice);
    tcpx_session_free(bob);
    tcpx_status status = tcpx_transfer_post(read);
    CHECK(status == TCPX_OK || status == TCPX_ERROR_DISCONNECTED);
    CHECK(tcpx_transfer_wait(read, WAIT_MS) == TCPX_ERROR_DISCONNECTED);
    OK(tcpx_peer_disconnect(to_bob));
    OK(tcpx_session_remove_peer(alice, to_bob));
    CHECK(tcpx_transfer_post(read) == TCPX_ERROR_NOT_FOUND);

    /* Handles end in any order. */
    tcpx_session_free(alice);
    CHECK(tcpx_transfer_post(read) == TCPX_ERROR_CLOSED);
    OK(tcpx_transfer_abort(read));
    tcpx_region_free(local);
    tcpx_transfer_free(read);
    tcpx_remote_region_free(target);
    tcpx_peer_free(to_bob);
    free(here);
    free(there);
    printf("libtcpx_p2p %s: all good\n", tcpx_version());
    return 0;
}
