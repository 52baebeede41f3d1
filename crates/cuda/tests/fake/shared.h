// Device memory that other processes can map: parts of files without a name (memfd).
#pragma once

// The GPUs that this process sees, in its order.
const std::vector<int> &visible() {
  static std::vector<int> found = [] {
    std::vector<int> list;
    const char *wish = getenv("CUDA_VISIBLE_DEVICES");
    if (!wish) for (int i = 0; i < DEVICES; i++) list.push_back(i);
    for (; wish && *wish; wish += *wish == ',') {
      char *end;
      int number = strtol(wish, &end, 10);
      if (end == wish || number < 0 || number >= DEVICES) break;
      list.push_back(number);
      wish = end;
    }
    return list;
  }();
  return found;
}

// Returns the local device number of a GPU, or -1.
int device_of(int gpu) {
  for (size_t i = 0; i < visible().size(); i++) if (visible()[i] == gpu) return i;
  return -1;
}

bool are_peers(int one, int other) { return one == other || (other >= 0 && !getenv("FAKE_CUDA_NO_PEERS")); }

// Returns the error that a call is configured to return: always, or (`%n`) to every n-th call.
int refused(const char *call) {
  static std::map<std::string, int> calls;
  const char *list = getenv("FAKE_CUDA_REFUSE");
  for (size_t len = strlen(call); list && *list; list = strchr(list, ',') ? strchr(list, ',') + 1 : nullptr)
    if (!strncmp(list, call, len) && list[len] == '=') {
      char *end;
      int code = strtol(list + len + 1, &end, 10), every = *end == '%' ? atoi(end + 1) : 1;
      return calls[call]++ % every ? SUCCESS : code;
    }
  return SUCCESS;
}

constexpr size_t PAGE = 4096, GRANULARITY = 2 << 20;
// Files have the maximum size of their memory: unused pages take no memory.
constexpr u64 FILE_LEN = 1ull << 42;

// The name of a file tells another process that receives the descriptor what it is.
int make_file(const char *what, int gpu, u64 len) {
  int fd = memfd_create((std::string("fake-cuda-") + what + "-" + std::to_string(gpu)).c_str(), MFD_CLOEXEC);
  return fd >= 0 && ftruncate(fd, len) == 0 ? fd : -1;
}

// Returns the GPU of a file that is `what`, or -1.
int gpu_of_file(int fd, const char *what) {
  char path[64], name[128] = {};
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  std::string begin = std::string("/memfd:fake-cuda-") + what + "-";
  if (readlink(path, name, sizeof name - 1) < 0 || strncmp(name, begin.c_str(), begin.size())) return -1;
  return atoi(name + begin.size());
}

bool is_within(int fd, u64 offset, u64 len) {
  struct stat about;
  return !fstat(fd, &about) && len && offset % PAGE == 0 && offset <= (u64)about.st_size && len <= about.st_size - offset;
}

u64 map_file(int fd, u64 offset, size_t len, u64 at = 0) {
  void *found = mmap((void *)at, len, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, offset);
  return found == MAP_FAILED ? 0 : (u64)found;
}

// Addresses without memory. They belong to a file too, so that a test finds them among the
// process's mappings.
int nothing_file() {
  static int fd = make_file("nothing", 0, FILE_LEN);
  return fd;
}
u64 map_nothing(size_t len, u64 at = 0) {
  void *found = mmap((void *)at, len, PROT_NONE, MAP_SHARED | (at ? MAP_FIXED : 0), nothing_file(), 0);
  return found == MAP_FAILED ? 0 : (u64)found;
}

// Duplicates a descriptor for another process.
int give(int *to, int fd) { return (*to = dup(fd)) < 0 ? OUT_OF_MEMORY : SUCCESS; }

struct pool {
  int device, types, fd;
  bool is_imported;
  unsigned reach;
  u64 used = 0;
  pool(int device, int types, int fd, bool is_imported)
      : device(device), types(types), fd(fd), is_imported(is_imported), reach(1u << device) {}
  pool(const pool &) = delete;
  ~pool() { close(fd); }
};
// Physical memory, for virtual memory.
struct piece {
  int device, types, fd;
  size_t len;
  bool is_own;
  u64 id;
  piece(int device, int types, int fd, size_t len, bool is_own) : device(device), types(types), fd(fd), len(len), is_own(is_own) {
    static u64 next = 1;
    id = next++;
    if (is_own) in_use += len;
  }
  ~piece() {
    close(fd);
    if (is_own) in_use -= len;
  }
};

// Objects held by callers: pools, and references to physical memory.
std::map<pool *, std::shared_ptr<pool>> pools;
std::map<u64, std::pair<std::shared_ptr<piece>, int>> handles;
std::map<u64, size_t> reservations;

int own_file(int device) {
  static int fds[DEVICES] = {-1, -1};
  return fds[device] >= 0 ? fds[device] : fds[device] = make_file("memory", visible()[device], FILE_LEN);
}

pool *default_pool(int device) {
  static pool *made[DEVICES];
  if (!made[device]) {
    auto one = std::make_shared<pool>(device, 0, make_file("pool", visible()[device], FILE_LEN), false);
    pools[made[device] = one.get()] = one;
  }
  return made[device];
}

bool has_ipc_handle(const allocation &at) { return at.kind == allocation::DEVICE && at.owner && !at.imported; }
u64 handle_types(const allocation &at) { return at.from ? at.from->types : at.backing ? at.backing->types : 0; }

// Allocates a part of a file that was never used before.
int allocate_in(u64 *address, size_t len, int fd, u64 *used, allocation made) {
  u64 offset = *used, whole = (len + PAGE - 1) / PAGE * PAGE;
  if (len == 0 || len > TOTAL) return len ? OUT_OF_MEMORY : INVALID_VALUE;
  if (!(*address = map_file(fd, offset, len))) return OUT_OF_MEMORY;
  *used += whole;
  made.len = len;
  made.fd = fd;
  made.offset = offset;
  memory[*address] = made;
  in_use += len;
  return SUCCESS;
}

int allocate(u64 *address, size_t len, context *owner, decltype(allocation::kind) kind) {
  static u64 used[DEVICES];
  if (!top()) return INVALID_CONTEXT;
  int device = top()->device;
  return allocate_in(address, len, own_file(device), &used[device], {0, owner, kind, device});
}

int allocate_from(u64 *address, size_t len, pool *from) {
  auto found = pools.find(from);
  if (!top()) return INVALID_CONTEXT;
  if (found == pools.end() || from->is_imported) return INVALID_VALUE;
  allocation made = {0, nullptr, allocation::DEVICE, from->device, from->reach};
  made.from = found->second;
  return allocate_in(address, len, from->fd, &from->used, made);
}

int release(u64 address) {
  auto found = memory.find(address);
  // Opened or mapped memory has calls of its own.
  if (found == memory.end() || found->second.backing || (found->second.imported && !found->second.from)) return INVALID_VALUE;
  auto &at = found->second;
  munmap((void *)address, at.len);
  if (!at.imported) {
    // Frees the pages.
    fallocate(at.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at.offset, (at.len + PAGE - 1) / PAGE * PAGE);
    in_use -= at.len;
  }
  memory.erase(found);
  return SUCCESS;
}
