// A network's weights for a kernel: in shared memory, which a block fills before it starts (StagedWeights), or as tiles
// in global memory, in tensor-core order, which stay in the L1 and L2 caches (PackedWeights). The first is faster; the
// second takes no shared memory, whatever the depth of the network. Both give the same results. Kernels are templates
// over the two.
#pragma once

#include "mlp/fragments.cuh"

namespace voxelfield {

// RowTiles of a layer's weights as the right operand of x W^T, or of x W if transposed. Rows and columns are in tiles.
template <bool Transposed>
struct StagedTiles {
  unsigned address;
  int stride;

  __device__ __forceinline__ Fragment operator()(int row, int column) const {
    const unsigned at = address + 16 * row * stride + 32 * column;
    return Transposed ? load_matrices_transposed(at) : load_matrices(at);
  }
};

struct StagedLayer {
  SharedMatrix matrix;

  template <bool Transposed>
  __device__ __forceinline__ StagedTiles<Transposed> tiles() const {
    return {Transposed ? down(matrix) : across(matrix), matrix.stride};
  }
};

struct PackedTiles {
  const uint4* own;  // tiles, offset to the thread's lane
  int columns;

  __device__ __forceinline__ Fragment operator()(int row, int column) const {
    const uint4 f = __ldg(own + (row * columns + column) * kWarp);
    return {{f.x, f.y, f.z, f.w}};
  }
};

struct PackedLayer {
  const uint4* tile;  // address of the first tile, offset to the thread's lane
  const uint4* transposed;
  int columns;  // number of columns, in tiles

  template <bool Transposed>
  __device__ __forceinline__ PackedTiles tiles() const {
    return {Transposed ? transposed : tile, columns};
  }
};

template <typename weight_t>
__device__ __forceinline__ weight_t weight_at(const NetworkLayer& layer, int row, int column) {
  if (row >= layer.out || column >= layer.in) return weight_t{};
  return __ldg(static_cast<const weight_t*>(layer.weights) + row * layer.in + column);
}

// Copies one layer into shared memory as float16, padded with zeros, with rows and columns permuted by column_at. The
// whole block takes part: each warp copies whole rows, and each thread two adjacent elements of a row at a time.
template <typename weight_t, typename Matrix>
__device__ __forceinline__ void stage_layer(const Network& network, int l, const Matrix& shared) {
  constexpr int kLoadsAtOnce = 8;
  // Copied to a local, because each load below would read it again from the kernel's parameters at a dynamic index.
  const NetworkLayer layer = network.layer[l];
  const int rows = network.rows_of(l), columns = network.columns_of(l), warps = blockDim.x / kWarp;
  const int row_width = l == network.layers - 1 ? network.log2_output_width : 1;
  const int column_width = l == 0 ? network.log2_input_width : 1;
  for (int place = 2 * lane_of_warp(); place < columns; place += 2 * kWarp) {
    const int column = column_at(place, column_width);
    for (int begin = threadIdx.x / kWarp; begin < rows; begin += kLoadsAtOnce * warps) {
      weight_t pair[kLoadsAtOnce][2];
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        const int row = column_at(begin + i * warps, row_width);
#pragma unroll
        for (int k = 0; k < 2; ++k) pair[i][k] = weight_at<weight_t>(layer, row, column + k);
      }
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        const int row = begin + i * warps;
        if (row >= rows) break;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.at(row, place)),
                     "r"(as_bits(to_half2(pair[i][0], pair[i][1])))
                     : "memory");
      }
    }
  }
}

// Weights in shared memory, layer after layer. `First` is padded_in if the kernel knows it, otherwise 0.
template <int Width, int First = 0>
class StagedWeights {
 public:
  static constexpr bool kStaged = true;

  __device__ __forceinline__ StagedWeights(const Network& network, unsigned shared, const uint4* /*packed*/)
      : shared_(shared), first_stride_(row_stride(First > 0 ? First : network.padded_in)) {}

  // Must be called by the whole block, which must synchronise before it reads the weights.
  __device__ __forceinline__ void stage(const Network& network) const {
    const auto stage_all = [&](auto zero) {
      for (int l = 0; l < network.layers; ++l) stage_layer<decltype(zero)>(network, l, (*this)[l].matrix);
    };
    network.float_weights ? stage_all(0.0f) : stage_all(__half{});
  }

  __device__ __forceinline__ StagedLayer operator[](int l) const {
    constexpr int kStride = row_stride(Width);
    if (l == 0) return {{shared_, first_stride_}};
    return {{shared_ + Width * first_stride_ + (l - 1) * Width * kStride, kStride}};
  }

 private:
  unsigned shared_;
  int first_stride_;
};

// Weights in global memory in the layout of pack_weights: all tiles, then all of them transposed.
template <int Width, int First = 0>
class PackedWeights {
 public:
  static constexpr bool kStaged = false;

  __device__ __forceinline__ PackedWeights(const Network& network, unsigned /*shared*/, const uint4* packed)
      : own_(packed + lane_of_warp()),
        first_columns_((First > 0 ? First : network.padded_in) / 16),
        transposed_(network.tiles() * kWarp) {}

  __device__ __forceinline__ void stage(const Network& /*network*/) const {}

  __device__ __forceinline__ PackedLayer operator[](int l) const {
    constexpr int kTall = Width / 16;
    const uint4* const tile = own_ + (l == 0 ? 0 : kTall * first_columns_ + (l - 1) * (kTall * kTall)) * kWarp;
    return {tile, tile + transposed_, l == 0 ? first_columns_ : kTall};
  }

 private:
  const uint4* own_;
  int first_columns_, transposed_;
};

}  // namespace voxelfield
