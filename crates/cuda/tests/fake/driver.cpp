// A CUDA driver made of ordinary memory: libcuda.so.1 for tests on machines without a GPU.
//
// Work on a stream is done late, after several queries. Code that reuses memory too early, or
// treats a copy as done too early, gets wrong bytes. The driver checks what a GPU checks: contexts
// must be current, addresses allocated, host memory registered.
//
// Its device memory is parts of files, which other processes of the same user map: shared.h. The
// environment:
//   CUDA_VISIBLE_DEVICES=1    which of the two GPUs the process sees, in which order
//   FAKE_CUDA_NO_PEERS=1      the GPUs have no access to each other's memory
//   FAKE_CUDA_REFUSE=cuIpcGetMemHandle=801,cuMemMap=2   failing calls of shared_api.h, and copies of grids
//   FAKE_CUDA_REFUSE=cuMemcpy2DAsync_v2=1%3             every third call fails
//   FAKE_CUDA_LATE_US=3000    copy kernels begin every 3 ms, as beside long kernels of the application
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include <cstdlib>
#include <fcntl.h>
#include <linux/falloc.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host.h"
#include "load.h"

namespace {

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_SUCH_DEVICE = 101,
       INVALID_CONTEXT = 201, MAP_REFUSED = 205, PEERS_UNSUPPORTED = 217, INVALID_HANDLE = 400, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900 };
enum { CAPTURE_RELAXED = 2 };
thread_local int capture_mode;
constexpr u64 TOTAL = 64ull << 30;

constexpr int DEVICES = 2;

struct context {
  int device;
};
struct stream {
  context *owner;
  std::deque<std::function<int()>> work;
  u64 pushed = 0, finished = 0;
  // The captured work, while a graph is captured.
  std::shared_ptr<std::vector<std::function<int()>>> captured;
};
struct event {
  context *owner;
  stream *on = nullptr;
  u64 position = 0;
  int queries = 0;
};
struct pool;
struct piece;
// Device memory without a context belongs to a pool or a mapping.
struct allocation {
  size_t len;
  context *owner;
  enum { DEVICE, HOST, MANAGED } kind;
  int device;
  // Devices with access to memory without a context, as bits.
  unsigned reach = 0;
  // The part of a file that backs it.
  int fd = -1;
  u64 offset = 0;
  // Its owner: a pool, or the physical memory of a mapping.
  std::shared_ptr<pool> from = nullptr;
  std::shared_ptr<piece> backing = nullptr;
  // How often another process's memory was opened; zero for own memory.
  int imported = 0;
};

std::recursive_mutex lock;
bool is_initialised;
context primary[DEVICES] = {{0}, {1}};
int primary_users[DEVICES];
int failure;
u64 in_use;
std::map<u64, allocation> memory;
std::set<void *> alive;
thread_local std::vector<context *> current;

context *top() { return current.empty() ? nullptr : current.back(); }

const std::pair<const u64, allocation> *find(u64 address) {
  auto next = memory.upper_bound(address);
  if (next == memory.begin()) return nullptr;
  --next;
  return address < next->first + next->second.len ? &*next : nullptr;
}

// Returns whether all bytes are memory that a device can access from a context. Mappings may be
// adjacent.
bool reaches(context *from, u64 address, u64 len) {
  while (len > 0) {
    auto found = find(address);
    if (!found) return false;
    auto &at = found->second;
    if (at.kind == allocation::DEVICE && (at.owner ? at.owner != from : !(at.reach >> from->device & 1))) return false;
    u64 here = std::min(len, found->first + at.len - address);
    address += here;
    len -= here;
  }
  return true;
}

// Returns the same for the copy engine, which does not cross from one allocation to an adjacent
// one.
bool engine_reaches(context *from, u64 address, u64 len) {
  auto found = find(address);
  bool alone = !found || found->second.kind != allocation::DEVICE || !found->second.owner;
  return reaches(from, address, len) && (alone || address + len <= found->first + found->second.len);
}

// Returns whether a range is in one allocation or mapping.
bool one_allocation(u64 address, u64 len) {
  auto found = find(address);
  return found && found->second.kind == allocation::DEVICE && reaches(top(), address, len) &&
         address + len <= found->first + found->second.len;
}

