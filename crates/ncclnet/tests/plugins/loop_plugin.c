/* A small net plugin over loopback TCP, for the loader's tests. One source for any version of
 * the API:
 *
 * cc -shared -fPIC -DAPI_VERSION=7 loop_plugin.c
 *
 * It moves real bytes and is as strict as the contract allows: anything that the loader must not
 * do (move a handle, test out of order, call after an error, forget a registration, ...) returns
 * ncclInternalError with a warning, or aborts where a real plugin would access freed memory.
 *
 * Variants: FAIL_INIT, NO_DEVICES, DEVICE_TYPE / DEVICE_VERSION, FAIL_CONNECT, FAIL_ACCEPT,
 * NULL_LISTEN, NO_ISEND, NO_CONSUME, EMPTY_DEVICE_HANDLE, SLOTS=n, MHANDLES=0 (no memory
 * handles), SIZES=0 (never written), FILL_IN_INIT (init fills in the table), LOG_THREAD,
 * MAX_P2P=n (bytes of a message, from version 9 on), FAIL_FLUSH=n (the n-th of a comm fails),
 * EAGER (connect returns a comm at once, and accept blocks until its connection is there),
 * BLOCKS (connect blocks for a minute), STUCK (accepts nothing after some messages), SLOW (sends
 * 2 KiB per call, and aborts at a message whose memory was deregistered).
 *
 * Bytes received into CUDA memory are held back until a flush of the same range is done. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef API_VERSION
#error "API_VERSION is 4 to 12"
#endif
#ifndef SLOTS
#define SLOTS (API_VERSION >= 7 ? 16 : 8)
#endif
#ifndef MHANDLES
#define MHANDLES 1
#endif
#ifndef SIZES
#define SIZES 1
#endif
#ifndef DEVICE_TYPE
#define DEVICE_TYPE 0
#endif
#ifndef DEVICE_VERSION
#define DEVICE_VERSION (DEVICE_TYPE == 1 ? 7 : 0)
#endif
#ifndef MAX_P2P
#define MAX_P2P (8 << 20)
#endif
#ifndef FAIL_FLUSH
#define FAIL_FLUSH -1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5 };
enum { LEVEL_VERSION = 1, LEVEL_WARN = 2, LEVEL_INFO = 3 };
enum { PTR_HOST = 1, PTR_CUDA = 2, PTR_DMABUF = 4 };
enum { HANDLE_BYTES = API_VERSION == 4 ? 64 : 128 };
enum { MAX_SLOTS = 32 };

typedef void (*logger_t)(int level, unsigned long flags, const char *file, int line, const char *fmt,
                         ...);
typedef int (*profiler_t)(void **event, int type, void *parent, int64_t plugin, void *data);

static logger_t logger;
#if API_VERSION >= 10
static profiler_t profiler;
#endif
static int initialised;

#define WARN(...) logger(LEVEL_WARN, 0x10, __FILE__, __LINE__, __VA_ARGS__)
#define REFUSE(...)        \
  do {                     \
    WARN(__VA_ARGS__);     \
    return INTERNAL_ERROR; \
  } while (0)

/* Number of open comms, listeners, memory handles and contexts. The tests read it. */
__attribute__((weak)) _Atomic int loop_plugin_live;
/* How often init was called. */
__attribute__((weak)) _Atomic int loop_plugin_inits;
/* Number of comms that a thread is connecting. */
__attribute__((weak)) _Atomic int loop_plugin_connecting;

/* ---- comms ---- */

enum direction { SEND, RECV, FLUSH };
enum state { FREE, POSTED, DONE };

struct comm;
struct request {
  struct comm *comm;
  enum direction direction;
  enum state state;
  char *data;
  size_t size; /* of the buffer, then of the message */
  size_t moved;
  uint64_t order;
  int tests;
  struct kept *kept;
};

/* Received bytes that are not flushed. */
struct kept {
  struct kept *next;
  struct request *owner;
  int flushing;
  char *data; /* their destination */
  size_t size;
  char bytes[];
};

struct header {
  uint64_t size;
  int64_t tag;
};

struct comm {
  int fd;
  enum direction direction;
  int failed;
  int calls; /* isend and irecv, to refuse some of them */
  int memories;
  uint64_t posted, tested, consumed;
  struct header header;
  size_t header_moved;
  struct request requests[MAX_SLOTS];
  int flush_calls;
  int flushing;
  struct request flushes[MAX_SLOTS];
  struct kept *kept; /* received and not flushed */
  struct sockaddr_in address;
  atomic_int connecting; /* a thread is connecting it */
};

