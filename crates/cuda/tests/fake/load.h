// Lets a C++ compiler build kernels/load.cu: the threads of a block take turns at each
// __syncthreads.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <functional>
#include <vector>

#include "host.h"

struct alignas(16) float4 {
  float x, y, z, w;
};

// The threads of the running block, each on a stack of its own.
struct fiber {
  ucontext_t at;
  std::vector<char> stack = std::vector<char>(64 << 10);
};
static ucontext_t scheduler;
static std::vector<fiber> fibers;
static std::function<void()> body;

static void pause_fiber() { swapcontext(&fibers[threadIdx.x].at, &scheduler); }
static void run_body() { body(); }

// Each turn runs every thread to its next barrier. All threads of these kernels meet at the same
// barriers.
template <typename... A, typename... B>
static void run_load(void (*kernel)(A...), unsigned across, unsigned down, unsigned block, B... arguments) {
  blockDim.x = block;
  for (blockIdx.y = 0; blockIdx.y < down; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < across; blockIdx.x++) {
      if (fibers.size() != block) fibers = std::vector<fiber>(block);
      std::vector<bool> is_over(block);
      unsigned left = block;
      body = [&] {
        kernel(arguments...);
        is_over[threadIdx.x] = true;
        left--;
      };
      for (unsigned turn = 0; left > 0; turn++)
        for (unsigned i = 0; i < block; i++) {
          if (is_over[i]) continue;
          threadIdx.x = i;
          fiber &next = fibers[i];
          if (turn == 0) {
            getcontext(&next.at);
            next.at.uc_stack.ss_sp = next.stack.data();
            next.at.uc_stack.ss_size = next.stack.size();
            next.at.uc_link = &scheduler;
            makecontext(&next.at, run_body, 0);
          }
          swapcontext(&scheduler, &next.at);
        }
    }
}

// Matrices of a tensor core: the first lane of a warp holds all of them.
struct factor {
  float at[16][16];
};
struct sum {
  float at[16][16];
};

// Normal numbers only, which is all that the load uses.
static float from_half(u16 bits) {
  float magnitude = std::ldexp(1024 + (bits & 0x3ff), (bits >> 10 & 31) - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}
static void load_factor(factor &into, const u16 *from, u32 row) {
  if (threadIdx.x % 32) return;
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) into.at[i][j] = from_half(from[i * row + j]);
}
static void load_left(factor &into, const u16 *from);
static void load_right(factor &into, const u16 *from);
static void multiply(sum &to, const factor &left, const factor &right) {
  if (threadIdx.x % 32) return;
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 16; j++) to.at[i][j] += left.at[i][k] * right.at[k][j];
}
// An error added to every sum, by which a test shows that checks detect it.
#ifndef SUM_ERROR
#define SUM_ERROR 0
#endif
static void store_sum(float *to, const sum &from, u32 row) {
  if (threadIdx.x % 32) return;
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[i * row + j] = from.at[i][j] + SUM_ERROR;
}

#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __syncthreads
#define __syncthreads() pause_fiber()
#undef STEP
#undef WARP
#include "../../kernels/load.cu"

static void load_left(factor &into, const u16 *from) { load_factor(into, from, A_ROW); }
static void load_right(factor &into, const u16 *from) { load_factor(into, from, B_ROW); }