// CUDA_MEMCPY2D.
struct grid {
  enum { HOST = 1, DEVICE = 2 };
  struct {
    size_t x, y;
    unsigned kind;
    void *host;
    u64 device;
    void *array;
    size_t distance;
  } from, to;
  size_t width, height;
};

// Returns NOT_READY if a kernel on the way is not due yet.
int run_until(stream *on, u64 position) {
  while (on->finished < position) {
    int code = failure ? failure : on->work.front()();
    if (code == NOT_READY) return code;
    if (code) return failure = code;
    on->work.pop_front();
    on->finished++;
  }
  return SUCCESS;
}

int push(stream *on, std::function<int()> work) {
  if (failure) return failure;
  if (!alive.count(on) || on->owner != top()) return INVALID_CONTEXT;
  if (on->captured) return on->captured->push_back(std::move(work)), SUCCESS;
  on->work.push_back(std::move(work));
  on->pushed++;
  return SUCCESS;
}

int copy_later(u64 to, u64 from, size_t len, stream *on, bool is_host_from, bool is_host_to) {
  context *owner = top();
  // Unregistered host memory may be gone when the call returns: the driver copies it first.
  if (is_host_from && !reaches(owner, from, len)) {
    std::vector<u8> bytes((u8 *)from, (u8 *)from + len);
    return push(on, [=] { return engine_reaches(owner, to, len) ? (memcpy((void *)to, bytes.data(), len), 0) : ILLEGAL_ADDRESS; });
  }
  return push(on, [=] {
    if (!engine_reaches(owner, from, len) || !(is_host_to || engine_reaches(owner, to, len))) return (int)ILLEGAL_ADDRESS;
    memcpy((void *)to, (void *)from, len);
    return 0;
  });
}

typedef std::chrono::steady_clock::time_point moment;

// Returns when a kernel that is launched now begins.
moment due() {
  static const char *late = getenv("FAKE_CUDA_LATE_US");
  auto every = std::chrono::microseconds(late ? atoi(late) : 0);
  if (every.count() <= 0) return {};
  auto past = std::chrono::steady_clock::now().time_since_epoch();
  return moment(past - past % every + every);
}

#include "shared.h"

} // namespace

#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)
#define API extern "C" __attribute__((visibility("default"))) int

API cuInit(unsigned) {
  nothing_file();
  is_initialised = true;
  return SUCCESS;
}
API cuDriverGetVersion(int *version) { return *version = 11080, SUCCESS; }
API cuGetErrorName(int code, const char **name) {
  *name = code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_FAKE";
  return SUCCESS;
}
API cuDeviceGet(int *device, int ordinal) {
  if (!is_initialised) return NOT_INITIALIZED;
  return ordinal >= 0 && ordinal < (int)visible().size() ? (*device = ordinal, SUCCESS) : NO_SUCH_DEVICE;
}
API cuDeviceGetCount(int *count) { return *count = visible().size(), SUCCESS; }
API cuDeviceGetName(char *name, int len, int) { return strncpy(name, "Fake", len), SUCCESS; }
API cuDeviceGetAttribute(int *value, int, int) { return *value = 7, SUCCESS; }
API cuDeviceGetPCIBusId(char *id, int len, int) { return strncpy(id, "FFFF:0A:00.0", len), SUCCESS; }
API cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = TOTAL, SUCCESS; }

API cuDevicePrimaryCtxRetain(context **made, int device) {
  LOCKED;
  primary_users[device]++;
  return *made = &primary[device], SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int device) {
  LOCKED;
  return --primary_users[device] < 0 ? INVALID_CONTEXT : SUCCESS;
}
API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  LOCKED;
  return *flags = 0, *is_active = primary_users[device] > 0, SUCCESS;
}
API cuCtxGetCurrent(context **found) {
  if (!is_initialised) return NOT_INITIALIZED;
  return *found = top(), SUCCESS;
}
API cuCtxGetId(context *of, u64 *id) { return *id = (u64)of, SUCCESS; }
API cuCtxGetDevice(int *device) { return top() ? (*device = top()->device, SUCCESS) : INVALID_CONTEXT; }
API cuCtxPushCurrent_v2(context *pushed) { return current.push_back(pushed), SUCCESS; }
API cuCtxSetCurrent(context *set) {
  if (current.empty()) current.push_back(set);
  current.back() = set;
  return SUCCESS;
}
API cuCtxPopCurrent_v2(context **popped) {
  if (current.empty()) return INVALID_CONTEXT;
  *popped = top();
  return current.pop_back(), SUCCESS;
}
// Plain copies are done when they return.
API cuCtxSynchronize() { return top() ? failure : INVALID_CONTEXT; }
API cuCtxCreate_v2(context **made, unsigned, int device) {
  *made = new context{device};
  return current.push_back(*made), SUCCESS;
}
API cuCtxDestroy_v2(context *gone) {
  if (top() == gone) current.pop_back();
  delete gone;
  return SUCCESS;
}

