// The two networks of a field (voxelfield.decoders.NetworkDecoder) in a kernel that does more than evaluate them:
// 2 to 4 layers, at most 32 inputs and 16 outputs, in shared memory for all of a block's warps.
#pragma once

#include "common/constants.h"
#include "mlp/network.cuh"

namespace voxelfield {

constexpr int kFieldInputs = 32;

struct FieldLayer {
  const void* weights;  // (out, in)
  int out, in;
};

// Hidden layers are padded to `Width`.
struct FieldNetwork {
  FieldLayer layer[kMostFieldLayers];
  int layers;         // 0: there is no such network
  bool wide_weights;  // float32, otherwise float16

  template <int Width>
  __host__ __device__ SharedMatrix matrix(unsigned shared, int l) const {
    constexpr int kFirst = Width * row_stride(kFieldInputs), kHidden = Width * row_stride(Width);
    if (l == 0) return {shared, row_stride(kFieldInputs)};
    return {shared + kFirst + (l - 1) * kHidden, row_stride(Width)};
  }

  template <int Width>
  __host__ __device__ int bytes() const {
    if (layers == 0) return 0;
    return static_cast<int>(matrix<Width>(0, layers - 1).address) + kFieldOutputs * row_stride(Width);
  }

  template <int Width>
  __device__ __forceinline__ void stage(unsigned shared) const {
    for (int l = 0; l < layers; ++l) {
      const int rows = l == layers - 1 ? kFieldOutputs : Width, columns = l == 0 ? kFieldInputs : Width;
      const FieldLayer& own = layer[l];
      const SharedMatrix to = matrix<Width>(shared, l);
      if (wide_weights) {
        stage_weights(to, rows, columns, static_cast<const float*>(own.weights), own.out, own.in, 1, 1);
      } else {
        stage_weights(to, rows, columns, static_cast<const __half*>(own.weights), own.out, own.in, 1, 1);
      }
    }
  }
};

// 16 * M rows of inputs that lie in shared memory.
template <int M>
__device__ __forceinline__ Activations<M, kFieldInputs> load_rows(const SharedMatrix& inputs, int row) {
  Activations<M, kFieldInputs> x;
#pragma unroll
  for (int k = 0; k < kFieldInputs / 16; ++k) {
#pragma unroll
    for (int m = 0; m < M; ++m) x.tile[k][m] = load_fragment(inputs, row + 16 * m, 16 * k);
  }
  return x;
}

}  // namespace voxelfield
