// The gradients of a multilayer perceptron on CUDA: distributes the work over warps and launches.
#include "mlp/backward.cuh"
#include "mlp/backward_wgmma.cuh"
#include "mlp/mlp_inputs.cuh"

namespace voxelfield {
namespace {

// The distribution of the weight blocks of a network over the warps of a block and over launches.
struct WeightBlockShares {
  int weight_blocks, per_warp, launches, per_launch;

  explicit WeightBlockShares(const BackwardPlan& plan) : weight_blocks(plan.mlp.weight_blocks()) {
    per_warp = (weight_blocks + plan.warps() - 1) / plan.warps();
    const int max_weight_blocks =
        plan.row_tiles() == 1 ? kMaxWeightBlocks : max_weight_blocks_of_two_row_tiles(plan.mlp.network.width);
    launches = (per_warp + max_weight_blocks - 1) / max_weight_blocks;
    per_launch = (weight_blocks + launches - 1) / launches;
  }
  int at_once() const { return (per_warp + launches - 1) / launches; }
};

template <template <int, int> class Weights, int Width, int RowTiles, int WeightBlocks>
void launch_backward(const BackwardPlan& plan, const WeightBlockShares& shares, const MlpInputs& in,
                     BackwardPointers pointers, const MlpGradients& sums) {
  const auto kernel = mlp_backward_kernel<Weights<Width, 0>, Width, RowTiles, WeightBlocks>;
  const int warps = plan.warps(), weight_blocks = shares.weight_blocks, layers = plan.mlp.network.layers;
  const int tiles = std::max((in.rows.capacity + plan.rows() - 1) / plan.rows(), 1);
  const int blocks = std::min(tiles, resident_blocks(kernel, warps * kWarp, plan.shared));
  const int splits = WeightBlocks == kMaxWeightBlocks ? 1 : std::max(warps / weight_blocks, 1);
  const Tensor partial =
      new_empty(in.input, {blocks * splits, weight_blocks, kWeightBlock * kWeightBlock}, ScalarType::Float);
  MlpLaunch launch{};
  launch.weight_blocks = weight_blocks;
  launch.splits = splits;
  launch.first_signs = WeightBlock(plan.mlp, shares.per_launch - 1).layer + 1;
  launch.tiles = tiles * warps * RowTiles;
  const int64_t layers_with_signs = layers - launch.first_signs;  // zero if there is only one launch
  Tensor signs = new_empty(in.input, {layers_with_signs, launch.tiles, Signs<Width>::kWords, kWarp}, ScalarType::Int);
  launch.signs = reinterpret_cast<unsigned*>(signs.mutable_data_ptr<int32_t>());
  pointers.partial = reinterpret_cast<float4*>(partial.mutable_data_ptr<float>());
  constexpr int64_t kStoredInts = 4 * StoredActivations<Width, RowTiles>::kVectors;
  Tensor activations =
      new_empty(in.input, {plan.staged() ? 0 : blocks * warps, layers - 1, kStoredInts}, ScalarType::Int);
  pointers.activations = reinterpret_cast<uint4*>(activations.mutable_data_ptr<int32_t>());
  __half* const grad_input = pointers.grad_input;
  for (int index = shares.launches - 1; index >= 0; --index) {
    launch.first_weight_block = index * shares.per_launch;
    launch.end_weight_block = std::min(launch.first_weight_block + shares.per_launch, weight_blocks);
    launch.writes_signs = index == shares.launches - 1;
    pointers.grad_input = index == 0 ? grad_input : nullptr;
    CudaBackend::launch(kernel, blocks, warps * kWarp, plan.shared, plan, in.rows, pointers, launch);
  }
  CudaBackend::launch(mlp_reduce_kernel, weight_blocks * kWeightBlockVectors / kReduceVectors, kReduceThreads, 0,
                      plan.mlp, pointers.partial, blocks * splits, weight_blocks, sums);
}

template <int Layers>
bool launch_if_wgmma(const MlpInputs& in, BackwardPointers pointers, const MlpGradients& sums) {
  const int tiles = std::max((in.rows.capacity + kWgmmaBackwardRows - 1) / kWgmmaBackwardRows, 1),
            shared = WgmmaMemory<Layers>::kBytes;
  const auto kernel = mlp_backward_wgmma_kernel<Layers>;
  if (!runs_wgmma(kernel, kWgmmaBackwardThreads)) return false;
  const int blocks = std::min(tiles, resident_blocks(kernel, kWgmmaBackwardThreads, shared));
  const int weight_blocks = in.mlp.weight_blocks();
  const Tensor partial = new_empty(in.input, {blocks, weight_blocks, kWeightBlock * kWeightBlock}, ScalarType::Float);
  pointers.partial = reinterpret_cast<float4*>(partial.mutable_data_ptr<float>());
  CudaBackend::launch(kernel, blocks, kWgmmaBackwardThreads, shared, in.mlp, in.rows, pointers);
  CudaBackend::launch(mlp_reduce_kernel, weight_blocks * kWeightBlockVectors / kReduceVectors, kReduceThreads, 0,
                      in.mlp, pointers.partial, blocks, weight_blocks, sums);
  return true;
}

void launch_planned_backward(const MlpInputs& in, BackwardPointers pointers, const MlpGradients& sums) {
  const int limit = shared_memory_limit();
  const BackwardPlan plan = plan_backward(in.mlp, limit);
  STD_TORCH_CHECK(plan.strips > 0, "mlp: the gradient takes at least ",
                  BackwardPlan{plan.mlp, plan.residency, 1, 0}.bytes(), " bytes of shared memory a block; ", limit,
                  " are allowed");
  const WeightBlockShares shares(plan);
  if (plan.staged()) {
    dispatch_value<16, 32, 64, 128>(plan.mlp.network.width, [&](auto padded) {
      constexpr int kWidth = decltype(padded)::value;
      if constexpr (kWidth <= 64) {
        if (plan.row_tiles() == 2) {
          return dispatch_value<1, 2, max_weight_blocks_of_two_row_tiles(kWidth)>(
              shares.at_once(), [&](auto weight_blocks) {
                launch_backward<StagedWeights, kWidth, 2, decltype(weight_blocks)::value>(plan, shares, in, pointers,
                                                                                          sums);
              });
        }
      }
      if constexpr (kWidth == 64)
        launch_backward<StagedWeights, kWidth, 1, kMaxWeightBlocks>(plan, shares, in, pointers, sums);
      if constexpr (kWidth == 128) {
        dispatch_value<1, 2, 3, kMaxWeightBlocks>(shares.at_once(), [&](auto weight_blocks) {
          launch_backward<StagedWeights, kWidth, 1, decltype(weight_blocks)::value>(plan, shares, in, pointers, sums);
        });
      }
    });
  } else {
    static std::once_flag warned;
    const int wanted =
        BackwardPlan{in.mlp, Residency::kReplaced, kBackwardRows / strip_rows(in.mlp.network.width), 0}.bytes();
    warn_of_packed_weights(warned, "mlp_backward", wanted, limit);
    const Tensor packed = pack_weights(plan.mlp.network, in.input, true);
    pointers.packed = vectors(packed);
    dispatch_value<64, 128>(plan.mlp.network.width, [&](auto padded) {
      constexpr int kWidth = decltype(padded)::value;
      dispatch_value<(kWidth == 64 ? kMaxWeightBlocks : 3), kMaxWeightBlocks>(
          shares.at_once(), [&](auto weight_blocks) {
            launch_backward<PackedWeights, kWidth, 1, decltype(weight_blocks)::value>(plan, shares, in, pointers, sums);
          });
    });
  }
}

std::tuple<Tensor, std::vector<Tensor>> mlp_backward(const Tensor& grad_output, const Tensor& input,
                                                     const std::vector<Tensor>& weights, const OptionalTensor& count) {
  const CudaBackend::Guard guard(input);
  const MlpInputs in(input, weights, count);
  const Network& network = in.mlp.network;
  check_tensor("grad_output", grad_output, {in.rows.capacity, network.out()}, ScalarType::Half, in.input);
  const Tensor grads = by_vectors(grad_output, in.mlp.output_pitch, in.mlp.few_outputs() ? 1 : kOutputWidth);
  Tensor grad_input = new_empty(in.input, {in.rows.capacity, in.mlp.input_pitch}, ScalarType::Half);
  std::vector<Tensor> grad_weights;
  MlpGradients sums{};
  BackwardPointers pointers{};
  pointers.grad_output = halves(grads);
  pointers.input = halves(in.input);
  pointers.grad_input = mutable_halves(grad_input);
  for (int l = 0; l < network.layers; ++l) {
    grad_weights.push_back(new_empty(in.input, {network.layer[l].out, network.layer[l].in}, ScalarType::Float));
    sums.layer[l] = grad_weights[l].mutable_data_ptr<float>();
  }
  const bool done = suits_wgmma(in.mlp) && (network.layers == 2 ? launch_if_wgmma<2>(in, pointers, sums)
                                                                : launch_if_wgmma<4>(in, pointers, sums));
  if (!done) launch_planned_backward(in, pointers, sums);
  if (in.mlp.input_pitch != network.in()) grad_input = repacked(grad_input, network.in());
  return {grad_input, grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { m.impl("mlp_backward", TORCH_BOX(&mlp_backward)); }

}  // namespace voxelfield
