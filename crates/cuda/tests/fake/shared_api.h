// The calls that export device memory and map memory of other processes.
#pragma once

// Returns the error of FAKE_CUDA_REFUSE, if it names the call.
#define REFUSABLE \
  LOCKED; \
  if (int code = refused(__func__)) return code

struct opaque {
  char bytes[64];
};
struct ipc_handle {
  char magic[8];
  int pid, fd, gpu;
  u64 offset, len;
};
struct pool_pointer {
  char magic[8];
  u64 offset, len;
};
constexpr char IPC_MAGIC[8] = "FAKEIPC", POINTER_MAGIC[8] = "FAKEPTR";
enum { HANDLE_FD = 1 };

API cuDeviceGetUuid_v2(char *uuid, int device) {
  REFUSABLE;
  if (device < 0 || device >= (int)visible().size()) return NO_SUCH_DEVICE;
  memcpy(uuid, "fake-cuda-gpu--", 15);
  return uuid[15] = visible()[device], SUCCESS;
}
API cuDeviceCanAccessPeer(int *can, int device, int peer) {
  REFUSABLE;
  return *can = device != peer && are_peers(device, peer), SUCCESS;
}

API cuIpcGetMemHandle(opaque *handle, u64 address) {
  REFUSABLE;
  auto found = find(address);
  if (!top() || !found || !has_ipc_handle(found->second)) return INVALID_VALUE;
  auto &at = found->second;
  ipc_handle made = {{}, getpid(), at.fd, visible()[at.device], at.offset, at.len};
  memcpy(made.magic, IPC_MAGIC, sizeof made.magic);
  *handle = {};
  return memcpy(handle, &made, sizeof made), SUCCESS;
}
API cuIpcOpenMemHandle_v2(u64 *address, opaque given, unsigned flags) {
  REFUSABLE;
  ipc_handle handle;
  memcpy(&handle, &given, sizeof handle);
  if (flags != 1 || memcmp(handle.magic, IPC_MAGIC, sizeof handle.magic)) return INVALID_VALUE;
  if (!top() || handle.pid == getpid()) return INVALID_CONTEXT;
  int device = device_of(handle.gpu);
  if (!are_peers(top()->device, device)) return PEERS_UNSUPPORTED;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0 || gpu_of_file(fd, "memory") != handle.gpu || !is_within(fd, handle.offset, handle.len)) {
    close(fd);
    return MAP_REFUSED;
  }
  struct stat about, other;
  fstat(fd, &about);
  for (auto &[at, known] : memory) {
    bool is_same = known.imported && known.owner == top() && known.offset == handle.offset && !fstat(known.fd, &other) &&
                   about.st_ino == other.st_ino;
    if (!is_same) continue;
    close(fd);
    known.imported++;
    return *address = at, SUCCESS;
  }
  *address = map_file(fd, handle.offset, handle.len);
  allocation made = {handle.len, top(), allocation::DEVICE, device, 0, fd, handle.offset};
  made.imported = 1;
  return memory[*address] = made, SUCCESS;
}
API cuIpcCloseMemHandle(u64 address) {
  REFUSABLE;
  auto found = memory.find(address);
  if (found == memory.end() || !found->second.imported || found->second.from || found->second.owner != top()) return INVALID_VALUE;
  if (--found->second.imported) return SUCCESS;
  munmap((void *)address, found->second.len);
  close(found->second.fd);
  return memory.erase(found), SUCCESS;
}

API cuMemAddressReserve(u64 *address, size_t len, size_t, u64, u64) {
  REFUSABLE;
  if (len == 0 || len % GRANULARITY) return INVALID_VALUE;
  if (!(*address = map_nothing(len))) return OUT_OF_MEMORY;
  return reservations[*address] = len, SUCCESS;
}
API cuMemAddressFree(u64 address, size_t len) {
  REFUSABLE;
  auto found = reservations.find(address);
  auto inside = memory.lower_bound(address);
  if (found == reservations.end() || found->second != len || (inside != memory.end() && inside->first < address + len)) return INVALID_VALUE;
  munmap((void *)address, len);
  return reservations.erase(found), SUCCESS;
}
// Properties are the kind of memory, the types of handles, the kind of location, and the device.
API cuMemCreate(u64 *handle, size_t len, const int *properties, u64) {
  REFUSABLE;
  int device = properties[3];
  if (len == 0 || len % GRANULARITY || properties[0] != 1 || properties[2] != 1) return INVALID_VALUE;
  if (device < 0 || device >= (int)visible().size()) return NO_SUCH_DEVICE;
  auto made = std::make_shared<piece>(device, properties[1], make_file("piece", visible()[device], len), len, true);
  handles[*handle = made->id] = {made, 1};
  return SUCCESS;
}
API cuMemRelease(u64 handle) {
  REFUSABLE;
  auto found = handles.find(handle);
  if (found == handles.end()) return INVALID_VALUE;
  if (--found->second.second == 0) handles.erase(found);
  return SUCCESS;
}
API cuMemRetainAllocationHandle(u64 *handle, u64 address) {
  REFUSABLE;
  auto found = find(address);
  if (!found || !found->second.backing) return INVALID_VALUE;
  auto &entry = handles[*handle = found->second.backing->id];
  entry.first = found->second.backing;
  return entry.second++, SUCCESS;
}
API cuMemMap(u64 address, size_t len, size_t offset, u64 handle, u64) {
  REFUSABLE;
  auto found = handles.find(handle);
  auto room = reservations.upper_bound(address);
  if (found == handles.end() || offset || len == 0 || len % GRANULARITY || room == reservations.begin()) return INVALID_VALUE;
  --room;
  auto &backing = found->second.first;
  if (len > backing->len || address + len > room->first + room->second || find(address)) return INVALID_VALUE;
  if (!map_file(backing->fd, 0, len, address)) return OUT_OF_MEMORY;
  allocation made = {len, nullptr, allocation::DEVICE, backing->device};
  made.backing = backing;
  return memory[address] = made, SUCCESS;
}
API cuMemUnmap(u64 address, size_t len) {
  REFUSABLE;
  auto found = memory.find(address);
  if (found == memory.end() || !found->second.backing || found->second.len != len) return INVALID_VALUE;
  map_nothing(len, address);
  return memory.erase(found), SUCCESS;
}
// The second number of a description is the device.
API cuMemSetAccess(u64 address, size_t len, const int *access, size_t) {
  REFUSABLE;
  for (u64 at = address; at < address + len;) {
    auto found = memory.find(at);
    if (found == memory.end() || !found->second.backing) return INVALID_VALUE;
    if (!are_peers(access[1], found->second.device)) return PEERS_UNSUPPORTED;
    found->second.reach |= 1u << access[1];
    at += found->second.len;
  }
  return SUCCESS;
}
API cuMemExportToShareableHandle(int *fd, u64 handle, int type, u64) {
  REFUSABLE;
  auto found = handles.find(handle);
  if (found == handles.end() || type != HANDLE_FD || !(found->second.first->types & type)) return INVALID_VALUE;
  return give(fd, found->second.first->fd);
}
API cuMemImportFromShareableHandle(u64 *handle, u64 fd, int type) {
  REFUSABLE;
  int gpu = gpu_of_file(fd, "piece");
  struct stat about;
  if (type != HANDLE_FD || gpu < 0 || fstat(fd, &about)) return INVALID_VALUE;
  auto made = std::make_shared<piece>(device_of(gpu), HANDLE_FD, fcntl(fd, F_DUPFD_CLOEXEC, 0), about.st_size, false);
  handles[*handle = made->id] = {made, 1};
  return SUCCESS;
}

