/* The second half of loop_plugin.c: the differences between the versions. */

/* ---- the members, each with its version's signature ---- */

#ifdef LOG_THREAD
static void *log_from_thread(void *argument) {
  (void)argument;
  WARN("said by a thread of the plugin");
  return NULL;
}
#endif

static void fill_table(void);

static int start(void) {
  loop_plugin_inits++;
  logger(LEVEL_VERSION, 1, "loop_plugin", 1, "loop plugin, version %d of the API", API_VERSION);
  if (API_VERSION <= 10 && initialised++) REFUSE("initialised twice");
#ifdef FAIL_INIT
  REFUSE("no network of the kind %s", "loop");
#endif
#ifdef LOG_THREAD
  pthread_t thread;
  pthread_create(&thread, NULL, log_from_thread, NULL);
  pthread_join(thread, NULL);
  return SYSTEM_ERROR;
#endif
  fill_table();
  return OK;
}

#if API_VERSION <= 9
static int loop_init(logger_t l) {
  logger = l;
  return start();
}
#elif API_VERSION == 10
static int loop_init(logger_t l, profiler_t p) {
  logger = l;
  profiler = p;
  return start();
}
#else
static int loop_init(void **context, uint64_t comm_id, struct config *config, logger_t l,
                     profiler_t p) {
  logger = l;
  profiler = p;
  if (*context != NULL || comm_id == 0 || config->traffic_class != -1) REFUSE("bad arguments");
  int code = start();
  if (code != OK) return code;
  struct context *c = calloc(1, sizeof *c);
  c->magic = 0xc0;
  loop_plugin_live++;
  *context = c;
  return OK;
}

static int loop_finalize(void *context) {
  struct context *c = context;
  if (c->magic != 0xc0) abort();
  c->magic = 0;
  free(c);
  loop_plugin_live--;
  return OK;
}

#define CHECK_CONTEXT(context) \
  if (((struct context *)(context))->magic != 0xc0) REFUSE("not a context")
#endif

#if API_VERSION <= 10
static int loop_listen(int device, void *handle, void **out) {
  return listen_at(device, handle, out);
}
#else
static int loop_listen(void *context, int device, void *handle, void **out) {
  CHECK_CONTEXT(context);
  return listen_at(device, handle, out);
}
#endif

#define CHECK_SEND_DEVICE(d) \
  if ((d) == NULL || *(d) != NULL) REFUSE("senders have no device handle")

