// Host side of grid_adam_, written once: check the tensors, collect their pointers and call Backend::adam(levels,
// rule).
#pragma once

#include <cstdint>

#include "common/check_tensor.h"
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
    const std::pair<const char*, size_t> lengths[] = {{"exp_avgs", exp_avgs.size()},
                                                      {"exp_avg_sqs", exp_avg_sqs.size()},
                                                      {"grads", grads.size()},
                                                      {"working", working.size()},
                                                      {"lrs", lrs.size()},
                                                      {"steps", steps.size()},
                                                      {"blocks", blocks.size()},
                                                      {"block_counts", block_counts.size()},
                                                      {"channel_rates", channel_rates.size()}};
    for (const auto& [name, length] : lengths) {
      STD_TORCH_CHECK(length == count, name, " must be as long as params, ", count, ", got ", length);
    }
    if (count == 0) return;
    const typename Backend::Guard guard(params[0]);
    std::vector<AdamLevel> levels;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& param = params[i];
      STD_TORCH_CHECK(same_device(param, params[0]), "params must be on one device, got ", device_name(params[0]),
                      " and ", device_name(param));
      AdamLevel level{};
      level.grid = vertex_grid("params", param, blocks[i], block_counts[i]);
      level.param = param.mutable_data_ptr<float>();
      level.exp_avg = data(exp_avgs[i], param, "exp_avgs");
      level.exp_avg_sq = data(exp_avg_sqs[i], param, "exp_avg_sqs");
      level.grad = data(grads[i], param, "grads");
      if (working[i].has_value()) {
        const Tensor& copy = *working[i];
        const bool half = copy.scalar_type() == ScalarType::Half;
        check_contiguous("working", copy, shape_of(param), half ? ScalarType::Half : ScalarType::BFloat16, param);
        level.working_type = half ? WorkingType::kHalf : WorkingType::kBFloat16;
        level.working = copy.mutable_data_ptr();
      }
      check_number("lrs", lrs[i], ScalarType::Float, param);
      level.lr = lrs[i].template const_data_ptr<float>();
      level.counts_in_float = steps[i].scalar_type() == ScalarType::Float;
      check_number("steps", steps[i], level.counts_in_float ? ScalarType::Float : ScalarType::Long, param);
      level.steps = steps[i].const_data_ptr();
      if (channel_rates[i].has_value()) {
        check_contiguous("channel_rates", *channel_rates[i], {param.size(3)}, ScalarType::Float, param);
        level.channel_rates = channel_rates[i]->template const_data_ptr<float>();
      }
      if (param.numel() > 0) levels.push_back(level);
    }
    if (levels.empty()) return;
    Backend::adam(levels, AdamRule::make(beta1, beta2, eps, decay, l2, skip_untouched, clear_grad));
  }

 private:
  static float* data(const Tensor& x, const Tensor& param, const char* name) {
    check_contiguous(name, x, shape_of(param), ScalarType::Float, param);
    return x.mutable_data_ptr<float>();
  }
};

}  // namespace voxelfield
