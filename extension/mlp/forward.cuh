// The kernel of `mlp`: evaluates all layers of a network for rows in global memory.
//
// Blocks are persistent: they stage the weights once, if these fit in shared memory, and then loop over the rows.
#pragma once

#include "mlp/network.cuh"
#include "mlp/rows.cuh"

namespace voxelfield {

// Computes the columns of relu(x W^T) from 16 * `from` on for the first layer, whose input is read in groups of
// columns. The caller has loaded the first group. Calls visit(group, tiles).
template <int Count, int Width, int M, typename Layer, typename Visit>
__device__ __forceinline__ void first_layer_part(Activations<M, Width>& hidden, int from, const Layer& weights,
                                                 const WarpRows<const __half*>& input, Fragment (&tiles)[2][M],
                                                 const Visit& visit) {
  Panel<M> panels[Count] = {};
  const auto own = weights.template tiles<false>();
#pragma unroll 1
  for (int group = 0;;) {
    visit(group, tiles);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        multiply_add<2>(panels[i], tiles[k], own(from + i, 2 * group + k));
      }
    }
    if (++group * kInputGroup >= input.columns) break;
    load_input(input, group, tiles);
  }
  for_each_tile<M, 16 * Count>([&](int i, int m) { hidden.tile[from + i][m] = to_half<true>(panels[i], m); });
}

// Computes all columns, in two parts to save registers, although this reads the input twice.
template <int Width, bool Halved = false, int M, typename Layer, typename Visit>
__device__ __forceinline__ Activations<M, Width> first_layer(const Layer& weights, const WarpRows<const __half*>& input,
                                                             Fragment (&tiles)[2][M], const Visit& visit) {
  constexpr int kCount = Halved ? Width / 32 : Width / 16;
  Activations<M, Width> hidden;
  first_layer_part<kCount>(hidden, 0, weights, input, tiles, visit);
  if constexpr (Halved) {
    load_input(input, 0, tiles);
    first_layer_part<kCount>(hidden, kCount, weights, input, tiles, [](int, const Fragment(&)[2][M]) {});
  }
  return hidden;
}

template <int Width, int M, typename Layer>
__device__ __forceinline__ void last_layer(const Activations<M, Width>& hidden, const Layer& weights,
                                           const WarpRows<__half*>& output, bool few) {
  for (int group = 0; group * kOutputGroup < output.columns; ++group) {
    const Panel<M> panel = few ? multiply<1>(hidden, weights, 0) : multiply<2>(hidden, weights, kOutputGroup * group);
    Fragment tiles[M];
#pragma unroll
    for (int m = 0; m < M; ++m) tiles[m] = to_half(panel, m);
    store_output(tiles, output, group, few);
  }
}

template <typename Weights, int Width, int M, int Threads, int Blocks>
__global__ void __launch_bounds__(Threads, Blocks)
    mlp_forward_kernel(const __grid_constant__ Mlp mlp, const uint4* __restrict__ packed, RowCount rows,
                       const __half* __restrict__ input, __half* __restrict__ output) {
  extern __shared__ uint4 memory[];
  const Weights weights(mlp.network, shared_address(memory), packed);
  const int last = mlp.network.layers - 1, used = rows.used(), step = gridDim.x * (blockDim.x / kWarp * 16 * M);
  int first = (threadIdx.x / kWarp * gridDim.x + blockIdx.x) * (16 * M);
  const auto input_at = [&](int row) { return WarpRows<const __half*>(input, row, used, mlp.input_pitch); };
  const auto output_at = [&](int row) { return WarpRows<__half*>(output, row, rows.capacity, mlp.output_pitch); };
  prefetch<M>(input_at(first));
  weights.stage(mlp.network);
  __syncthreads();
  for (; first < used; first += step) {
    prefetch<M>(input_at(first + step));
    Fragment tiles[2][M];
    load_input(input_at(first), 0, tiles);
    Activations<M, Width> hidden =
        first_layer<Width>(weights[0], input_at(first), tiles, [](int, const Fragment(&)[2][M]) {});
    for (int l = 1; l < last; ++l) hidden = layer<M, Width, Width>(hidden, weights[l]);
    if (first + 16 * M > used) {
      clear_rows<M>(output_at(first));
      __syncwarp();
    }
    last_layer(hidden, weights[last], WarpRows<__half*>(output, first, used, mlp.output_pitch), mlp.few_outputs());
  }
  for (; first < rows.capacity; first += step) clear_rows<M>(output_at(first));
}

}  // namespace voxelfield