API cuPointerGetAttributes(unsigned count, const int *attributes, void **values, u64 address) {
  LOCKED;
  if (!is_initialised) return NOT_INITIALIZED;
  auto found = find(address);
  auto kind = found ? found->second.kind : allocation::HOST;
  for (unsigned i = 0; i < count; i++) switch (attributes[i]) {
      case 1: *(context **)values[i] = found ? found->second.owner : nullptr; break;
      case 2: *(unsigned *)values[i] = !found ? 0 : kind == allocation::HOST ? 1 : 2; break;
      case 8: *(bool *)values[i] = kind == allocation::MANAGED; break;
      case 9: *(int *)values[i] = found ? found->second.device : -2; break;
      case 10: *(bool *)values[i] = found && has_ipc_handle(found->second); break;
      case 14: *(u64 *)values[i] = found ? handle_types(found->second) : 0; break;
      case 17: *(pool **)values[i] = found ? found->second.from.get() : nullptr; break;
      default: return INVALID_VALUE;
    }
  return SUCCESS;
}
API cuMemGetAddressRange_v2(u64 *base, size_t *len, u64 address) {
  LOCKED;
  if (!top()) return INVALID_CONTEXT;
  auto found = find(address);
  return found ? (*base = found->first, *len = found->second.len, SUCCESS) : INVALID_VALUE;
}
API cuMemGetInfo_v2(size_t *free, size_t *total) {
  LOCKED;
  return *free = TOTAL - in_use, *total = TOTAL, SUCCESS;
}
API cuMemAlloc_v2(u64 *address, size_t len) {
  LOCKED;
  return allocate(address, len, top(), allocation::DEVICE);
}
API cuMemAllocManaged(u64 *address, size_t len, unsigned) {
  LOCKED;
  return allocate(address, len, top(), allocation::MANAGED);
}
API cuMemHostAlloc(u64 *address, size_t len, unsigned) {
  LOCKED;
  return allocate(address, len, top(), allocation::HOST);
}
API cuMemFree_v2(u64 address) {
  LOCKED;
  return release(address);
}
API cuMemFreeAsync(u64 address, void *) {
  LOCKED;
  return release(address);
}
API cuMemFreeHost(u64 address) {
  LOCKED;
  return release(address);
}
API cuMemHostRegister_v2(u64 address, size_t len, unsigned flags) {
  LOCKED;
  if (!top() || flags != 3 || address % 4096 || find(address)) return INVALID_VALUE;
  memory[address] = {len, top(), allocation::HOST, top()->device};
  return SUCCESS;
}
API cuMemHostUnregister(u64 address) {
  LOCKED;
  return top() && memory.erase(address) ? SUCCESS : INVALID_VALUE;
}
API cuMemHostGetDevicePointer_v2(u64 *seen, u64 address, unsigned) { return *seen = address, SUCCESS; }

#include "shared_api.h"

