// What both kernels on wgmma share. They serve the default networks: at most 32 inputs, hidden layers of 128 (or padded
// to that), and four layers with at most 8 outputs (colour) or two layers with at most 16 (density and geometry).
#pragma once

#include "common/backend.cuh"
#include "mlp/plan.h"
#include "mlp/wgmma.cuh"

namespace voxelfield {

constexpr int kWgmmaWidth = 128, kWgmmaInputs = 32;

// The number of outputs for which kernels of a number of layers have room.
constexpr int wgmma_outputs(int layers) { return layers == 2 ? kOutputGroup : kFewOutputs; }

inline bool suits_wgmma(const Mlp& mlp) {
  const Network& network = mlp.network;
  return (network.layers == 2 || network.layers == 4) && network.width == kWgmmaWidth &&
         network.padded_in == kWgmmaInputs && network.out() <= wgmma_outputs(network.layers);
}

// The largest block of a kernel on wgmma. Where there is no wgmma, the kernel is empty, and the bound tells the host
// so.
VOXELFIELD_HOST_DEVICE constexpr int wgmma_bounds(int threads) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return kWarp;
#else
  return threads;
#endif
}

// Whether the current device runs a kernel on wgmma. The GPUs that VOXELFIELD_SHARED_MEMORY_LIMIT imitates have none.
template <typename Kernel>
bool runs_wgmma(Kernel* kernel, int threads) {
  const auto address = reinterpret_cast<const void*>(kernel);
  return shared_memory_cap() == std::numeric_limits<int>::max() &&
         threads == cached_query(address, -1, 0, [&] {
           cudaFuncAttributes attributes{};
           check_cuda(cudaFuncGetAttributes(&attributes, address));
           return attributes.maxThreadsPerBlock;
         });
}

// The weights in shared memory, (out, in) each.
template <int Layers>
struct WgmmaWeights {
  static constexpr int kSquare = kWgmmaWidth * kWgmmaWidth * 2, kFirst = kWgmmaWidth * kWgmmaInputs * 2;
  static constexpr int kLast = kOutputGroup * kWgmmaWidth * 2, kBytes = (Layers - 2) * kSquare + kFirst + kLast;

  PanelMatrix<64> first;
  PanelMatrix<128> last;

  __device__ __forceinline__ explicit WgmmaWeights(unsigned from)
      : first{from, kFirst}, last{from + kFirst, kLast / 2} {}

  __device__ __forceinline__ PanelMatrix<128> hidden(int l) const {  // neither the first layer nor the last one
    return {last.address + kLast + (l - 1) * kSquare, kSquare / 2};
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // Must be called by the whole block. Products may read the weights afterwards.
  __device__ __forceinline__ void stage(const Network& network) const {
    const auto stage_all = [&](auto zero) {
      using weight_t = decltype(zero);
      stage_layer<weight_t>(network, 0, first);
      for (int l = 1; l < Layers - 1; ++l) stage_layer<weight_t>(network, l, hidden(l));
      stage_layer<weight_t>(network, Layers - 1, last);
    };
    network.float_weights ? stage_all(0.0f) : stage_all(__half{});
    publish_operands();
    __syncthreads();
  }
#endif
};

// 16 columns of the sums of a warp's rows.
template <int N>
__device__ __forceinline__ Panel<1> panel_of(const float (&sums)[N], int i) {
  Panel<1> panel;
#pragma unroll
  for (int k = 0; k < 8; ++k) panel.sum[0][k / 4][k % 4] = sums[8 * i + k];
  return panel;
}

}  // namespace voxelfield
