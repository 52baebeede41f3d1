// Lets a C++ compiler build kernels/copy.cu: a launch runs its threads one after the other.
//
// That is enough for these kernels: a thread leaves values in shared memory only for warps of its
// own number or greater.
#pragma once

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __syncthreads()

// Aligned as on the device. There an unaligned access fails, and so it does here, by a compiler
// option.
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct dim3 {
  unsigned int x, y, z;
};
static thread_local dim3 blockIdx, blockDim, threadIdx;

#include "../../kernels/copy.cu"

template <typename... A, typename... B>
static void run_kernel(void (*kernel)(A...), unsigned across, unsigned down, unsigned block, B... arguments) {
  blockDim.x = block;
  for (blockIdx.y = 0; blockIdx.y < down; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < across; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) kernel(arguments...);
}
