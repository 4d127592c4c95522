// Adam's update (Kingma and Ba 2015) of one value: the only copy of the formula, for host and device.
#pragma once

#include <cmath>

#include "common/platform.h"

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

  static AdamRule make(double beta1, double beta2, double eps, double decay, double l2, bool skip_untouched,
                       bool clear_grad) {
    return {std::log(beta1),
            std::log(beta2),
            static_cast<float>(1 - beta1),
            static_cast<float>(1 - beta2),
            static_cast<float>(beta2),
            static_cast<float>(eps),
            static_cast<float>(decay),
            static_cast<float>(l2),
            skip_untouched,
            clear_grad};
  }
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

}  // namespace voxelfield