struct memory {
  struct comm *comm;
  char *data;
  size_t size;
  int type;
};

struct listener {
  int fd;
  int accepts;
  int pending;
  int spent;
  int failed;
  void *out; /* the buffer of the first accept */
};

struct attempt {
  int fd;
  int polls;
  void *handle; /* its address in the first connect */
  void *out;
};

/* The start of the handle; the attempt is at the same place as in real plugins. */
struct handle {
  struct sockaddr_in address;
  char pad[HANDLE_BYTES == 64 ? 24 : 64];
  struct attempt *attempt;
};
_Static_assert(sizeof(struct handle) <= HANDLE_BYTES, "handle");

struct device_handle {
  int type;
  int version;
  void *handle;
  size_t size;
  int needs_proxy_progress;
};

struct config {
  int traffic_class;
};

struct context {
  int magic;
};

static struct comm *new_comm(int fd, enum direction direction) {
  struct comm *comm = calloc(1, sizeof *comm);
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  comm->fd = fd;
  comm->direction = direction;
  loop_plugin_live++;
  return comm;
}

/* ---- properties, as each version lays them out ---- */

struct properties {
  char *name;
  char *pci_path;
  uint64_t guid;
  int ptr_support;
#if API_VERSION >= 8
  int reg_is_global;
#endif
#if API_VERSION >= 9
  int force_flush;
#endif
  int speed;
  int port;
#if API_VERSION >= 5
  float latency;
#endif
  int max_comms;
#if API_VERSION >= 5
  int max_recvs;
#endif
#if API_VERSION >= 7
  int device_type;
  int device_version;
#endif
#if API_VERSION >= 9
  struct {
    int count;
    int devices[API_VERSION >= 12 ? 8 : 4];
  } virtual_device;
  size_t max_p2p_bytes;
  size_t max_coll_bytes;
#endif
#if API_VERSION >= 11
  int max_multi_request_size;
#endif
#if API_VERSION >= 12
  int16_t rail_id;
  int16_t plane_id;
#endif
};

static int loop_devices(int *count) {
#ifdef NO_DEVICES
  *count = 0;
#else
  *count = 2;
#endif
  return OK;
}

static int loop_properties(int device, void *out) {
  static char *names[] = {"loop0", "loop1"};
  if (device < 0 || device > 1) REFUSE("no device %d", device);
  struct properties *p = out;
  p->name = names[device];
  p->pci_path = device == 0 ? NULL : "/sys/devices/loop1";
  p->guid = 0x1000 + (uint64_t)device;
  p->ptr_support = PTR_HOST | PTR_CUDA | (API_VERSION >= 6 ? PTR_DMABUF : 0);
  p->speed = 12345;
  p->port = 3;
  p->max_comms = 77;
#if API_VERSION >= 5
  p->latency = 1.5f;
  p->max_recvs = 1;
#endif
#if API_VERSION >= 7
  p->device_type = DEVICE_TYPE;
  p->device_version = DEVICE_VERSION;
#endif
#if API_VERSION >= 8
  p->reg_is_global = 1;
#endif
#if API_VERSION >= 9
  p->force_flush = 1;
  p->virtual_device.count = 1;
  p->virtual_device.devices[0] = device;
  p->max_p2p_bytes = MAX_P2P;
  p->max_coll_bytes = 1 << 20;
#endif
#if API_VERSION >= 11
  p->max_multi_request_size = 1;
#endif
#if API_VERSION >= 12
  p->rail_id = -1;
  p->plane_id = -1;
#endif
  return OK;
}

/* ---- connecting ---- */

static int listen_at(int device, void *handle, void **out) {
  if (device < 0 || device > 1) REFUSE("no device %d", device);
#ifdef NULL_LISTEN
  (void)handle;
  *out = NULL;
  return OK;
#endif
  struct handle *h = handle;
  memset(handle, 0, HANDLE_BYTES);
  struct listener *l = calloc(1, sizeof *l);
  l->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  if (bind(l->fd, (void *)&address, length) || listen(l->fd, 1) ||
      getsockname(l->fd, (void *)&address, &length)) {
    WARN("listen: %s", strerror(errno));
    return SYSTEM_ERROR;
  }
  h->address = address;
  loop_plugin_live++;
  *out = l;
  return OK;
}

