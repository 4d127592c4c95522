// The kernel of `mlp_backward` for the networks of suits_wgmma, on sm_90a.
//
// A block has two warpgroups and takes 128 rows at a time. Each warpgroup follows 64 of them through the layers; the
// input, the activations and the gradients of all 128 rows are in shared memory, as are the weights. Each warpgroup
// sums half of the rows of each weight's gradient in registers over all of the block's rows. These products follow the
// ones that the next layer waits for, so that they fill the time in which gradients are rounded and written.
#pragma once

#include "mlp/backward.cuh"
#include "mlp/network_wgmma.cuh"

namespace voxelfield {

constexpr int kWgmmaBackwardRows = 128, kWgmmaBackwardThreads = 2 * kWarpgroup;

// The contents of shared memory, in order.
template <int Layers>
struct WgmmaMemory {
  static constexpr int kSquare = kWgmmaBackwardRows * kWgmmaWidth * 2, kInput = kWgmmaBackwardRows * kWgmmaInputs * 2;
  static constexpr int kOutput = kWgmmaBackwardRows * wgmma_outputs(Layers) * 2;
  static constexpr int kBytes = WgmmaWeights<Layers>::kBytes + Layers * kSquare + 2 * (kInput + kOutput);
  static_assert(kBytes <= 227 * 1024, "a block has at most 227 KiB on sm_90");

  WgmmaWeights<Layers> weights;
  PanelMatrix<128> spare;  // (row, column)
  unsigned rows;           // of the input and of the output's gradient, for even and for odd turns

  __device__ __forceinline__ explicit WgmmaMemory(unsigned from)
      : weights(from), spare{from + WgmmaWeights<Layers>::kBytes, kSquare / 2}, rows(activations(Layers - 1).address) {}
  // The output of a layer, (row, column). Gradients replace what is no longer needed.
  __device__ __forceinline__ PanelMatrix<128> activations(int l) const {
    return {spare.address + (l + 1) * kSquare, kSquare / 2};
  }
  __device__ __forceinline__ PanelMatrix<64> input(int turn) const {  // (row, column)
    return {rows + turn * (kInput + kOutput), kInput};
  }
  __device__ __forceinline__ PanelMatrix<128> output_gradient(int turn) const {  // (out, row)
    return {input(turn).address + kInput, kOutput / 2};
  }
};

template <int Layers>
__global__ void __launch_bounds__(wgmma_bounds(kWgmmaBackwardThreads), Layers == 2 ? 2 : 1)
    mlp_backward_wgmma_kernel(const __grid_constant__ Mlp mlp, RowCount rows,
                              const __grid_constant__ BackwardPointers pointers) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char operands[];
  constexpr int kSquares = Layers - 2, kEights = wgmma_outputs(Layers) / 8;
  const WgmmaMemory<Layers> shared(shared_address(operands));
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0), lane = lane_of_warp();
  const int group_row = warpgroup * (kWgmmaBackwardRows / 2),
            own = threadIdx.x / kWarp * 16;  // within the block's rows
  const int used = rows.used(), step = gridDim.x * kWgmmaBackwardRows;
  const auto input_at = [&](int row) { return WarpRows<const __half*>(pointers.input, row, used, mlp.input_pitch); };
  const auto grads_at = [&](int row) {
    return WarpRows<const __half*>(pointers.grad_output, row, used, mlp.output_pitch);
  };
  int first = blockIdx.x * kWgmmaBackwardRows + own;
  shared.weights.stage(mlp.network);

  float hidden_sums[kSquares + 1][64] = {}, first_sums[16] = {}, last_sums[kEights][4] = {};
  Fragment tiles[2][1] = {}, output[1] = {};
  const auto load = [&] {
    if (first - own >= used) return;
    load_input(input_at(first), 0, tiles);
    load_output(grads_at(first), 0, Layers > 2 || mlp.few_outputs(), output);
    prefetch<1>(input_at(first + step));
    prefetch<1>(grads_at(first + step));
  };
  load();
  for (int turn = 0; first - own < used; turn ^= 1) {
    const PanelMatrix<64> input = shared.input(turn);
    const PanelMatrix<128> output_gradient = shared.output_gradient(turn);
#pragma unroll
    for (int k = 0; k < 2; ++k) store_matrices(input.fragment(own, 16 * k), tiles[k][0]);
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      store_transposed(output_gradient.at(8 * i + lane % 8, own + lane / 8 % 2 * 8), output[0].part[2 * i],
                       output[0].part[2 * i + 1]);
    }

    float sums[64];
    const auto keep = [&](const PanelMatrix<128>& to, auto&& convert) {
#pragma unroll
      for (int i = 0; i < kWgmmaWidth / 16; ++i) {
        store_matrices(to.fragment(own, 16 * i), convert(panel_of(sums, i), i));
      }
      publish_operands();
    };
    const auto keep_activations = [&](int l) {
      wait_for_products<0>(sums);
      keep(shared.activations(l), [](const Panel<1>& panel, int) { return to_half<true>(panel, 0); });
    };
    begin_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      warpgroup_multiply<kAlongColumns>(sums, tiles[k][0], shared.weights.first.along_columns(0, k), k == 0);
    }
    end_products();
    keep_activations(0);