API cuMemcpyHtoD_v2(u64 to, u64 from, size_t len) {
  LOCKED;
  return reaches(top(), to, len) ? (memcpy((void *)to, (void *)from, len), SUCCESS) : ILLEGAL_ADDRESS;
}
API cuMemcpyDtoH_v2(u64 to, u64 from, size_t len) {
  LOCKED;
  return reaches(top(), from, len) ? (memcpy((void *)to, (void *)from, len), SUCCESS) : ILLEGAL_ADDRESS;
}
API cuMemcpyDtoHAsync_v2(u64 to, u64 from, size_t len, stream *on) {
  LOCKED;
  return copy_later(to, from, len, on, false, true);
}
API cuMemcpyHtoDAsync_v2(u64 to, u64 from, size_t len, stream *on) {
  LOCKED;
  return copy_later(to, from, len, on, true, false);
}
API cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t len, stream *on) {
  LOCKED;
  return copy_later(to, from, len, on, false, false);
}
// As strict as a driver may be: all rows of one call are in one allocation or mapping.
API cuMemcpy2DAsync_v2(const grid *copy, stream *on) {
  REFUSABLE;
  auto &from = copy->from, &to = copy->to;
  bool is_in = to.kind == grid::DEVICE;
  auto &device = is_in ? to : from, &host = is_in ? from : to;
  size_t width = copy->width, height = copy->height;
  if (device.kind != grid::DEVICE || host.kind != grid::HOST || !width || !height) return INVALID_VALUE;
  for (auto side : {from, to})
    if (side.x || side.y || side.array || side.distance < width || side.distance > INT32_MAX) return INVALID_VALUE;
  if (!one_allocation(device.device, (height - 1) * device.distance + width)) return INVALID_VALUE;
  for (size_t i = 0; i < height; i++) {
    u64 here = device.device + i * device.distance, there = (u64)host.host + i * host.distance;
    int code = copy_later(is_in ? here : there, is_in ? there : here, width, on, is_in, !is_in);
    if (code) return code;
  }
  return SUCCESS;
}
API cuMemsetD8Async(u64 to, u8 byte, size_t len, stream *on) {
  LOCKED;
  context *owner = top();
  return push(on, [=] { return reaches(owner, to, len) ? (memset((void *)to, byte, len), 0) : ILLEGAL_ADDRESS; });
}

API cuStreamCreate(stream **made, unsigned flags) {
  LOCKED;
  if (!top() || flags != 1) return INVALID_VALUE;
  *made = new stream{top(), {}};
  return alive.insert(*made), SUCCESS;
}
API cuStreamDestroy_v2(stream *gone) {
  LOCKED;
  if (!alive.erase(gone)) return INVALID_HANDLE;
  delete gone;
  return SUCCESS;
}
API cuThreadExchangeStreamCaptureMode(int *mode) { return std::swap(*mode, capture_mode), SUCCESS; }
API cuStreamQuery(stream *on) {
  LOCKED;
  if (failure) return failure;
  if (on->finished == on->pushed) return SUCCESS;
  int code = run_until(on, on->finished + (on->pushed - on->finished + 1) / 2);
  return code ? code : NOT_READY;
}
API cuStreamSynchronize(stream *on) {
  LOCKED;
  int code = failure;
  while (!code && (code = run_until(on, on->pushed)) == NOT_READY) code = SUCCESS;
  return code;
}
API cuEventCreate(event **made, unsigned flags) {
  LOCKED;
  if (!top() || flags != 2) return INVALID_VALUE;
  *made = new event{top()};
  return alive.insert(*made), SUCCESS;
}
API cuEventDestroy_v2(event *gone) {
  LOCKED;
  if (!alive.erase(gone)) return INVALID_HANDLE;
  delete gone;
  return SUCCESS;
}
API cuEventRecord(event *what, stream *on) {
  LOCKED;
  if (failure) return failure;
  if (what->owner != top() || on->owner != top()) return INVALID_CONTEXT;
  *what = {what->owner, on, on->pushed, 0};
  return SUCCESS;
}
API cuEventQuery(event *what) {
  LOCKED;
  // As if a graph were being captured all the time: callers must have set the relaxed mode.
  if (capture_mode != CAPTURE_RELAXED) return CAPTURE_UNSUPPORTED;
  if (failure) return failure;
  if (what->owner != top()) return INVALID_CONTEXT;
  if (!what->on || what->on->finished >= what->position) return SUCCESS;
  if (what->queries++ < 2) return NOT_READY;
  return run_until(what->on, what->position);
}

