// The kernel of `mlp` for the networks of suits_wgmma, on sm_90a. A warpgroup follows 64 rows through the layers. Their
// activations stay in registers: the sums of a product have the layout of the left operand of the next one.
#pragma once

#include "mlp/network_wgmma.cuh"
#include "mlp/rows.cuh"

namespace voxelfield {

constexpr int kWgmmaForwardThreads = 4 * kWarpgroup;

template <int Layers>
__global__ void __launch_bounds__(wgmma_bounds(kWgmmaForwardThreads), 1)
    mlp_forward_wgmma_kernel(const __grid_constant__ Mlp mlp, RowCount rows, const __half* __restrict__ input,
                             __half* __restrict__ output) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char operands[];
  constexpr int kEights = wgmma_outputs(Layers) / 8;
  const WgmmaWeights<Layers> weights(shared_address(operands));
  const int used = rows.used(), warpgroups = kWgmmaForwardThreads / kWarpgroup, step = gridDim.x * warpgroups * 64;
  const int own = threadIdx.x % kWarpgroup / kWarp * 16;  // within the warpgroup's rows
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);
  const auto input_at = [&](int row) { return WarpRows<const __half*>(input, row, used, mlp.input_pitch); };
  int first = (warpgroup * gridDim.x + blockIdx.x) * 64 + own;
  prefetch<1>(input_at(first));
  weights.stage(mlp.network);
  for (; first - own < used; first += step) {
    prefetch<1>(input_at(first + step));
    Fragment tiles[2][1];
    load_input(input_at(first), 0, tiles);
    float sums[64], last_sums[kEights][4];
    begin_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      warpgroup_multiply<kAlongColumns>(sums, tiles[k][0], weights.first.along_columns(0, k), k == 0);
    }
#pragma unroll
    for (int l = 1; l < Layers; ++l) {
      end_products();
      wait_for_products<0>(sums);
      Fragment hidden[kWgmmaWidth / 16];
#pragma unroll
      for (int i = 0; i < kWgmmaWidth / 16; ++i) hidden[i] = to_half<true>(panel_of(sums, i), 0);
      begin_products();
#pragma unroll
      for (int k = 0; k < kWgmmaWidth / 16; ++k) {
        if (l < Layers - 1) {
          warpgroup_multiply<kAlongColumns>(sums, hidden[k], weights.hidden(l).along_columns(0, k), k == 0);
          continue;
        }
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          warpgroup_multiply<kAlongColumns>(last_sums[i], hidden[k], weights.last.along_columns(8 * i, k), k == 0);
        }
      }
    }
    end_products();
    Fragment tile[1] = {};
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      wait_for_products<0>(last_sums[i]);
      tile[0].part[2 * i] = as_bits(to_half2(last_sums[i][0], last_sums[i][1]));
      tile[0].part[2 * i + 1] = as_bits(to_half2(last_sums[i][2], last_sums[i][3]));
    }
    if (first + 16 > used) {
      clear_rows<1>(WarpRows<__half*>(output, first, rows.capacity, mlp.output_pitch));
      __syncwarp();
    }
    store_output(tile, WarpRows<__half*>(output, first, used, mlp.output_pitch), 0, mlp.few_outputs());
  }
  for (; first - own < rows.capacity; first += step) {
    clear_rows<1>(WarpRows<__half*>(output, first, rows.capacity, mlp.output_pitch));
  }
#endif
}

}  // namespace voxelfield