#pragma unroll
    for (int l = 1; l <= kSquares; ++l) {
      synchronize_warpgroup(warpgroup);
      begin_products();
#pragma unroll
      for (int k = 0; k < kWgmmaWidth / 16; ++k) {
        warpgroup_multiply<kAlongColumns, kAlongColumns>(sums, shared.activations(l - 1).along_columns(group_row, k),
                                                         shared.weights.hidden(l).along_columns(0, k), k == 0);
      }
      end_products();
      keep_activations(l);
    }
    __syncthreads();

    // The gradient of each layer's input, and then of its weights.
    const auto keep_gradients = [&](int l, const PanelMatrix<128>& to) {
      wait_for_products<1>(sums);
      keep(to, [&](const Panel<1>& panel, int i) {
        const Fragment activation = load_matrices(shared.activations(l).fragment(own, 16 * i));
        return where_positive(activation, to_half(panel, 0));
      });
    };
    begin_products();
    warpgroup_multiply<kAlongRows>(sums, output[0], shared.weights.last.along_rows(0), true);
    end_products();
#pragma unroll
    for (int k = 0; k < kWgmmaBackwardRows / 16; ++k) {
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        warpgroup_multiply<kAlongRows, kAlongColumns>(last_sums[i],
                                                      shared.activations(kSquares).along_rows(k, warpgroup),
                                                      output_gradient.along_columns(8 * i, k), false);
      }
    }
    end_products();
    keep_gradients(kSquares, shared.spare);
#pragma unroll
    for (int i = 0; i < kEights; ++i) wait_for_products<0>(last_sums[i]);
    __syncthreads();
#pragma unroll
    for (int l = kSquares; l > 0; --l) {
      const PanelMatrix<128> leaving = l == 2 ? shared.spare : shared.activations(2);
      begin_products();
#pragma unroll
      for (int k = 0; k < kWgmmaWidth / 16; ++k) {
        warpgroup_multiply<kAlongColumns, kAlongRows>(sums, leaving.along_columns(group_row, k),
                                                      shared.weights.hidden(l).along_rows(k), k == 0);
      }
      end_products();
#pragma unroll
      for (int k = 0; k < kWgmmaBackwardRows / 16; ++k) {
        warpgroup_multiply<kAlongRows, kAlongRows>(hidden_sums[l], leaving.along_rows(k, warpgroup),
                                                   shared.activations(l - 1).along_rows(k), false);
      }
      end_products();
      keep_gradients(l - 1, l == 2 ? shared.activations(2) : shared.spare);
      wait_for_products<0>(hidden_sums[l]);
      __syncthreads();
    }

    float input_gradient[16];
    begin_products();
#pragma unroll
    for (int k = 0; k < kWgmmaWidth / 16; ++k) {
      warpgroup_multiply<kAlongColumns, kAlongRows>(input_gradient, shared.spare.along_columns(group_row, k),
                                                    shared.weights.first.along_rows(k), k == 0);
    }
    end_products();
#pragma unroll
    for (int k = 0; k < kWgmmaBackwardRows / 16; ++k) {
      warpgroup_multiply<kAlongRows, kAlongRows>(first_sums, shared.spare.along_rows(k, warpgroup), input.along_rows(k),
                                                 false);
    }
    end_products();
    wait_for_products<1>(input_gradient);
    const WarpRows<__half*> to(pointers.grad_input, first, used, mlp.input_pitch);
    if (first + 16 > used) {
      clear_rows<1>(WarpRows<__half*>(pointers.grad_input, first, rows.capacity, mlp.input_pitch));
      __syncwarp();
    }
    first += step;
    load();
    const Fragment gradient[2][1] = {{to_half(panel_of(input_gradient, 0), 0)},
                                     {to_half(panel_of(input_gradient, 1), 0)}};
    store_input(gradient, to, 0);
  }
  wait_for_products<0>(first_sums);
  for (; first - own < rows.capacity; first += step) {
    clear_rows<1>(WarpRows<__half*>(pointers.grad_input, first, rows.capacity, mlp.input_pitch));
  }

  // In the order of mlp_reduce_kernel: a weight block's vectors are those of fragments of 16 x 8 numbers.
  float4* const partial =
      pointers.partial + static_cast<int64_t>(blockIdx.x) * mlp.weight_blocks() * kWeightBlockVectors;
  const int across = kWgmmaWidth / kWeightBlock, row_block = own / kWeightBlock, half = own / 16 % 2;
  const auto write = [&](const float* sums, int columns, int block) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      partial[(block + i / 4) * kWeightBlockVectors + (4 * half + i % 4) * kWarp + lane] =
          make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  };
  write(first_sums, kWgmmaInputs, row_block);
#pragma unroll
  for (int l = 1; l <= kSquares; ++l) {
    write(hidden_sums[l], kWgmmaWidth, across + ((l - 1) * across + row_block) * across);
  }
  // The last layer's sums are transposed, and only its first rows have any.
  float4* const last = partial + (across + kSquares * across * across) * kWeightBlockVectors;
  for (int i = threadIdx.x; i < across * kWeightBlockVectors; i += kWgmmaBackwardThreads) last[i] = float4{};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4 * kEights; ++i) {
    const int in = own + lane / 4 + i / 2 % 2 * 8, out = lane % 4 * 2 + i % 2;
    const int vector = in / kWeightBlock * kWeightBlockVectors + in % kWeightBlock / 8 * kWarp + out * 4 + in % 8 / 2;
    reinterpret_cast<float*>(last + vector)[i / 4 * 2 + in % 2] = last_sums[i / 4][i % 4];
  }
#endif
}

}  // namespace voxelfield