#ifdef EAGER
/* Takes some time, as connecting over a network does. */
static void *connect_eagerly(void *argument) {
  struct comm *c = argument;
  usleep(300 * 1000);
  if (connect(c->fd, (void *)&c->address, sizeof c->address)) WARN("connect: %s", strerror(errno));
  c->connecting = 0;
  loop_plugin_connecting--;
  return NULL;
}
#endif

static int connect_to(int device, void *handle, void **out) {
  if (device < 0 || device > 1) REFUSE("no device %d", device);
  #ifdef BLOCKS
  sleep(60); /* plugins of this version may block */
#endif
  struct handle *h = handle;
  struct attempt *a = h->attempt;
  *out = NULL;
  if (a == NULL) {
    a = h->attempt = calloc(1, sizeof *a);
    a->handle = handle;
    a->out = out;
    a->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  }
  if (a->fd == -1) abort(); /* called again after an error: the state is gone */
  if (a->handle != handle || a->out != out) REFUSE("the buffers of connect have moved");
#ifdef EAGER
  struct comm *eager = new_comm(a->fd, SEND);
  eager->address = h->address;
  eager->connecting = 1;
  loop_plugin_connecting++;
  pthread_t thread;
  pthread_create(&thread, NULL, connect_eagerly, eager);
  pthread_detach(thread);
  *out = eager;
  free(a);
  return OK;
#endif
  if (++a->polls < 4) return OK;
#ifdef FAIL_CONNECT
  close(a->fd);
  a->fd = -1;
  WARN("no way to device %d", device);
  return SYSTEM_ERROR;
#endif
  if (connect(a->fd, (void *)&h->address, sizeof h->address)) {
    WARN("connect: %s", strerror(errno));
    close(a->fd);
    a->fd = -1;
    return SYSTEM_ERROR;
  }
  *out = new_comm(a->fd, SEND);
  free(a);
  h->attempt = NULL;
  return OK;
}

static int accept_from(void *listener, void **out) {
  struct listener *l = listener;
  *out = NULL;
  if (l->failed) abort(); /* called again after an error: the state is gone */
  if (l->spent) REFUSE("one listener, one connection");
  if (l->out != NULL && l->out != out) REFUSE("the buffers of accept have moved");
  l->out = out;
  l->pending = 1;
#ifdef EAGER
  struct pollfd connection = {.fd = l->fd, .events = POLLIN};
  poll(&connection, 1, -1);
#else
  if (++l->accepts < 3) return OK;
#endif
#ifdef FAIL_ACCEPT
  l->failed = 1;
  l->pending = 0;
  WARN("nobody wants to talk to us");
  return SYSTEM_ERROR;
#endif
  int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC);
  if (fd < 0 && (errno == EAGAIN || errno == EINTR)) return OK;
  if (fd < 0) {
    l->failed = 1;
    l->pending = 0;
    return SYSTEM_ERROR;
  }
  l->pending = 0;
  l->spent = 1;
  *out = new_comm(fd, RECV);
  return OK;
}

#if API_VERSION >= 7
static int fill_device_handle(struct device_handle **out) {
  if (out == NULL) REFUSE("no place for a device handle");
  struct device_handle *d = *out;
  if (DEVICE_TYPE == 0) {
    if (d != NULL) REFUSE("a device handle for a host device");
    return OK;
  }
  if (d == NULL) REFUSE("no device handle");
  for (size_t i = 0; i < sizeof *d; i++)
    if (((char *)d)[i] != 0) REFUSE("the device handle is not zeroed");
#ifndef EMPTY_DEVICE_HANDLE
  static uint64_t ring[3] = {1, 2, 3};
  *d = (struct device_handle){DEVICE_TYPE, DEVICE_VERSION, ring, sizeof ring, 1};
#endif
  return OK;
}
#endif

/* ---- memory ---- */

static int register_memory(void *comm, void *data, size_t size, int type, void **out) {
  if (type != PTR_HOST && type != PTR_CUDA) REFUSE("memory type %d", type);
  if (*out != NULL) REFUSE("the memory handle is not NULL at first");
  if ((uintptr_t)data % 64 != 0) REFUSE("memory at %p is not aligned to 64", data);
  struct comm *c = comm;
  c->memories++;
  loop_plugin_live++;
  if (!MHANDLES) return OK;
  struct memory *m = calloc(1, sizeof *m);
  *m = (struct memory){c, data, size, type};
  *out = m;
  return OK;
}