API cuModuleLoadData(u64 *module, const char *text) {
  if (strstr(text, ".visible .entry tcpx_load_matmul(")) return *module = 2, SUCCESS;
  return strstr(text, ".visible .entry tcpx_copy_table(") ? (*module = 1, SUCCESS) : INVALID_VALUE;
}
API cuModuleUnload(u64) { return SUCCESS; }
API cuModuleGetFunction(u64 *function, u64 module, const char *name) {
  if (module == 2) {
    *function = !strcmp(name, "tcpx_load_matmul") ? 3 : !strcmp(name, "tcpx_load_decode") ? 4 : 0;
    return *function ? SUCCESS : INVALID_VALUE;
  }
  *function = !strcmp(name, "tcpx_copy_inline") ? 1 : !strcmp(name, "tcpx_copy_table") ? 2 : 0;
  return *function ? SUCCESS : INVALID_VALUE;
}
static int launch_load(u64 function, unsigned across, unsigned down, unsigned block, stream *on, void **parameters) {
  context *owner = top();
  u64 a = *(u64 *)parameters[0], b = *(u64 *)parameters[1], c = *(u64 *)parameters[2];
  u32 len = *(u32 *)parameters[3];
  bool is_matmul = function == 3;
  if (block != THREADS || across == 0 || down != (is_matmul ? across : 1)) return INVALID_VALUE;
  u64 square = (u64)len * len;
  u64 bytes[3] = {is_matmul ? square * 2 : (u64)across * len * 4, is_matmul ? square * 2 : len * 4ull,
                  is_matmul ? square * 4 : across * 4ull};
  return push(on, [=] {
    if (!reaches(owner, a, bytes[0]) || !reaches(owner, b, bytes[1]) || !reaches(owner, c, bytes[2])) return (int)ILLEGAL_ADDRESS;
    if (is_matmul) run_load(tcpx_load_matmul, across, down, block, (const u16 *)a, (const u16 *)b, (float *)c, len);
    else run_load(tcpx_load_decode, across, down, block, (const float *)a, (const float *)b, (float *)c, len);
    return 0;
  });
}
API cuLaunchKernel(u64 function, unsigned across, unsigned down, unsigned, unsigned block, unsigned, unsigned, unsigned,
                   stream *on, void **parameters, void **) {
  LOCKED;
  if (function > 2) return launch_load(function, across, down, block, on, parameters);
  context *owner = top();
  u32 count = *(u32 *)parameters[1];
  u64 from = *(u64 *)parameters[2], to = *(u64 *)parameters[3];
  u32 all = *(u32 *)parameters[4], piece = *(u32 *)parameters[5];
  if (across == 0 || down == 0 || down > 65535 || count == 0) return INVALID_VALUE;
  auto items = std::make_shared<inline_items>();
  const void *table = nullptr;
  if (function == 1) *items = *(inline_items *)parameters[0];
  else table = *(const void **)parameters[0];
  u64 bytes = count * (all ? sizeof(pair) : sizeof(item));
  if (!table && bytes > sizeof *items) return INVALID_VALUE;
  moment begins = due();
  return push(on, [=] {
    if (begins > std::chrono::steady_clock::now()) return (int)NOT_READY;
    if (table && !reaches(owner, (u64)table, bytes)) return (int)ILLEGAL_ADDRESS;
    for (u32 i = 0; i < count; i++) {
      range work = range_of(table ? table : items.get(), i, from, to, all);
      if (!reaches(owner, work.from, work.len) || !reaches(owner, work.to, work.len)) return (int)ILLEGAL_ADDRESS;
    }
    if (table) run_kernel(tcpx_copy_table, across, down, block, table, count, from, to, all, piece);
    else run_kernel(tcpx_copy_inline, across, down, block, *items, count, from, to, all, piece);
    return 0;
  });
}

// A graph is the list of its work, and an instance of it another reference to the same list.
typedef std::shared_ptr<std::vector<std::function<int()>>> graph;

API cuStreamBeginCapture_v2(stream *on, int) {
  LOCKED;
  if (on->captured || on->owner != top()) return INVALID_VALUE;
  return on->captured = std::make_shared<std::vector<std::function<int()>>>(), SUCCESS;
}
API cuStreamEndCapture(stream *on, graph **made) {
  LOCKED;
  if (!on->captured) return INVALID_VALUE;
  return *made = new graph(std::move(on->captured)), SUCCESS;
}
API cuGraphInstantiateWithFlags(graph **made, graph *of, u64) { return *made = new graph(*of), SUCCESS; }
API cuGraphLaunch(graph *what, stream *on) {
  LOCKED;
  return push(on, [work = *what] {
    for (auto &step : *work)
      if (int code = step()) return code;
    return 0;
  });
}
API cuGraphExecDestroy(graph *gone) { return delete gone, SUCCESS; }
API cuGraphDestroy(graph *gone) { return delete gone, SUCCESS; }
