// Adam (Kingma and Ba 2015): the update of one value, the only copy of the formula, and the host side of grid_adam_,
// written once: check the tensors, collect their pointers and call Backend::adam(levels, rule).
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/vertex_grid.h"

namespace voxelfield {

// Options of the optimizer, the same for every value and step.
struct AdamRule {
  double log_beta1, log_beta2;
  float rise1, rise2;  // 1 - beta
  float beta2;
  float eps;
  float decay;  // decoupled weight decay, a fraction of the learning rate
  float l2;     // weight decay by way of the gradient
  bool skip_untouched;
  bool clear_grad;
};

// Factors of one step, the same for every value of a grid.
struct AdamStep {
  float size;  // learning rate over the first moment's bias correction
  float root;  // factor that corrects the bias in the second moment's square root
  float keep;  // factor on the parameter, from decoupled decay

  VOXELFIELD_HOST_DEVICE static AdamStep make(const AdamRule& rule, float lr, double step) {
    // 1 - beta^step is computed by expm1: in early steps, with beta close to 1, the subtraction would lose half the
    // digits.
    const float bias1 = -expm1f(static_cast<float>(step * rule.log_beta1));
    const float bias2 = -expm1f(static_cast<float>(step * rule.log_beta2));
    return {lr / bias1, 1.0f / sqrtf(bias2), 1.0f - lr * rule.decay};
  }

  // The same step at a multiple of the learning rate, which also scales decay. A rate of one gives the same bits,
  // unless decay removes more than half of the parameter.
  VOXELFIELD_HOST_DEVICE AdamStep times(float rate) const { return {size * rate, root, 1.0f - rate * (1.0f - keep)}; }
};

VOXELFIELD_HOST_DEVICE void adam_update(const AdamRule& rule, const AdamStep& step, float grad, float& param,
                                        float& exp_avg, float& exp_avg_sq) {
  grad += rule.l2 * param;
  exp_avg += rule.rise1 * (grad - exp_avg);
  exp_avg_sq = rule.beta2 * exp_avg_sq + rule.rise2 * grad * grad;
  param = step.keep * param - step.size * exp_avg / (sqrtf(exp_avg_sq) * step.root + rule.eps);
}

enum class WorkingType : int32_t { kNone, kHalf, kBFloat16 };

// A grid and what Adam keeps for it. The pointers are those of arrays (X, Y, Z, C).
struct AdamLevel {
  VertexGrid grid;
  float *param, *exp_avg, *exp_avg_sq, *grad;
  void* working;
  WorkingType working_type;
  bool counts_in_float;
  const float* lr;
  const void* steps;
  const float* channel_rates;  // factor on the learning rate of each channel; null: all learn alike

  VOXELFIELD_HOST_DEVICE AdamStep step(const AdamRule& rule) const {
    const double count = counts_in_float ? static_cast<double>(*static_cast<const float*>(steps))
                                         : static_cast<double>(*static_cast<const int64_t*>(steps));
    return AdamStep::make(rule, *lr, count);
  }
};

template <typename Backend>
struct GridAdamOps {
  using Tensors = std::vector<Tensor>;
  using OptionalTensors = std::vector<OptionalTensor>;

  static void grid_adam_(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors grads, OptionalTensors working,
                         Tensors lrs, Tensors steps, OptionalTensors tiles, OptionalTensors tile_counts,
                         OptionalTensors channel_rates, double beta1, double beta2, double eps, double decay, double l2,
                         bool skip_untouched, bool clear_grad) {
    const size_t count = params.size();
    for (const size_t length : {exp_avgs.size(), exp_avg_sqs.size(), grads.size(), working.size(), lrs.size(),
                                steps.size(), tiles.size(), tile_counts.size(), channel_rates.size()}) {
      STD_TORCH_CHECK(length == count, "every list must be as long as params, ", count, ", got ", length);
    }
    if (count == 0) return;
    const typename Backend::Guard guard(params[0]);
    std::vector<AdamLevel> levels;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& param = params[i];
      STD_TORCH_CHECK(same_device(param, params[0]), "params must be on one device, got ", device_name(params[0]),
                      " and ", device_name(param));
      AdamLevel level{};
      level.grid = vertex_grid("params", param, tiles[i], tile_counts[i]);
      const auto floats = [&](const char* name, const Tensor& x) {
        return check_contiguous(name, x, shape_of(param), ScalarType::Float, param);
      };
      level.param = data_of(param);
      level.exp_avg = floats("exp_avgs", exp_avgs[i]);
      level.exp_avg_sq = floats("exp_avg_sqs", exp_avg_sqs[i]);
      level.grad = floats("grads", grads[i]);
      if (working[i].has_value()) {
        const Tensor& copy = *working[i];
        const bool half = copy.scalar_type() == ScalarType::Half;
        check_contiguous("working", copy, shape_of(param), half ? ScalarType::Half : ScalarType::BFloat16, param);
        level.working_type = half ? WorkingType::kHalf : WorkingType::kBFloat16;
        level.working = copy.mutable_data_ptr();
      }
      level.lr = check_number("lrs", lrs[i], ScalarType::Float, param);
      level.counts_in_float = steps[i].scalar_type() == ScalarType::Float;
      check_number("steps", steps[i], level.counts_in_float ? ScalarType::Float : ScalarType::Long, param);
      level.steps = steps[i].const_data_ptr();
      if (channel_rates[i].has_value()) {
        level.channel_rates =
            check_contiguous("channel_rates", *channel_rates[i], {param.size(3)}, ScalarType::Float, param);
      }
      if (param.numel() > 0) levels.push_back(level);
    }
    if (levels.empty()) return;
    const auto narrow = [](double x) { return static_cast<float>(x); };
    Backend::adam(levels, AdamRule{std::log(beta1), std::log(beta2), narrow(1 - beta1), narrow(1 - beta2),
                                   narrow(beta2), narrow(eps), narrow(decay), narrow(l2), skip_untouched, clear_grad});
  }

  static void implement(Library& m) { m.impl("grid_adam_", TORCH_BOX(&GridAdamOps::grid_adam_)); }
};

}  // namespace voxelfield
