// Adam on the CPU: threads take spans of vertices; the loops are written for compilers to vectorise.
#include "common/backend.h"
#include "common/float16_rows.h"
#include "common/multiversion.h"
#include "common/narrow.h"
#include "optim/adam_ops.h"
#include "optim/walk_spans.h"

namespace voxelfield {
namespace {

VOXELFIELD_MULTIVERSION void update_values(const AdamRule& rule, const AdamStep& step, const float* grad, float* param,
                                           float* exp_avg, float* exp_avg_sq, int64_t count) {
  const AdamRule r = rule;
  const AdamStep s = step;
  VOXELFIELD_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    float p = param[i], m = exp_avg[i], v = exp_avg_sq[i];
    adam_update(r, s, grad[i], p, m, v);
    param[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
  }
}

VOXELFIELD_MULTIVERSION void update_by_channel(const AdamRule& rule, const AdamStep& step, const float* rates,
                                               const float* grad, float* param, float* exp_avg, float* exp_avg_sq,
                                               int64_t vertices, int64_t channels) {
  const AdamRule r = rule;
  const AdamStep s = step;
  for (int64_t first = 0; first < vertices * channels; first += channels) {
    VOXELFIELD_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t i = first + c;
      float p = param[i], m = exp_avg[i], v = exp_avg_sq[i];
      adam_update(r, s.times(rates[c]), grad[i], p, m, v);
      param[i] = p;
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
    }
  }
}

VOXELFIELD_MULTIVERSION void round_values(const float* values, BFloat16* rounded, int64_t count) {
  VOXELFIELD_VECTORIZE
  for (int64_t i = 0; i < count; ++i) rounded[i] = Narrow<BFloat16>::from(values[i]);
}

void update_span(const AdamLevel& level, const AdamRule& rule, const AdamStep& step, int64_t first, int64_t count) {
  const int64_t at = first * level.grid.channels, values = count * level.grid.channels;
  const float* grad = level.grad + at;
  float *param = level.param + at, *exp_avg = level.exp_avg + at, *exp_avg_sq = level.exp_avg_sq + at;
  if (level.channel_rates == nullptr) {
    update_values(rule, step, grad, param, exp_avg, exp_avg_sq, values);
  } else {
    update_by_channel(rule, step, level.channel_rates, grad, param, exp_avg, exp_avg_sq, count, level.grid.channels);
  }
  if (rule.clear_grad) std::fill_n(level.grad + at, values, 0.0f);
  if (level.working_type == WorkingType::kHalf) {
    float16_rows.narrow(level.param + at, values, static_cast<Half*>(level.working) + at);
  } else if (level.working_type == WorkingType::kBFloat16) {
    round_values(level.param + at, static_cast<BFloat16*>(level.working) + at, values);
  }
}

// Updates each run of consecutive touched vertices in a span.
void update_touched(const AdamLevel& level, const AdamRule& rule, const AdamStep& step, int64_t first, int64_t count) {
  const int64_t channels = level.grid.channels;
  const auto touched = [&](int64_t vertex) {
    const float* grad = level.grad + vertex * channels;
    return std::any_of(grad, grad + channels, [](float x) { return x != 0.0f; });
  };
  const int64_t last = first + count;
  for (int64_t begin = first; begin < last; ++begin) {
    if (!touched(begin)) continue;
    int64_t end = begin + 1;
    while (end < last && touched(end)) ++end;
    update_span(level, rule, step, begin, end - begin);
    begin = end;
  }
}

struct Cpu : CpuBackend {
  static void adam(const std::vector<AdamLevel>& levels, const AdamRule& rule) {
    for (const AdamLevel& level : levels) {
      const AdamStep step = level.step(rule);
      const auto update = rule.skip_untouched ? update_touched : update_span;
      for_each_span(level.grid, [&](int64_t first, int64_t count) { update(level, rule, step, first, count); });
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { m.impl("grid_adam_", TORCH_BOX(&GridAdamOps<Cpu>::grid_adam_)); }

}  // namespace voxelfield
