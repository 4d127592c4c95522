// RowTiles of 16 x 16 numbers distributed over the threads of a warp, in the layout of tensor-core operands. All 32
// threads of a warp must call these functions together.
#pragma once

#include <cuda_fp16.h>

#include "common/vector.cuh"
#include "mlp/network.h"

namespace voxelfield {

// 16 x 16 numbers in float16, distributed over a warp. With lane = 4 * g + t, a thread holds columns 2t, 2t + 1 of row
// g, the same columns of row g + 8, then columns 2t + 8, 2t + 9 of both rows.
struct Fragment {
  unsigned part[4];
};

// 16 rows x 16 columns of float32 sums for each of M tiles: [column / 8], then g's and (g + 8)'s columns 2t, 2t + 1.
template <int M>
struct Panel {
  float sum[M][2][4];
};

template <int M, int Columns>
struct Activations {
  Fragment tile[Columns / 16][M];
};

// Calls f(i, m) for the tiles of Activations<M, Columns>.
template <int M, int Columns, typename F>
__device__ __forceinline__ void for_each_tile(const F& f) {
#pragma unroll
  for (int i = 0; i < Columns / 16; ++i) {
#pragma unroll
    for (int m = 0; m < M; ++m) f(i, m);
  }
}

// A row-major matrix of float16 in shared memory; address and stride are in bytes.
struct SharedMatrix {
  unsigned address;
  int stride;

  __device__ __forceinline__ unsigned at(int row, int column) const { return address + row * stride + 2 * column; }
};

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % kWarp; }

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// The address that a lane passes to ldmatrix for a 16 x 16 tile. `down` orders its four 8 x 8 matrices top left, bottom
// left, top right, bottom right; `across` orders them top left, top right, bottom left, bottom right.
__device__ __forceinline__ unsigned down(const SharedMatrix& matrix) {
  const int lane = lane_of_warp();
  return matrix.address + lane % 16 * matrix.stride + lane / 16 * 16;
}

__device__ __forceinline__ unsigned across(const SharedMatrix& matrix) {
  const int lane = lane_of_warp();
  return matrix.address + (lane % 8 + lane / 16 * 8) * matrix.stride + lane / 8 % 2 * 16;
}

__device__ __forceinline__ Fragment load_matrices(unsigned address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.part[0]), "=r"(f.part[1]), "=r"(f.part[2]), "=r"(f.part[3])
               : "r"(address)
               : "memory");
  return f;
}

__device__ __forceinline__ Fragment load_matrices_transposed(unsigned address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.part[0]), "=r"(f.part[1]), "=r"(f.part[2]), "=r"(f.part[3])
               : "r"(address)
               : "memory");
  return f;
}

// The tile at `row`, `column` (multiples of 16) of a matrix whose rows are a warp's rows.
__device__ __forceinline__ Fragment load_fragment(const SharedMatrix& matrix, int row, int column) {
  return load_matrices(down(matrix) + row * matrix.stride + 2 * column);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void store_matrices(unsigned address, const Fragment& f) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(f.part[0]),
               "r"(f.part[1]), "r"(f.part[2]), "r"(f.part[3])
               : "memory");
}
#endif

__device__ __forceinline__ void store_fragment(const SharedMatrix& matrix, int row, int column, const Fragment& f) {
#if __CUDA_ARCH__ >= 900
  store_matrices(down(matrix) + row * matrix.stride + 2 * column, f);
#else
  const int lane = lane_of_warp();
  const unsigned address = matrix.address + (row + lane / 4) * matrix.stride + 2 * column + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + i % 2 * 8 * matrix.stride + i / 2 * 16), "r"(f.part[i])
                 : "memory");
  }
#endif
}

// to = from + left * right, where `right` is 16 deep and 8 wide. With the separate operand `from`, registers need
// not be set to zero at the start of a sum.
__device__ __forceinline__ void multiply_add(float (&to)[4], const float (&from)[4], const Fragment& left,
                                             unsigned right_upper, unsigned right_lower) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(left.part[0]), "r"(left.part[1]), "r"(left.part[2]), "r"(left.part[3]), "r"(right_upper), "r"(right_lower),
        "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
#else
  // On sm_75, mma.sync is only 8 deep.
  float half[4];
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(half[0]), "=f"(half[1]), "=f"(half[2]), "=f"(half[3])
      : "r"(left.part[0]), "r"(left.part[1]), "r"(right_upper), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(left.part[2]), "r"(left.part[3]), "r"(right_lower), "f"(half[0]), "f"(half[1]), "f"(half[2]), "f"(half[3]));
#endif
}

// The first `Eights` * 8 columns of a panel += left * right, where `right` is 16 deep.
template <int Eights, int M>
__device__ __forceinline__ void multiply_add(Panel<M>& panel, const Fragment (&left)[M], const Fragment& right) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < Eights; ++i) {
      multiply_add(panel.sum[m][i], panel.sum[m][i], left[m], right.part[2 * i], right.part[2 * i + 1]);
    }
  }
}

__device__ __forceinline__ unsigned as_bits(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }
__device__ __forceinline__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<const __half2*>(&bits); }

__device__ __forceinline__ __half2 to_half2(float a, float b) { return __floats2half2_rn(a, b); }
__device__ __forceinline__ __half2 to_half2(__half a, __half b) { return __halves2half2(a, b); }

// Tile `m` of a panel in float16; with Relu, negative numbers are replaced by zero, and NaN stays NaN.
template <bool Relu = false, int M>
__device__ __forceinline__ Fragment to_half(const Panel<M>& panel, int m) {
  Fragment f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* sum = panel.sum[m][i / 2] + i % 2 * 2;
#if __CUDA_ARCH__ >= 800
    if constexpr (Relu) {
      asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(f.part[i]) : "f"(sum[1]), "f"(sum[0]));
      continue;
    }
#endif
    const __half2 pair = __floats2half2_rn(sum[0], sum[1]);
    f.part[i] = as_bits(Relu ? __hmax2_nan(pair, __float2half2_rn(0.f)) : pair);
  }
  return f;
}

// Keeps a gradient where the output of the ReLU is positive, and sets it to zero elsewhere.
__device__ __forceinline__ Fragment where_positive(const Fragment& activation, Fragment gradient) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    gradient.part[i] &= __hgt2_mask(as_half2(activation.part[i]), __float2half2_rn(0.f));
  }
  return gradient;
}

}  // namespace voxelfield
