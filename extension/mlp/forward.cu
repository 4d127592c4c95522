// The forward pass of a multilayer perceptron on CUDA.
#include <algorithm>

#include "mlp/forward.cuh"
#include "mlp/forward_wgmma.cuh"
#include "mlp/mlp_inputs.cuh"

namespace voxelfield {
namespace {

constexpr int kForwardThreads = 256;
constexpr int kForwardRowTiles = 2;

template <template <int, int> class Weights, int Width>
void launch_forward(const ForwardPlan& plan, const MlpInputs& in, const uint4* packed, Tensor& output) {
  const auto kernel =
      mlp_forward_kernel<Weights<Width, 0>, Width, kForwardRowTiles, kForwardThreads, (Width > 64 ? 1 : 2)>;
  const int tiles = (in.rows.capacity + 16 * kForwardRowTiles - 1) / (16 * kForwardRowTiles);
  const int blocks = std::min(tiles, resident_blocks(kernel, kForwardThreads, plan.shared));
  if (blocks == 0) return;
  CudaBackend::launch(kernel, blocks, kForwardThreads, plan.shared, plan.mlp, packed, in.rows, halves(in.input),
                      mutable_halves(output));
}

template <int Layers>
bool launch_if_wgmma(const MlpInputs& in, Tensor& output) {
  const auto kernel = mlp_forward_wgmma_kernel<Layers>;
  constexpr int kBytes = WgmmaWeights<Layers>::kBytes;
  if (!runs_wgmma(kernel, kWgmmaForwardThreads)) return false;
  const int tiles = (in.rows.capacity + 63) / 64;
  const int blocks = std::min(tiles, resident_blocks(kernel, kWgmmaForwardThreads, kBytes));
  if (blocks == 0) return true;
  CudaBackend::launch(kernel, blocks, kWgmmaForwardThreads, kBytes, in.mlp, in.rows, halves(in.input),
                      mutable_halves(output));
  return true;
}

Tensor mlp_forward(const Tensor& input, const std::vector<Tensor>& weights, const std::optional<Tensor>& count) {
  const CudaBackend::Guard guard(input);
  const MlpInputs in(input, weights, count);
  Tensor output = new_empty(in.input, {in.rows.capacity, in.mlp.output_pitch}, ScalarType::Half);
  const int limit = shared_memory_limit();
  const ForwardPlan plan = plan_forward(in.mlp, limit);
  const bool done = suits_wgmma(in.mlp) &&
                    (in.mlp.network.layers == 2 ? launch_if_wgmma<2>(in, output) : launch_if_wgmma<4>(in, output));
  if (!done && plan.staged) {
    dispatch_value<16, 32, 64, 128>(plan.mlp.network.width, [&](auto width) {
      launch_forward<StagedWeights, decltype(width)::value>(plan, in, nullptr, output);
    });
  } else if (!done) {
    static std::once_flag warned;
    warn_of_packed_weights(warned, "mlp", in.mlp.network.staged_bytes(), limit);
    const Tensor packed = pack_weights(plan.mlp.network, in.input, false);
    dispatch_value<64, 128>(plan.mlp.network.width, [&](auto width) {
      launch_forward<PackedWeights, decltype(width)::value>(plan, in, vectors(packed), output);
    });
  }
  return in.mlp.output_pitch == in.mlp.network.out() ? output : repacked(output, in.mlp.network.out());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { m.impl("mlp", TORCH_BOX(&mlp_forward)); }

}  // namespace voxelfield