static int loop_dereg_mr(void *comm, void *memory) {
  struct comm *c = comm;
  struct memory *m = memory;
  if (m != NULL && m->comm != c) REFUSE("memory of another comm");
  if (--c->memories < 0) REFUSE("more deregistered than registered");
#ifdef SLOW
  for (int i = 0; m != NULL && i < (int)SLOTS; i++) {
    struct request *r = &c->requests[i];
    if (r->state == POSTED && r->data >= m->data && r->data < m->data + m->size) r->data = NULL;
  }
#endif
  loop_plugin_live--;
  free(m);
  return OK;
}

static int check_memory(struct comm *c, void *data, size_t size, struct memory *m) {
  if (!MHANDLES) return OK;
  if (m == NULL || m->comm != c) REFUSE("not registered on this comm");
  char *from = data;
  if (from < m->data || from + size > m->data + m->size) REFUSE("outside the registration");
  return OK;
}

/* ---- moving ---- */

/* Messages and flushes share the requests of a comm. */
static int check_slots(struct comm *c) {
  if (c->posted - c->consumed + (uint64_t)c->flushing < SLOTS) return OK;
  c->failed = 1;
  REFUSE("all %d requests are in use", (int)SLOTS);
}

/* Copies received bytes to their destination. */
static void deliver(struct kept *kept) {
  memcpy(kept->data, kept->bytes, kept->size);
  if (kept->owner->kept == kept) kept->owner->kept = NULL;
  free(kept);
}

static int post(void *comm, enum direction direction, void *data, size_t size, int tag,
                void *memory, void **out) {
  struct comm *c = comm;
  if (c->failed) abort(); /* used after an error */
  if (*out != NULL) REFUSE("the request is not NULL at first");
  if (c->direction != direction) REFUSE("wrong kind of comm");
  int code = check_memory(c, data, size, memory);
  if (code != OK) return code;
#ifdef STUCK
  if (c->calls > 40) return OK; /* busy for ever */
#endif
  if (++c->calls % 3 == 0 || c->connecting) return OK; /* busy: nothing is queued */
  code = check_slots(c);
  if (code != OK) return code;
  struct kept *kept = NULL;
  if (direction == RECV && DEVICE_TYPE == 0 && MHANDLES && ((struct memory *)memory)->type == PTR_CUDA) {
    kept = malloc(sizeof *kept + size);
    *kept = (struct kept){.owner = &c->requests[c->posted % SLOTS], .data = data, .size = size};
  }
  struct request *r = &c->requests[c->posted % SLOTS];
  *r = (struct request){c, direction, POSTED, data, size, 0, c->posted++, 0, kept};
  (void)tag;
  *out = r;
  return OK;
}

/* Moves up to size - *moved bytes; returns 1 when all are moved. */
static int move_bytes(struct comm *c, char *data, size_t size, size_t *moved) {
#ifdef SLOW
  const size_t most = 2048; /* sent per call */
  int turns = 0;
#else
  const size_t most = SIZE_MAX;
#endif
  while (*moved < size) {
#ifdef SLOW
    if (c->direction == SEND && turns++ > 0) return 0;
#endif
    const size_t left = size - *moved;
    ssize_t n = c->direction == SEND
                    ? send(c->fd, data + *moved, left < most ? left : most, MSG_DONTWAIT | MSG_NOSIGNAL)
                    : recv(c->fd, data + *moved, size - *moved, MSG_DONTWAIT);
    if (n > 0) {
      *moved += (size_t)n;
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      return 0;
    } else {
      WARN("the peer is gone: %s", n == 0 ? "end of stream" : strerror(errno));
      return -1;
    }
  }
  return 1;
}