API cuDeviceGetDefaultMemPool(pool **found, int device) {
  REFUSABLE;
  return *found = default_pool(device), SUCCESS;
}
API cuMemAllocAsync(u64 *address, size_t len, void *) {
  REFUSABLE;
  return top() ? allocate_from(address, len, default_pool(top()->device)) : INVALID_CONTEXT;
}
API cuMemAllocFromPoolAsync(u64 *address, size_t len, pool *from, void *) {
  REFUSABLE;
  return allocate_from(address, len, from);
}
// Properties as of cuMemCreate.
API cuMemPoolCreate(pool **made, const int *properties) {
  REFUSABLE;
  int device = properties[3];
  if (device < 0 || device >= (int)visible().size()) return NO_SUCH_DEVICE;
  auto one = std::make_shared<pool>(device, properties[1], make_file("pool", visible()[device], FILE_LEN), false);
  pools[*made = one.get()] = one;
  return SUCCESS;
}
API cuMemPoolDestroy(pool *gone) {
  REFUSABLE;
  return pools.erase(gone) ? SUCCESS : INVALID_VALUE;
}
API cuMemPoolSetAccess(pool *what, const int *access, size_t) {
  REFUSABLE;
  auto found = pools.find(what);
  if (found == pools.end()) return INVALID_VALUE;
  if (!are_peers(access[1], what->device)) return PEERS_UNSUPPORTED;
  what->reach |= 1u << access[1];
  for (auto &[at, known] : memory) if (known.from == found->second) known.reach = what->reach;
  return SUCCESS;
}
API cuMemPoolExportToShareableHandle(int *fd, pool *what, int type, u64) {
  REFUSABLE;
  if (!pools.count(what) || what->is_imported || type != HANDLE_FD || !(what->types & type)) return INVALID_VALUE;
  return give(fd, what->fd);
}
API cuMemPoolImportFromShareableHandle(pool **made, u64 fd, int type, u64) {
  REFUSABLE;
  int gpu = gpu_of_file(fd, "pool"), device = device_of(gpu);
  if (type != HANDLE_FD || gpu < 0 || device < 0) return INVALID_VALUE;
  auto one = std::make_shared<pool>(device, 0, fcntl(fd, F_DUPFD_CLOEXEC, 0), true);
  pools[*made = one.get()] = one;
  return SUCCESS;
}
API cuMemPoolExportPointer(opaque *data, u64 address) {
  REFUSABLE;
  auto found = memory.find(address);
  if (found == memory.end() || !found->second.from || !found->second.from->types) return INVALID_VALUE;
  pool_pointer made = {{}, found->second.offset, found->second.len};
  memcpy(made.magic, POINTER_MAGIC, sizeof made.magic);
  *data = {};
  return memcpy(data, &made, sizeof made), SUCCESS;
}
API cuMemPoolImportPointer(u64 *address, pool *from, const opaque *data) {
  REFUSABLE;
  pool_pointer pointer;
  memcpy(&pointer, data, sizeof pointer);
  auto found = pools.find(from);
  bool is_one = found != pools.end() && from->is_imported && !memcmp(pointer.magic, POINTER_MAGIC, sizeof pointer.magic);
  if (!is_one || !is_within(from->fd, pointer.offset, pointer.len)) return INVALID_VALUE;
  if (!(*address = map_file(from->fd, pointer.offset, pointer.len))) return OUT_OF_MEMORY;
  allocation made = {pointer.len, nullptr, allocation::DEVICE, from->device, from->reach, from->fd, pointer.offset};
  made.from = found->second;
  made.imported = 1;
  return memory[*address] = made, SUCCESS;
}
