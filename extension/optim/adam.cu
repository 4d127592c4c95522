// Adam on CUDA: resident warps walk over the vertices of all grids.
#include "common/backend.cuh"
#include "common/constants.h"
#include "common/vector_width.h"
#include "optim/adam_ops.h"
#include "optim/walk_vertices.cuh"

namespace voxelfield {
namespace {

struct AdamLevels {
  AdamLevel level[kMaxLevels];
  int count;
};

// Updates the vector of values at `at`, the first of which belongs to `channel`.
template <int Width, bool ByChannel>
__device__ __forceinline__ void update_vector(const AdamLevel& level, const AdamRule& rule, const AdamStep& step,
                                              int64_t at, int channel) {
  using Floats = Vector<float, Width>;
  const Floats grad = load<Width>(level.grad + at);
  Floats param = load<Width>(level.param + at);
  Floats exp_avg = load<Width>(level.exp_avg + at);
  Floats exp_avg_sq = load<Width>(level.exp_avg_sq + at);
  [[maybe_unused]] Floats rates;
  if constexpr (ByChannel) rates = load_constant<Width>(level.channel_rates + channel);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    if constexpr (ByChannel) {
      adam_update(rule, step.times(rates.lane[i]), grad.lane[i], param.lane[i], exp_avg.lane[i], exp_avg_sq.lane[i]);
    } else {
      adam_update(rule, step, grad.lane[i], param.lane[i], exp_avg.lane[i], exp_avg_sq.lane[i]);
    }
  }
  store_global(level.param + at, param);
  store_global(level.exp_avg + at, exp_avg);
  store_global(level.exp_avg_sq + at, exp_avg_sq);
  if (rule.clear_grad) store_global(level.grad + at, Floats{});
  if (level.working_type == WorkingType::kHalf) {
    using torch::headeronly::Half;
    store_global(static_cast<Half*>(level.working) + at, narrow<Half>(param));
  } else if (level.working_type == WorkingType::kBFloat16) {
    using torch::headeronly::BFloat16;
    store_global(static_cast<BFloat16*>(level.working) + at, narrow<BFloat16>(param));
  }
}

template <int Width>
__device__ __forceinline__ bool any_nonzero(const Vector<float, Width>& x) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < Width; ++i) any = any || x.lane[i] != 0.0f;
  return any;
}

template <int Width, bool SkipUntouched, bool ByChannel>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ AdamLevels levels, AdamRule rule) {
  __shared__ AdamStep steps[kMaxLevels];
  if (threadIdx.x < levels.count) steps[threadIdx.x] = levels.level[threadIdx.x].step(rule);
  __syncthreads();
  walk_vertices<Width>(
      levels.count, [&](int l) -> const VertexGrid& { return levels.level[l].grid; },
      [&](int l, int64_t visit, int32_t id, const VertexLanes& lanes) {
        const AdamLevel& level = levels.level[l];
        const int64_t vertex = visit < 0 ? -1 : level.grid.index_of_visit(visit, id);
        const int64_t start = vertex * level.grid.channels;
        const int vectors = vertex < 0 ? 0 : lanes.vectors;
        if (SkipUntouched) {
          bool any = false;
          for (int j = lanes.first; j < vectors; j += kWarp) {
            any = any || any_nonzero(load<Width>(level.grad + start + j * Width));
          }
          if ((__ballot_sync(kFullWarp, any) & lanes.peers) == 0) return;
        }
        for (int j = lanes.first; j < vectors; j += kWarp) {
          update_vector<Width, ByChannel>(level, rule, steps[l], start + j * Width, j * Width);
        }
      });
}

template <int Width, bool ByChannel>
void launch(const AdamLevels& levels, const AdamRule& rule, cudaStream_t stream) {
  if (levels.count == 0) return;
  WalkSize size;
  for (int l = 0; l < levels.count; ++l) size.add(levels.level[l].grid, Width);
  if (size.tasks == 0) return;
  const auto kernel = rule.skip_untouched ? adam_kernel<Width, true, ByChannel> : adam_kernel<Width, false, ByChannel>;
  kernel<<<size.thread_blocks(rule.skip_untouched), kThreads, 0, stream>>>(levels, rule);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

int width_of(const AdamLevel& level) {
  return vector_width(4, {level.grid.channels}, level.param, level.exp_avg, level.exp_avg_sq, level.grad,
                      level.channel_rates, static_cast<const uint16_t*>(level.working));
}

// A grid of which every value is updated alike is treated as one row: whole vectors of values, and a remainder.
void append_as_row(const AdamLevel& level, std::vector<AdamLevel>& parts) {
  const int64_t values = level.grid.vertices * level.grid.channels, whole = values / 4 * 4;
  AdamLevel body = level;
  body.grid.channels = 4;
  body.grid.vertices = whole / 4;
  if (whole > 0) parts.push_back(body);
  if (whole == values) return;
  AdamLevel rest = level;
  rest.grid.channels = 1;
  rest.grid.vertices = values - whole;
  for (float** array : {&rest.param, &rest.exp_avg, &rest.exp_avg_sq, &rest.grad}) *array += whole;
  if (rest.working != nullptr) rest.working = static_cast<uint16_t*>(rest.working) + whole;
  parts.push_back(rest);
}

struct Cuda : CudaBackend {
  static void adam(const std::vector<AdamLevel>& levels, const AdamRule& rule) {
    std::vector<AdamLevel> one_rate, by_channel;
    for (const AdamLevel& level : levels) {
      if (level.channel_rates != nullptr) {
        by_channel.push_back(level);
      } else if (level.grid.tiles == nullptr && !rule.skip_untouched) {
        append_as_row(level, one_rate);
      } else {
        one_rate.push_back(level);
      }
    }
    // Separate kernels, so that grids without rates by channel pay nothing for those with them.
    launch_widths<false>(one_rate, rule);
    launch_widths<true>(by_channel, rule);
  }

 private:
  template <bool ByChannel>
  static void launch_widths(const std::vector<AdamLevel>& parts, const AdamRule& rule) {
    launch_width<4, ByChannel>(parts, rule);
    launch_width<2, ByChannel>(parts, rule);
    launch_width<1, ByChannel>(parts, rule);
  }

  // Updates the parts whose widest vector this is.
  template <int Width, bool ByChannel>
  static void launch_width(const std::vector<AdamLevel>& parts, const AdamRule& rule) {
    AdamLevels batch{};
    for (const AdamLevel& part : parts) {
      if (width_of(part) != Width) continue;
      batch.level[batch.count++] = part;
      if (batch.count == kMaxLevels) {
        launch<Width, ByChannel>(batch, rule, stream());
        batch.count = 0;
      }
    }
    launch<Width, ByChannel>(batch, rule, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { m.impl("grid_adam_", TORCH_BOX(&GridAdamOps<Cuda>::grid_adam_)); }

}  // namespace voxelfield
