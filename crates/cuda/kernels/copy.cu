// Copies many ranges in one launch. Built by build.py; the result, copy.ptx, is part of the source.
//
// The grid is two-dimensional: x has one warp for each item, y the item's pieces of `piece` bytes.
// So the host lays out one item per range without cutting it, and many warps still share a long
// range. A launch has thousands of warps, each with kilobytes of outstanding loads before its first
// store: this hides latency even where one side is host memory behind PCIe.

#define WARP 32
// Outstanding loads of one thread: eight of 16 bytes in 32 lanes are 4 KiB, a common block.
#define DEPTH 8
// Bytes of items passed as kernel parameters.
#define INLINE_BYTES 3968
// Warps of a block of `tcpx_copy_table`, which reads their items, a line or two, at once.
#define TABLE_WARPS 8

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// One range, as `Item` of src/table.rs: the source in the low 48 bits of x, the length in its high
// 16, the target in y.
typedef ulonglong2 item;
// One range of a list whose ranges all have the same length, as `Pair` of src/pair.rs: the source
// in x, the target in y, in steps.
typedef int2 pair;
#define STEP 16

struct inline_items {
  ulonglong2 at[INLINE_BYTES / 16];
};

struct range {
  u64 from, to;
  u32 len;
};

// Returns range `i` of a list: of pairs if their length `all` is given, else of items.
__device__ __forceinline__ range range_of(const void *items, u32 i, u64 from, u64 to, u32 all) {
  if (all) {
    pair work = ((const pair *)items)[i];
    return {from + (long long)work.x * STEP, to + (long long)work.y * STEP, all};
  }
  item work = ((const item *)items)[i];
  return {from + (work.x & 0xffffffffffffull), to + work.y, (u32)(work.x >> 48)};
}

// Copies `count` values of one width, aligned on both sides.
template <typename T> __device__ __forceinline__ void copy_wide(u64 from, u64 to, u32 count, u32 lane) {
  const T *source = (const T *)from;
  T *target = (T *)to;
  for (u32 first = lane; first < count; first += WARP * DEPTH) {
    T held[DEPTH];
#pragma unroll
    for (u32 k = 0; k < DEPTH; k++) {
      u32 i = first + k * WARP;
      if (i < count) held[k] = source[i];
    }
#pragma unroll
    for (u32 k = 0; k < DEPTH; k++) {
      u32 i = first + k * WARP;
      if (i < count) target[i] = held[k];
    }
  }
}

// Copies one piece of a range with the widest accesses that both sides allow. The bytes before the
// first and after the last aligned value, less than 16 each, are copied one by one: the head by the
// lower half of the warp, the tail by the upper half.
__device__ __forceinline__ void copy_piece(range work, u32 piece, u32 lane) {
  u32 len = work.len;
  u32 start = blockIdx.y * piece;
  if (start >= len) return;
  len -= start;
  if (len > piece) len = piece;
  u64 from = work.from + start;
  u64 to = work.to + start;

  // The lowest bit in which the two addresses differ, at most 16.
  u32 differ = (u32)(from ^ to) | 16;
  u32 width = differ & (0u - differ);
  u32 head = (0u - (u32)to) & (width - 1);
  if (head > len) head = len;
  u32 body = (len - head) & ~(width - 1);
  u32 tail = len - head - body;

  u32 edge = lane < 16 ? lane : lane - 16;
  u32 offset = lane < 16 ? edge : head + body + edge;
  if (edge < (lane < 16 ? head : tail)) ((u8 *)to)[offset] = ((const u8 *)from)[offset];

  from += head;
  to += head;
  switch (width) {
  case 16: copy_wide<uint4>(from, to, body / 16, lane); break;
  case 8: copy_wide<u64>(from, to, body / 8, lane); break;
  case 4: copy_wide<u32>(from, to, body / 4, lane); break;
  case 2: copy_wide<u16>(from, to, body / 2, lane); break;
  default: copy_wide<u8>(from, to, body, lane); break;
  }
}

// For few items, which are passed as kernel parameters.
extern "C" __global__ void tcpx_copy_inline(const inline_items items, u32 count, u64 from, u64 to, u32 all, u32 piece) {
  u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
  if (warp < count) copy_piece(range_of(&items, warp, from, to, all), piece, threadIdx.x % WARP);
}

// For many items, which are in host memory; a block reads those of all its warps at once. This is
// faster than copying them to the device first.
extern "C" __global__ void __launch_bounds__(TABLE_WARPS *WARP)
    tcpx_copy_table(const void *items, u32 count, u64 from, u64 to, u32 all, u32 piece) {
  __shared__ range mine[TABLE_WARPS];
  u32 first = blockIdx.x * TABLE_WARPS;
  u32 warp = threadIdx.x / WARP;
  if (threadIdx.x < TABLE_WARPS && first + threadIdx.x < count)
    mine[threadIdx.x] = range_of(items, first + threadIdx.x, from, to, all);
  __syncthreads();
  if (first + warp < count) copy_piece(mine[warp], piece, threadIdx.x % WARP);
}
