// Host side of grid_adam_, written once: check, gather pointers, and hand over to Backend::adam(levels, rule).
#pragma once

#include <cstdint>

#include "common/tensors.h"
#include "optim/adam.h"
#include "optim/vertex_grid.h"

namespace voxelfield {

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
  using OptionalTensors = std::vector<std::optional<Tensor>>;

  static void grid_adam_(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors grads, OptionalTensors working,
                         Tensors lrs, Tensors steps, OptionalTensors blocks, OptionalTensors block_counts,
                         OptionalTensors channel_rates, double beta1, double beta2, double eps, double decay, double l2,
                         bool skip_untouched, bool clear_grad) {
    const size_t count = params.size();
    for (size_t length : {exp_avgs.size(), exp_avg_sqs.size(), grads.size(), working.size(), lrs.size(), steps.size(),
                          blocks.size(), block_counts.size(), channel_rates.size()}) {
      STD_TORCH_CHECK(length == count, "every list must be as long as params, ", count, ", got ", length);
    }
    if (count == 0) return;
    const typename Backend::Guard guard(params[0]);
    std::vector<AdamLevel> levels;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& param = params[i];
      STD_TORCH_CHECK(same_device(param, params[0]), "all grids must be on one device");
      AdamLevel level{};
      level.grid = vertex_grid(param, blocks[i], block_counts[i]);
      level.param = data(param, param, "params");
      level.exp_avg = data(exp_avgs[i], param, "exp_avgs");
      level.exp_avg_sq = data(exp_avg_sqs[i], param, "exp_avg_sqs");
      level.grad = data(grads[i], param, "grads");
      if (working[i].has_value()) {
        const Tensor& copy = *working[i];
        check_array(copy, param, "working");
        STD_TORCH_CHECK(copy.scalar_type() == ScalarType::Half || copy.scalar_type() == ScalarType::BFloat16,
                        "working must be float16 or bfloat16");
        const bool half = copy.scalar_type() == ScalarType::Half;
        level.working_type = half ? WorkingType::kHalf : WorkingType::kBFloat16;
        level.working = copy.mutable_data_ptr();
      }
      STD_TORCH_CHECK(lrs[i].numel() == 1 && lrs[i].scalar_type() == ScalarType::Float && same_device(lrs[i], param),
                      "lrs must be one float32 each, on the grid's device");
      level.lr = lrs[i].template const_data_ptr<float>();
      const ScalarType counter = steps[i].scalar_type();
      STD_TORCH_CHECK(steps[i].numel() == 1 && (counter == ScalarType::Float || counter == ScalarType::Long) &&
                          same_device(steps[i], param),
                      "steps must be one float32 or int64 each, on the grid's device");
      level.counts_in_float = counter == ScalarType::Float;
      level.steps = steps[i].const_data_ptr();
      if (channel_rates[i].has_value()) {
        const Tensor& rates = *channel_rates[i];
        STD_TORCH_CHECK(rates.dim() == 1 && rates.size(0) == param.size(3) && rates.is_contiguous() &&
                            rates.scalar_type() == ScalarType::Float && same_device(rates, param),
                        "channel_rates must be contiguous (C,) float32 each, on the grid's device");
        level.channel_rates = rates.template const_data_ptr<float>();
      }
      if (param.numel() > 0) levels.push_back(level);
    }
    if (levels.empty()) return;
    Backend::adam(levels, AdamRule::make(beta1, beta2, eps, decay, l2, skip_untouched, clear_grad));
  }

 private:
  // In place, so a copy that is contiguous would not do.
  static void check_array(const Tensor& x, const Tensor& param, const char* name) {
    STD_TORCH_CHECK(x.dim() == 4 && x.is_contiguous() && same_device(x, param), name,
                    " must be contiguous (X, Y, Z, C) on the device of params");
    for (int axis = 0; axis < 4; ++axis) {
      STD_TORCH_CHECK(x.size(axis) == param.size(axis), name, " must have the shape of params");
    }
  }

  static float* data(const Tensor& x, const Tensor& param, const char* name) {
    check_array(x, param, name);
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32");
    return x.mutable_data_ptr<float>();
  }
};

}  // namespace voxelfield
