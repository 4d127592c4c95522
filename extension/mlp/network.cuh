// A small multilayer perceptron evaluated by one warp on tensor cores: ReLU between layers, no biases.
//
// A warp takes 16 * M rows at once. Activations stay in registers from the first layer to the last, because what
// mma.sync leaves as its sums is, rounded to float16, what it takes as its left operand. Weights lie in shared memory,
// row-major (out, in) as torch has them, and ldmatrix reads them as they are for y = x W^T and transposed for x = y W.
//
// A kernel stages the weights once (stage_weights), brings rows in as Fragments (load_fragment from shared memory, or
// by its own means), applies `layer` as often as there are hidden layers and `multiply` for the last, and keeps the
// Panels that this leaves. All 32 threads of a warp must call these functions together.
#pragma once

#include <cuda_fp16.h>

#include "common/vector.cuh"

namespace voxelfield {

// 16 x 16 numbers in float16 over a warp. With lane = 4 * g + t, a thread has columns 2t, 2t + 1 of row g, the same
// of row g + 8, then columns 2t + 8, 2t + 9 of both.
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

// A row-major matrix of float16 in shared memory; address and stride are in bytes.
struct SharedMatrix {
  unsigned address;
  int stride;
};

// Rows are longer by 16 bytes than their columns (a multiple of 16) need: that puts the eight rows which ldmatrix reads
// at once into different banks.
__host__ __device__ constexpr int row_stride(int columns) { return 2 * (columns + 8); }

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How rows meet global memory. mma.sync gives a thread columns 2t, 2t + 1 of every eight. Calling them columns
// width * t ... width * t + width - 1 instead, which permutes the columns of the first layer's weights or the rows of
// the last layer's, lets a thread move `width` neighbours in one access. With a width of 2 all stay in their places.
__host__ __device__ constexpr int column_at(int position, int log2_width) {
  const int within = position & ((4 << log2_width) - 1);
  return position - within + ((within & 6) >> 1 << log2_width) + (within >> 3) * 2 + (within & 1);
}

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % kWarp; }

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Where a lane's row of the four 8 x 8 matrices of ldmatrix lies, in a tile of 16 x 16: with the matrices in the order
// top left, bottom left, top right, bottom right (down), or top left, top right, bottom left, bottom right (across).
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

__device__ __forceinline__ void store_fragment(const SharedMatrix& matrix, int row, int column, const Fragment& f) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   down(matrix) + row * matrix.stride + 2 * column),
               "r"(f.part[0]), "r"(f.part[1]), "r"(f.part[2]), "r"(f.part[3])
               : "memory");
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

// to = from + left * right, where `right` is 16 deep and 8 wide. (Two operands, so that no register is set to zero for
// sums that begin.)
__device__ __forceinline__ void multiply_add(float (&to)[4], const float (&from)[4], const Fragment& left,
                                             unsigned right_upper, unsigned right_lower) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(left.part[0]), "r"(left.part[1]), "r"(left.part[2]), "r"(left.part[3]), "r"(right_upper), "r"(right_lower),
        "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
#else
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

// Columns `column` ... `column` + 16 (of which 8 * Eights count) of x W^T; `weights` are (out, Columns).
template <int Eights = 2, int M, int Columns>
__device__ __forceinline__ Panel<M> multiply(const Activations<M, Columns>& x, const SharedMatrix& weights,
                                             int column) {
  Panel<M> panel{};
  const unsigned address = across(weights) + column * weights.stride;
#pragma unroll
  for (int k = 0; k < Columns / 16; ++k) multiply_add<Eights>(panel, x.tile[k], load_matrices(address + 32 * k));
  return panel;
}

// Panels from `column` on of x W^T, or if transposed of x W, where `weights` are (Columns, in). Sums of several panels
// wait for one another less often.
template <bool Transposed, int Together, int M, int Columns>
__device__ __forceinline__ void multiply_panels(Panel<M> (&panels)[Together], const Activations<M, Columns>& x,
                                                const SharedMatrix& weights, int column) {
#pragma unroll
  for (int p = 0; p < Together; ++p) panels[p] = {};
  const unsigned address = Transposed ? down(weights) + 2 * column : across(weights) + column * weights.stride;
#pragma unroll
  for (int k = 0; k < Columns / 16; ++k) {
#pragma unroll
    for (int p = 0; p < Together; ++p) {
      multiply_add<2>(panels[p], x.tile[k],
                      Transposed ? load_matrices_transposed(address + 16 * k * weights.stride + 32 * p)
                                 : load_matrices(address + 16 * p * weights.stride + 32 * k));
    }
  }
}

// Columns `column` ... `column` + 16 of y W; `weights` are (Columns, in).
template <int M, int Columns>
__device__ __forceinline__ Panel<M> multiply_transposed(const Activations<M, Columns>& y, const SharedMatrix& weights,
                                                        int column) {
  Panel<M> panels[1];
  multiply_panels<true>(panels, y, weights, column);
  return panels[0];
}

