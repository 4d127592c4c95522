// The multilayer perceptron on the CPU. Nearly all of the time is spent in matrix products, for which torch has a
// library that is tuned for every processor.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstring>

#include "common/backend.h"
#include "common/narrow.h"
#include "mlp/network_inputs.h"

namespace voxelfield {
namespace {

constexpr int64_t kNumbersPerTask = 1 << 15;

// The number, or zero unless `condition`. 16-bit numbers are selected by their bits, because compilers would otherwise
// branch.
template <typename scalar_t>
VOXELFIELD_HOST_DEVICE scalar_t where(bool condition, scalar_t x) {
  if constexpr (sizeof(scalar_t) == 2) {
    x.x = condition ? x.x : 0;
  } else {
    x = condition ? x : 0;
  }
  return x;
}

// With kRelu, keeps numbers where their activation is not negative, so that NaN stays NaN; otherwise where it is
// positive, as the gradient of a ReLU.
template <bool kRelu, typename scalar_t>
VOXELFIELD_MULTIVERSION void mask_range(const scalar_t* activations, scalar_t* numbers, int64_t begin, int64_t end) {
  VOXELFIELD_VECTORIZE
  for (int64_t i = begin; i < end; ++i) {
    const auto activation = widen(activations[i]);
    numbers[i] = where(kRelu ? !(activation < 0) : activation > 0, numbers[i]);
  }
}

template <bool kRelu>
void mask(const Tensor& activations, Tensor& numbers) {
  dispatch_floating(numbers.scalar_type(), "input", [&](auto zero) {
    using scalar_t = decltype(zero);
    const scalar_t* activation = data_of(activations);
    scalar_t* number = data_of(numbers);
    for_each_range(numbers.numel(), kNumbersPerTask,
                   [&](int64_t begin, int64_t end) { mask_range<kRelu>(activation, number, begin, end); });
  });
}

// out = a b. Calls the kernel itself, because autocast would change the dtype.
void multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

Tensor transposed(const Tensor& x) { return torch::stable::transpose(x, 0, 1); }

Tensor first_rows(Tensor x, int64_t rows) { return torch::stable::narrow(x, 0, 0, rows); }

void clear_rows(Tensor& x, int64_t first) {
  const int64_t bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  std::memset(static_cast<char*>(x.mutable_data_ptr()) + first * bytes, 0, (x.size(0) - first) * bytes);
}

// The arguments: only the rows in use, and weights in the dtype of the input.
struct Mlp {
  Tensor input;
  std::vector<Tensor> weights;
  int64_t capacity, used;

  Mlp(const Tensor& any_input, const std::vector<Tensor>& any_weights, const OptionalTensor& count)
      : capacity(any_input.dim() == 2 ? any_input.size(0) : 0), used(capacity) {
    const ScalarType dtype = any_input.scalar_type();
    check_tensor("input", any_input, {kAny, kAny}, dtype, any_input);
    check_floating("input", any_input);
    for (const Tensor& own :
         checked_weights("weights", any_weights, any_input.size(1), kMaxWidth, kMaxLayers, any_input)) {
      VOXELFIELD_CHECK_TYPE(own.scalar_type() == dtype || own.scalar_type() == opmath_type(any_input),
                            "weights[0] must be ", dtype_name(dtype), " or ", dtype_name(opmath_type(any_input)),
                            " for ", dtype_name(dtype), " input, got ", dtype_name(own.scalar_type()));
      weights.push_back(torch::stable::to(own, dtype));
    }
    if (count.has_value()) {
      const bool wide = count->scalar_type() != ScalarType::Int;
      const TensorData number = checked_count(*count, any_input);
      const int64_t rows = wide ? *static_cast<const int64_t*>(number) : *static_cast<const int32_t*>(number);
      used = std::clamp<int64_t>(rows, 0, capacity);
    }
    input = first_rows(any_input, used);
  }

  int last() const { return static_cast<int>(weights.size()) - 1; }

  std::vector<Tensor> entering() const {
    std::vector<Tensor> inputs{input};
    for (int l = 0; l < last(); ++l) {
      Tensor hidden = new_like(input, {used, weights[l].size(0)});
      multiply(inputs[l], transposed(weights[l]), hidden);
      mask<true>(hidden, hidden);
      inputs.push_back(hidden);
    }
    return inputs;
  }
};

Tensor mlp_forward(const Tensor& input, std::vector<Tensor> weights, const OptionalTensor& count) {
  const Mlp mlp(input, weights, count);
  const Tensor& matrix = mlp.weights[mlp.last()];
  Tensor output = new_like(input, {mlp.capacity, matrix.size(0)});
  multiply(mlp.entering().back(), transposed(matrix), first_rows(output, mlp.used));
  clear_rows(output, mlp.used);
  return output;
}

std::tuple<Tensor, std::vector<Tensor>> mlp_backward(const Tensor& grad_output, const Tensor& input,
                                                     std::vector<Tensor> weights, const OptionalTensor& count) {
  const Mlp mlp(input, weights, count);
  const ScalarType dtype = input.scalar_type(), wide = opmath_type(input);
  check_tensor("grad_output", grad_output, {mlp.capacity, mlp.weights[mlp.last()].size(0)}, dtype, input);
  const std::vector<Tensor> entering = mlp.entering();
  Tensor grad_input = new_like(input, {mlp.capacity, input.size(1)});
  std::vector<Tensor> sums(mlp.weights.size());
  Tensor grad = first_rows(grad_output, mlp.used);
  for (int l = mlp.last(); l >= 0; --l) {
    const int64_t rows = mlp.weights[l].size(0), columns = mlp.weights[l].size(1);
    sums[l] = new_empty(input, {rows, columns}, wide);
    multiply(transposed(torch::stable::to(grad, wide)), torch::stable::to(entering[l], wide), sums[l]);
    Tensor next = l > 0 ? new_like(input, {mlp.used, columns}) : first_rows(grad_input, mlp.used);
    multiply(grad, mlp.weights[l], next);
    if (l > 0) mask<false>(entering[l], next);
    grad = next;
  }
  clear_rows(grad_input, mlp.used);
  return {grad_input, sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("mlp", TORCH_BOX(&mlp_forward));
  m.impl("mlp_backward", TORCH_BOX(&mlp_backward));
}

}  // namespace voxelfield
