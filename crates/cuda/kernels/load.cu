// Simulates the work of a model, to measure what transfers cost it. Built by build.py; the result,
// load.ptx, is part of the source. src/load.rs launches these kernels and knows their sizes.

// Side of the tile that a block multiplies, in steps of STEP along the inner dimension.
#define TILE 128
#define STEP 32
#define THREADS 256
#define WARP 32
// Side of the matrices that one tensor core instruction multiplies.
#define CORE 16
// Halves between the rows of both tiles in shared memory: adjacent rows use different banks.
#define A_ROW (STEP + 8)
#define B_ROW (TILE + 8)
// Matrices of a warp, which covers 64 rows and 32 columns of the tile.
#define DOWN 4
#define ACROSS 2

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__

// The part of a factor that one lane holds, as pairs of halves, and of a sum.
struct factor {
  u32 at[8];
};
struct sum {
  float at[8];
};

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  u32 address;
  asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(pointer));
  return address;
}

#define LOAD(letter, into, from, row)                                                                                  \
  asm volatile("wmma.load." letter ".sync.aligned.row.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"       \
               : "=r"(into.at[0]), "=r"(into.at[1]), "=r"(into.at[2]), "=r"(into.at[3]), "=r"(into.at[4]),             \
                 "=r"(into.at[5]), "=r"(into.at[6]), "=r"(into.at[7])                                                  \
               : "r"(shared_address(from)), "r"(row)                                                                   \
               : "memory")

__device__ __forceinline__ void load_left(factor &into, const u16 *from) { LOAD("a", into, from, A_ROW); }
__device__ __forceinline__ void load_right(factor &into, const u16 *from) { LOAD("b", into, from, B_ROW); }

__device__ __forceinline__ void multiply(sum &to, const factor &left, const factor &right) {
  asm volatile("wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "
               "{%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19,%20,%21,%22,%23}, {%0,%1,%2,%3,%4,%5,%6,%7};"
               : "+f"(to.at[0]), "+f"(to.at[1]), "+f"(to.at[2]), "+f"(to.at[3]), "+f"(to.at[4]), "+f"(to.at[5]),
                 "+f"(to.at[6]), "+f"(to.at[7])
               : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(left.at[4]), "r"(left.at[5]),
                 "r"(left.at[6]), "r"(left.at[7]), "r"(right.at[0]), "r"(right.at[1]), "r"(right.at[2]),
                 "r"(right.at[3]), "r"(right.at[4]), "r"(right.at[5]), "r"(right.at[6]), "r"(right.at[7]));
}

__device__ __forceinline__ void store_sum(float *to, const sum &from, u32 row) {
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8}, %9;"
               :
               : "l"(to), "f"(from.at[0]), "f"(from.at[1]), "f"(from.at[2]), "f"(from.at[3]), "f"(from.at[4]),
                 "f"(from.at[5]), "f"(from.at[6]), "f"(from.at[7]), "r"(row)
               : "memory");
}

#endif

// Positions of a thread's two parts of 16 bytes in the tiles: row and column in each tile.
struct part {
  u32 row, column;
};
__device__ __forceinline__ part part_of(u32 which, u32 columns) {
  u32 index = threadIdx.x + which * THREADS;
  u32 in_row = columns / 8;
  return {index / in_row, index % in_row * 8};
}

// c = a * b, halves to floats, all of `side` rows and columns, row-major. `side` is a multiple of
// TILE. One block per tile of c: bound by the tensor cores.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    tcpx_load_matmul(const u16 *a, const u16 *b, float *c, u32 side) {
  __shared__ __align__(32) u16 left[2][TILE * A_ROW];
  __shared__ __align__(32) u16 right[2][STEP * B_ROW];
  u32 warp = threadIdx.x / WARP;
  u32 warp_row = warp / 4 * (DOWN * CORE), warp_column = warp % 4 * (ACROSS * CORE);
  u64 first_row = (u64)blockIdx.y * TILE, first_column = (u64)blockIdx.x * TILE;

  sum sums[DOWN][ACROSS] = {};
  uint4 next_left[2], next_right[2];
  // The next step's tiles are loaded while this step's are multiplied.
  for (u32 step = 0; step <= side; step += STEP) {
    u32 now = step / STEP % 2;
    if (step < side)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        part l = part_of(i, STEP), r = part_of(i, TILE);
        next_left[i] = *(const uint4 *)(a + (first_row + l.row) * side + step + l.column);
        next_right[i] = *(const uint4 *)(b + (u64)(step + r.row) * side + first_column + r.column);
      }
    if (step > 0)
#pragma unroll
      for (u32 inner = 0; inner < STEP; inner += CORE) {
        factor lefts[DOWN], rights[ACROSS];
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) load_left(lefts[i], left[!now] + (warp_row + i * CORE) * A_ROW + inner);
#pragma unroll
        for (u32 i = 0; i < ACROSS; i++) load_right(rights[i], right[!now] + inner * B_ROW + warp_column + i * CORE);
#pragma unroll
        for (u32 i = 0; i < DOWN; i++)
#pragma unroll
          for (u32 j = 0; j < ACROSS; j++) multiply(sums[i][j], lefts[i], rights[j]);
      }
    if (step < side)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        part l = part_of(i, STEP), r = part_of(i, TILE);
        *(uint4 *)(left[now] + l.row * A_ROW + l.column) = next_left[i];
        *(uint4 *)(right[now] + r.row * B_ROW + r.column) = next_right[i];
      }
    __syncthreads();
  }
#pragma unroll
  for (u32 i = 0; i < DOWN; i++)
#pragma unroll
    for (u32 j = 0; j < ACROSS; j++)
      store_sum(c + (first_row + warp_row + i * CORE) * side + first_column + warp_column + j * CORE, sums[i][j], side);
}

// y = w * x: one block per row of w, whose `columns` are a multiple of 4. Bound by memory and by
// the launch.
extern "C" __global__ void __launch_bounds__(THREADS) tcpx_load_decode(const float *w, const float *x, float *y, u32 columns) {
  __shared__ float sums[THREADS];
  const float4 *row = (const float4 *)(w + (u64)blockIdx.x * columns);
  float mine = 0;
  for (u32 i = threadIdx.x; i < columns / 4; i += THREADS) {
    float4 left = row[i], right = ((const float4 *)x)[i];
    mine += left.x * right.x + left.y * right.y + left.z * right.z + left.w * right.w;
  }
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (u32 half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = sums[0];
}