static int loop_test(void *request, int *done, int *sizes) {
  struct request *r = request;
  *done = 0;
  if (r == NULL) REFUSE("no request");
  struct comm *c = r->comm;
  if (c->failed) abort(); /* used after an error */
  if (r->state != POSTED) REFUSE("the request is not under way");
  if (r->direction == FLUSH) {
    if (sizes != NULL) REFUSE("a flush has no sizes");
    if (++r->tests < 2) return OK;
    deliver(r->kept);
    r->kept = NULL;
    r->state = FREE;
    c->flushing--;
    *done = 1;
    return OK;
  }
  if (r->data == NULL) abort(); /* deregistered before the comm is closed */
  if (r->order != c->tested) REFUSE("request %d tested before %d", (int)r->order, (int)c->tested);
  if (r->direction == SEND) c->header = (struct header){r->size, (int64_t)r->order};
  int code = move_bytes(c, (char *)&c->header, sizeof c->header, &c->header_moved);
  if (code == 1) {
    if (r->direction == RECV && c->header.size > r->size) {
      c->failed = 1;
      WARN("%zu bytes for a buffer of %zu", (size_t)c->header.size, r->size);
      return INVALID_USAGE;
    }
    r->size = c->header.size;
    code = move_bytes(c, r->kept ? r->kept->bytes : r->data, r->size, &r->moved);
  }
  if (code < 0) {
    c->failed = 1;
    return SYSTEM_ERROR;
  }
  if (code == 0) return OK;
  c->header_moved = 0;
  c->tested++;
  *done = 1;
  if (SIZES && sizes != NULL) sizes[0] = (int)r->size;
  r->state = DONE;
  if (r->kept != NULL) {
    r->kept->size = r->size;
    r->kept->next = c->kept;
    c->kept = r->kept;
  }
#if API_VERSION >= 7 && !defined(NO_CONSUME)
  if (r->direction == RECV) return OK; /* until it is consumed */
#endif
  r->state = FREE;
  c->consumed++;
  return OK;
}

static int start_flush(void *comm, void *data, int size, void *memory, void **out) {
  struct comm *c = comm;
  if (DEVICE_TYPE == 1) abort(); /* a real plugin reads a wild pointer here */
  if (*out != NULL) REFUSE("the request is not NULL at first");
  if (c->failed) abort(); /* used after an error */
  if (c->direction != RECV || size <= 0) REFUSE("nothing to flush");
  int code = check_memory(c, data, (size_t)size, memory);
  if (code == OK) code = check_slots(c);
  if (code != OK) return code;
  c->flush_calls++;
  if (c->flush_calls == FAIL_FLUSH) {
    c->failed = 1;
    REFUSE("flush %d fails", c->flush_calls);
  }
  struct kept **place = &c->kept;
  while (*place != NULL && ((*place)->data != data || (*place)->size != (size_t)size))
    place = &(*place)->next;
  struct kept *kept = *place;
  if (kept == NULL) REFUSE("flush of %d bytes that were not received", size);
  *place = kept->next;
  if (c->flush_calls % 4 == 0) {
    deliver(kept); /* and no request: nothing is left to do */
    return OK;
  }
  int free_one = 0;
  while (c->flushes[free_one].state != FREE) free_one++;
  c->flushes[free_one] = (struct request){c, FLUSH, POSTED, data, (size_t)size, 0, 0, 0, kept};
  kept->flushing = 1;
  c->flushing++;
  *out = &c->flushes[free_one];
  return OK;
}

#if API_VERSION >= 7
static int loop_consumed(void *comm, int n, void *request) {
  struct comm *c = comm;
  struct request *r = request;
  if (n != 1 || r == NULL || r->comm != c || r->state != DONE) REFUSE("nothing to consume");
  if (r->order != c->consumed) REFUSE("consumed out of order");
  if (r->kept != NULL && r->kept->flushing) REFUSE("consumed while it is flushed");
  r->state = FREE;
  c->consumed++;
  return OK;
}

static int loop_device_mr(void *comm, void *memory, void **out) {
  (void)comm, (void)memory, (void)out;
  return OK;
}
#endif

static int close_comm(struct comm *c, enum direction direction) {
  if (c == NULL) return OK;
  if (c->connecting) abort(); /* a real plugin's thread still uses it */
  int code = OK;
  if (c->direction != direction || c->memories != 0) {
    WARN("closed with %d registrations, direction %d", c->memories, (int)c->direction);
    code = INTERNAL_ERROR;
  }
  close(c->fd);
  while (c->kept != NULL) {
    struct kept *kept = c->kept;
    c->kept = kept->next;
    free(kept);
  }
  for (int i = 0; i < MAX_SLOTS; i++) {
    if (c->requests[i].state == POSTED) free(c->requests[i].kept);
    if (c->flushes[i].state == POSTED) free(c->flushes[i].kept);
  }
  free(c);
  loop_plugin_live--;
  return code;
}

static int loop_close_send(void *comm) { return close_comm(comm, SEND); }
static int loop_close_recv(void *comm) { return close_comm(comm, RECV); }

static int loop_close_listen(void *listener) {
  struct listener *l = listener;
  if (l->pending) abort(); /* a real plugin's thread still uses it */
  close(l->fd);
  free(l);
  loop_plugin_live--;
  return OK;
}

#include "loop_table.h"
