// A small multilayer perceptron evaluated by one warp on tensor cores: ReLU between layers, no biases.
//
// A warp processes 16 * M rows at once. Activations stay in registers from the first layer to the last, because the
// sums from mma.sync, rounded to float16, already have the layout of its left operand for the next layer. Weights are
// read from shared or global memory (weights.cuh), for y = x W^T and transposed for x = y W.
//
// A kernel stages weights, loads rows as Fragments (with load_fragment from shared memory, or otherwise), applies
// `layer` once for each hidden layer and `multiply` for the last one, and uses the resulting Panels. All 32
// threads of a warp must call these functions together.
#pragma once

#include "mlp/weights.cuh"

namespace voxelfield {

// Computes the panels from `column` on of x W^T, or of x W if transposed, where `weights` are (Columns, in). Summing
// several panels at once reduces stalls between dependent products.
template <bool Transposed, int Eights = 2, int Together, int M, int Columns, typename Weights>
__device__ __forceinline__ void multiply_panels(Panel<M> (&panels)[Together], const Activations<M, Columns>& x,
                                                const Weights& weights, int column) {
#pragma unroll
  for (int p = 0; p < Together; ++p) panels[p] = {};
  const auto tiles = weights.template tiles<Transposed>();
#pragma unroll
  for (int k = 0; k < Columns / 16; ++k) {
#pragma unroll
    for (int p = 0; p < Together; ++p) {
      multiply_add<Eights>(panels[p], x.tile[k], Transposed ? tiles(k, column / 16 + p) : tiles(column / 16 + p, k));
    }
  }
}

// Computes columns `column` to `column` + 16 (of which 8 * Eights are used) of x W^T, or of x W if transposed.
template <int Eights = 2, bool Transposed = false, int M, int Columns, typename Weights>
__device__ __forceinline__ Panel<M> multiply(const Activations<M, Columns>& x, const Weights& weights, int column) {
  Panel<M> panels[1];
  multiply_panels<Transposed, Eights>(panels, x, weights, column);
  return panels[0];
}

// Computes a hidden layer, relu(x W^T), or x W without ReLU if transposed, `Together` panels at a time.
template <int M, int In, int Out, int Together = 1, bool Transposed = false, typename Weights>
__device__ __forceinline__ Activations<M, Out> layer(const Activations<M, In>& x, const Weights& weights) {
  Activations<M, Out> y;
#pragma unroll
  for (int i = 0; i < Out / 16; i += Together) {
    Panel<M> panels[Together];
    multiply_panels<Transposed>(panels, x, weights, 16 * i);
    for_each_tile<M, 16 * Together>([&](int p, int m) { y.tile[i + p][m] = to_half<!Transposed>(panels[p], m); });
  }
  return y;
}

// Computes a hidden layer and the first 16 columns, of which 8 * Eights are used, of the last layer that follows it.
// The hidden layer is never held as a whole, which saves registers.
template <int Width, int Eights, int M, int In, typename Weights>
__device__ __forceinline__ Panel<M> last_two_layers(const Activations<M, In>& x, const Weights& hidden,
                                                    const Weights& last) {
  Panel<M> result{};
  const auto last_tiles = last.template tiles<false>();
#pragma unroll
  for (int i = 0; i < Width / 16; ++i) {
    const Panel<M> panel = multiply(x, hidden, 16 * i);
    Fragment part[M];
#pragma unroll
    for (int m = 0; m < M; ++m) part[m] = to_half<true>(panel, m);
    multiply_add<Eights>(result, part, last_tiles(0, i));
  }
  return result;
}

}  // namespace voxelfield