#if API_VERSION <= 6
static int loop_connect(int device, void *handle, void **out) {
  return connect_to(device, handle, out);
}
static int loop_accept(void *listener, void **out) { return accept_from(listener, out); }
#else
#if API_VERSION <= 9
static int loop_connect(int device, void *handle, void **out, struct device_handle **d) {
#elif API_VERSION == 10
static int loop_connect(int device, struct config *config, void *handle, void **out,
                        struct device_handle **d) {
  if (config == NULL || config->traffic_class != -1) REFUSE("bad configuration");
#else
static int loop_connect(void *context, int device, void *handle, void **out,
                        struct device_handle **d) {
  CHECK_CONTEXT(context);
#endif
  CHECK_SEND_DEVICE(d);
  return connect_to(device, handle, out);
}
static int loop_accept(void *listener, void **out, struct device_handle **d) {
  int code = accept_from(listener, out);
  if (code == OK && *out != NULL) code = fill_device_handle(d);
  return code;
}
#endif

#if API_VERSION <= 7
static int loop_reg_mr(void *comm, void *data, int size, int type, void **out) {
  if (size < 0) REFUSE("%d bytes", size);
  return register_memory(comm, data, (size_t)size, type, out);
}
#else
static int loop_reg_mr(void *comm, void *data, size_t size, int type, void **out) {
  return register_memory(comm, data, size, type, out);
}
#endif

#if API_VERSION >= 6
static int loop_reg_mr_dma_buf(void *comm, void *data, size_t size, int type, uint64_t offset,
                               int fd, void **out) {
  if (offset != 4096 || fd < 0) REFUSE("offset %d, fd %d", (int)offset, fd);
  return register_memory(comm, data, size, type, out);
}
#endif

#if API_VERSION == 4
static int loop_isend(void *comm, void *data, int size, void *memory, void **out) {
  return post(comm, SEND, data, (size_t)size, 0, memory, out);
}
static int loop_irecv(void *comm, void *data, int size, void *memory, void **out) {
  return post(comm, RECV, data, (size_t)size, 0, memory, out);
}
static int loop_iflush(void *comm, void *data, int size, void *memory, void **out) {
  return start_flush(comm, data, size, memory, out);
}
#else
#if API_VERSION <= 8
typedef int size_type;
#else
typedef size_t size_type;
#endif
#if API_VERSION >= 10
#define PARENT , void *parent
#define PARENTS , void **parents
#else
#define PARENT
#define PARENTS
#endif
static int loop_isend(void *comm, void *data, size_type size, int tag, void *memory PARENT,
                      void **out) {
#if API_VERSION >= 10
  void *event = NULL;
  if (parent != NULL || profiler(&event, 0, NULL, 0, NULL) != OK) REFUSE("profiler");
#endif
  return post(comm, SEND, data, (size_t)size, tag, memory, out);
}
static int loop_irecv(void *comm, int n, void **data, size_type *sizes, int *tags,
                      void **memories PARENTS, void **out) {
  if (n != 1) REFUSE("%d receives at once", n);
#if API_VERSION >= 10
  if (parents == NULL || parents[0] != NULL) REFUSE("parents");
#endif
  return post(comm, RECV, data[0], (size_t)sizes[0], tags[0], memories[0], out);
}
static int loop_iflush(void *comm, int n, void **data, int *sizes, void **memories, void **out) {
  if (n != 1) REFUSE("%d flushes at once", n);
  return start_flush(comm, data[0], sizes[0], memories[0], out);
}
#endif

/* ---- the table ---- */

struct table {
  const char *name;
  void *init, *devices, *properties, *listen, *connect, *accept, *reg_mr;
#if API_VERSION >= 6
  void *reg_mr_dma_buf;
#endif
  void *dereg_mr, *isend, *irecv, *iflush, *test, *close_send, *close_recv, *close_listen;
#if API_VERSION >= 7
  void *get_device_mr, *irecv_consumed;
#endif
#if API_VERSION >= 9
  void *make_v_device;
#endif
#if API_VERSION >= 11
  void *finalize, *set_net_attr;
#endif
};

#ifdef NO_ISEND
#define ISEND NULL
#else
#define ISEND loop_isend
#endif
#ifdef NO_CONSUME
#define CONSUMED NULL
#else
#define CONSUMED loop_consumed
#endif

#define MEMBERS                                                                             \
  .devices = loop_devices, .properties = loop_properties, .listen = loop_listen,            \
  .connect = loop_connect, .accept = loop_accept, .reg_mr = loop_reg_mr, MEMBERS_6          \
  .dereg_mr = loop_dereg_mr, .isend = ISEND, .irecv = loop_irecv, .iflush = loop_iflush,    \
  .test = loop_test, .close_send = loop_close_send, .close_recv = loop_close_recv,          \
  .close_listen = loop_close_listen, MEMBERS_7 MEMBERS_11
#if API_VERSION >= 6
#define MEMBERS_6 .reg_mr_dma_buf = loop_reg_mr_dma_buf,
#else
#define MEMBERS_6
#endif
#if API_VERSION >= 7
#define MEMBERS_7 .get_device_mr = loop_device_mr, .irecv_consumed = CONSUMED,
#else
#define MEMBERS_7
#endif
#if API_VERSION >= 11
#define MEMBERS_11 .finalize = loop_finalize,
#else
#define MEMBERS_11
#endif

#define SYMBOL JOIN(ncclNetPlugin_v, API_VERSION)
extern volatile struct table SYMBOL;

#ifdef FILL_IN_INIT
volatile struct table SYMBOL = {.name = "Loop", .init = loop_init};
static void fill_table(void) {
  struct table full = {.name = "Loop", .init = loop_init, MEMBERS};
  SYMBOL = full;
}
#else
volatile struct table SYMBOL = {.name = "Loop_v" TEXT(API_VERSION), .init = loop_init, MEMBERS};
static void fill_table(void) {}
#endif
