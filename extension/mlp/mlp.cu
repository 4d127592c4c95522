// A multilayer perceptron on CUDA, fused: checks, and how a network is laid out over warps and shared memory.
#include <algorithm>

#include "common/backend.cuh"
#include "common/launch.cuh"
#include "mlp/mlp_kernels.cuh"

namespace voxelfield {
namespace {

using torch::headeronly::Half;

constexpr int kForwardThreads = 256;
// Rows that a warp takes at once, in tiles of 16, and what a block's warps come to, for hidden layers of a width.
template <int Width>
constexpr int kBackwardTiles = Width > 64 ? 1 : 2;
template <int Width>
constexpr int kBackwardWarps = Width > 64 ? 8 : 4;
// Registers limit how many units of the weights' gradients a warp can hold; more units take more launches.
template <int Width>
constexpr int kMostUnits = Width >= 64 ? 4 : 2;

template <typename F>
void dispatch_width(int width, const F& f) {
  switch (width) {
    case 16: return f(std::integral_constant<int, 16>{});
    case 32: return f(std::integral_constant<int, 32>{});
    case 64: return f(std::integral_constant<int, 64>{});
    default: return f(std::integral_constant<int, 128>{});
  }
}

template <int Most, typename F>
void dispatch_units(int units, const F& f) {
  if constexpr (Most > 1) {
    if (units < Most) return dispatch_units<Most - 1>(units, f);
  }
  f(std::integral_constant<int, Most>{});
}

const __half* halves(const Tensor& x) { return reinterpret_cast<const __half*>(x.const_data_ptr<Half>()); }
__half* mutable_halves(Tensor& x) { return reinterpret_cast<__half*>(x.mutable_data_ptr<Half>()); }

// The same rows with so many columns: cut off, or zeros.
Tensor repacked(const Tensor& x, int64_t columns) {
  const int64_t rows = x.size(0);
  Tensor packed = new_empty(x, {rows, columns}, ScalarType::Half);
  if (packed.numel() == 0) return packed;
  repack_kernel<<<CudaBackend::blocks(packed.numel(), 256), 256, 0, CudaBackend::stream()>>>(
      halves(x), static_cast<int>(x.size(1)), mutable_halves(packed), static_cast<int>(columns), rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return packed;
}

// Rows that can be read by vectors of a width: a copy where they are not.
Tensor by_vectors(const Tensor& x, int64_t pitch, int width) {
  const Tensor dense = as_contiguous(x);
  if (pitch == dense.size(1) && reinterpret_cast<uintptr_t>(halves(dense)) % (2 * width) == 0) return dense;
  return repacked(dense, pitch);
}

// Contiguous arguments, and the kernels' view of them.
struct Arguments {
  Tensor input;
  std::vector<Tensor> weights;
  std::optional<Tensor> count;
  Mlp mlp{};
  RowCount rows{};

  Arguments(const Tensor& any_input, const std::vector<Tensor>& any_weights, const std::optional<Tensor>& any_count)
      : count(as_contiguous(any_count)) {
    STD_TORCH_CHECK(any_input.dim() == 2 && any_input.scalar_type() == ScalarType::Half,
                    "mlp: on CUDA input must be a float16 tensor of shape (N, in)");
    const int layers = static_cast<int>(any_weights.size());
    STD_TORCH_CHECK(2 <= layers && layers <= kMostLayers, "mlp: weights must be 2 to ", kMostLayers, " tensors, got ",
                    layers);
    const ScalarType dtype = any_weights[0].scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::Float,
                    "mlp: on CUDA weights must be float16 or float32, got ", torch::headeronly::toString(dtype));
    int64_t columns = any_input.size(1), most = 0;
    for (int l = 0; l < layers; ++l) {
      weights.push_back(as_contiguous(any_weights[l]));
      const Tensor& own = weights[l];
      STD_TORCH_CHECK(
          own.dim() == 2 && own.size(1) == columns && own.scalar_type() == dtype && same_device(own, any_input),
          "mlp: weights[", l, "] must be (out, ", columns, "), of one dtype, on the device of input");
      STD_TORCH_CHECK(1 <= columns && columns <= kMaxWidth && 1 <= own.size(0) && own.size(0) <= kMaxWidth,
                      "mlp: weights[", l, "] must have 1 to ", kMaxWidth, " rows and columns, got ", own.size(0),
                      " and ", columns);
      columns = own.size(0);
      if (l < layers - 1) most = std::max(most, columns);
      mlp.layer[l] = {own.data_ptr(), static_cast<int>(own.size(0)), static_cast<int>(own.size(1))};
    }
    mlp.layers = layers;
    mlp.width = 16;
    while (mlp.width < most) mlp.width *= 2;
    mlp.wide_weights = dtype == ScalarType::Float;
    mlp.input_pitch = round_up(mlp.in(), kInputWidth);
    mlp.output_pitch = mlp.few_outputs() ? mlp.out() : round_up(mlp.out(), kOutputWidth);
    input = by_vectors(any_input, mlp.input_pitch, kInputWidth);
    STD_TORCH_CHECK(input.size(0) <= kMostRows, "mlp: input must have at most ", kMostRows, " rows, got ",
                    input.size(0));
    rows.capacity = static_cast<int>(input.size(0));
    if (count.has_value()) {
      const ScalarType integer = count->scalar_type();
      STD_TORCH_CHECK(count->numel() == 1 && same_device(*count, input) &&
                          (integer == ScalarType::Long || integer == ScalarType::Int),
                      "mlp: count must be one int32 or int64 number on the device of input");
      rows.count = count->data_ptr();
      rows.wide_count = integer == ScalarType::Long;
    }
  }
};

Tensor mlp_forward(const Tensor& input, const std::vector<Tensor>& weights, const std::optional<Tensor>& count) {
  const CudaBackend::Guard guard(input);
  Arguments a(input, weights, count);
  Tensor output = new_empty(a.input, {a.rows.capacity, a.mlp.output_pitch}, ScalarType::Half);
  const int shared = a.mlp.weights_offset(a.mlp.layers);
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  STD_TORCH_CHECK(shared <= most, "mlp: the weights take ", shared, " bytes of shared memory; this device has ", most);
  dispatch_width(a.mlp.width, [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kTiles = 2;
    const auto kernel = mlp_forward_kernel<kWidth, kTiles, kForwardThreads, (kWidth > 64 ? 1 : 2)>;
    const int tiles = (a.rows.capacity + 16 * kTiles - 1) / (16 * kTiles);
    const int blocks = std::min(tiles, resident_blocks(kernel, kForwardThreads, shared));
    if (blocks == 0) return;
    kernel<<<blocks, kForwardThreads, shared, CudaBackend::stream()>>>(a.mlp, a.rows, halves(a.input),
                                                                       mutable_halves(output));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return a.mlp.output_pitch == a.mlp.out() ? output : repacked(output, a.mlp.out());
}

std::tuple<Tensor, std::vector<Tensor>> mlp_backward(const Tensor& grad_output, const Tensor& input,
                                                     const std::vector<Tensor>& weights,
                                                     const std::optional<Tensor>& count) {
  const CudaBackend::Guard guard(input);
  Arguments a(input, weights, count);
  STD_TORCH_CHECK(grad_output.dim() == 2 && grad_output.size(0) == a.rows.capacity &&
                      grad_output.size(1) == a.mlp.out() && grad_output.scalar_type() == ScalarType::Half &&
                      same_device(grad_output, a.input),
                  "mlp: grad_output must be as the output is");
  const Tensor grads = by_vectors(grad_output, a.mlp.output_pitch, a.mlp.few_outputs() ? 1 : kOutputWidth);
  Tensor grad_input = new_empty(a.input, {a.rows.capacity, a.mlp.input_pitch}, ScalarType::Half);
  std::vector<Tensor> grad_weights;
  MlpGradients sums{};
  for (int l = 0; l < a.mlp.layers; ++l) {
    grad_weights.push_back(new_empty(a.input, {a.mlp.layer[l].out, a.mlp.layer[l].in}, ScalarType::Float));
    sums.layer[l] = grad_weights[l].mutable_data_ptr<float>();
  }
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int units = a.mlp.units();
  dispatch_width(a.mlp.width, [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kTiles = kBackwardTiles<kWidth>;
    int warps = kBackwardWarps<kWidth>;
    // Fewer warps would compute the activations more often, for fewer units at once.
    a.mlp.in_place = a.mlp.backward_bytes(16 * kTiles * warps) > most;
    while (warps > 1 && a.mlp.backward_bytes(16 * kTiles * warps) > most) warps /= 2;
    const int shared = a.mlp.backward_bytes(16 * kTiles * warps);
    STD_TORCH_CHECK(shared <= most, "mlp: the gradient takes ", shared, " bytes of shared memory; this device has ",
                    most);
    const int per_warp = (units + warps - 1) / warps,
              launches = (per_warp + kMostUnits<kWidth> - 1) / kMostUnits<kWidth>;
    dispatch_units<kMostUnits<kWidth>>((per_warp + launches - 1) / launches, [&](auto units_at_once) {
      constexpr int kUnits = decltype(units_at_once)::value, kMostThreads = kBackwardWarps<kWidth> * kWarp;
      constexpr int kBlocks = kWidth > 64 ? 1 : kUnits == 1 ? 3 : 2;
      const auto kernel = mlp_backward_kernel<kWidth, kTiles, kUnits, kMostThreads, kBlocks>;
      const int tiles = std::max((a.rows.capacity + 16 * kTiles * warps - 1) / (16 * kTiles * warps), 1);
      const int blocks = std::min(tiles, resident_blocks(kernel, warps * kWarp, shared));
      const int splits = std::max(warps / units, 1);
      const Tensor partial = new_empty(a.input, {blocks * splits, units, kUnit * kUnit}, ScalarType::Float);
      float4* const partial_sums = reinterpret_cast<float4*>(partial.mutable_data_ptr<float>());
      const int per_launch = (units + launches - 1) / launches;
      MlpLaunch launch{.units = units, .splits = splits};
      launch.first_signs = MlpUnit(a.mlp, per_launch - 1).layer + 1;
      launch.tiles = tiles * warps * kTiles;
      const int64_t layers_with_signs = a.mlp.layers - launch.first_signs;  // none if there is one launch
      Tensor signs =
          new_empty(a.input, {layers_with_signs, launch.tiles, Signs<kWidth>::kWords, kWarp}, ScalarType::Int);
      launch.signs = reinterpret_cast<unsigned*>(signs.mutable_data_ptr<int32_t>());
      for (int index = launches - 1; index >= 0; --index) {
        launch.first_unit = index * per_launch;
        launch.end_unit = std::min(launch.first_unit + per_launch, units);
        launch.writes_signs = index == launches - 1;
        kernel<<<blocks, warps * kWarp, shared, CudaBackend::stream()>>>(
            a.mlp, a.rows, halves(grads), halves(a.input), index == 0 ? mutable_halves(grad_input) : nullptr,
            partial_sums, launch);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      }
      mlp_reduce_kernel<<<units * kUnitVectors / kReduceVectors, kReduceThreads, 0, CudaBackend::stream()>>>(
          a.mlp, partial_sums, blocks * splits, units, sums);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  if (a.mlp.input_pitch != a.mlp.in()) grad_input = repacked(grad_input, a.mlp.in());
  return {grad_input, grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("mlp", TORCH_BOX(&mlp_forward));
  m.impl("mlp_backward", TORCH_BOX(&mlp_backward));
}

}  // namespace voxelfield