__device__ __forceinline__ unsigned as_bits(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }
__device__ __forceinline__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<const __half2*>(&bits); }

// Tile `m` of a panel in float16.
template <int M>
__device__ __forceinline__ Fragment to_half(const Panel<M>& panel, int m) {
  Fragment f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* sum = panel.sum[m][i / 2] + i % 2 * 2;
    f.part[i] = as_bits(__floats2half2_rn(sum[0], sum[1]));
  }
  return f;
}

// The same where it is positive, or not a number.
template <int M>
__device__ __forceinline__ Fragment relu_to_half(const Panel<M>& panel, int m) {
  Fragment f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* sum = panel.sum[m][i / 2] + i % 2 * 2;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(f.part[i]) : "f"(sum[1]), "f"(sum[0]));
#else
    f.part[i] = as_bits(__hmax2_nan(__floats2half2_rn(sum[0], sum[1]), __float2half2_rn(0.f)));
#endif
  }
  return f;
}

// A gradient where a ReLU let its argument through.
__device__ __forceinline__ Fragment where_positive(const Fragment& activation, Fragment gradient) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    gradient.part[i] &= __hgt2_mask(as_half2(activation.part[i]), __float2half2_rn(0.f));
  }
  return gradient;
}

// All panels, `Together` at a time, each tile rounded by round(panel, m).
template <int Out, int Together, bool Transposed, int M, int Columns, typename Round>
__device__ __forceinline__ Activations<M, Out> multiply_all(const Activations<M, Columns>& x,
                                                            const SharedMatrix& weights, const Round& round) {
  Activations<M, Out> y;
#pragma unroll
  for (int i = 0; i < Out / 16; i += Together) {
    Panel<M> panels[Together];
    multiply_panels<Transposed>(panels, x, weights, 16 * i);
#pragma unroll
    for (int p = 0; p < Together; ++p) {
#pragma unroll
      for (int m = 0; m < M; ++m) y.tile[i + p][m] = round(panels[p], m);
    }
  }
  return y;
}

// A hidden layer, relu(x W^T).
template <int M, int In, int Out, int Together = 1>
__device__ __forceinline__ Activations<M, Out> layer(const Activations<M, In>& x, const SharedMatrix& weights) {
  return multiply_all<Out, Together, false>(x, weights,
                                            [](const Panel<M>& panel, int m) { return relu_to_half(panel, m); });
}

// y W of a hidden layer.
template <int Together, int M, int Columns>
__device__ __forceinline__ Activations<M, Columns> multiply_transposed(const Activations<M, Columns>& y,
                                                                       const SharedMatrix& weights) {
  return multiply_all<Columns, Together, true>(y, weights,
                                               [](const Panel<M>& panel, int m) { return to_half(panel, m); });
}

// A hidden layer and the first 16 columns, of which 8 * Eights count, of the last layer behind it. The hidden layer is
// never there as a whole: that spares registers.
template <int Width, int Eights, int M, int In>
__device__ __forceinline__ Panel<M> last_two_layers(const Activations<M, In>& x, const SharedMatrix& hidden,
                                                    const SharedMatrix& last) {
  Panel<M> result{};
  const unsigned address = across(last);
#pragma unroll
  for (int i = 0; i < Width / 16; ++i) {
    const Panel<M> panel = multiply(x, hidden, 16 * i);
    Fragment part[M];
#pragma unroll
    for (int m = 0; m < M; ++m) part[m] = relu_to_half(panel, m);
    multiply_add<Eights>(result, part, load_matrices(address + 32 * i));
  }
  return result;
}

__device__ __forceinline__ __half2 to_half2(float a, float b) { return __floats2half2_rn(a, b); }
__device__ __forceinline__ __half2 to_half2(__half a, __half b) { return __halves2half2(a, b); }

// Copies weights (out, in), float32 or float16, into shared memory by the whole block; in float16, padded by zeros to
// (rows, columns), of which column_at tells the places. A warp takes whole rows, a thread two neighbours of each.
template <typename weight_t>
__device__ __forceinline__ void stage_weights(const SharedMatrix& shared, int rows, int columns,
                                              const weight_t* __restrict__ weights, int out, int in, int log2_row_width,
                                              int log2_column_width) {
  // So many loads are under way at once.
  constexpr int kBatch = 8;
  const int warps = blockDim.x / kWarp;
  for (int place = 2 * lane_of_warp(); place < columns; place += 2 * kWarp) {
    const int column = column_at(place, log2_column_width);
    for (int begin = threadIdx.x / kWarp; begin < rows; begin += kBatch * warps) {
      weight_t pair[kBatch][2];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = column_at(begin + i * warps, log2_row_width);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          pair[i][k] = weight_t{};
          if (row < out && column + k < in) pair[i][k] = __ldg(weights + row * in + column + k);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + i * warps;
        if (row >= rows) break;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.address + row * shared.stride + 2 * place),
                     "r"(as_bits(to_half2(pair[i][0], pair[i][1])))
                     : "memory");
      }
    }
  }
}

}  // namespace voxelfield
