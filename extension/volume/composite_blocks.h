// Compositing on the CPU. A thread processes its rays one after the other, each in blocks of samples: a loop over the
// block for each step of the computation, which compilers vectorise. Only prefix sums are serial, in groups of four.
#pragma once

#include <algorithm>
#include <functional>

#include "common/narrow.h"
#include "volume/composite_ops.h"

namespace voxelfield {

// exp(x) = power + power * fraction, where power is a power of two.
struct ExpParts {
  float power, fraction;
};

// Has no branches or calls, and is accurate to about one unit in the last place. Below the range of normal numbers,
// x is raised to their smallest one; above the largest number, power is infinite.
VOXELFIELD_HOST_DEVICE ExpParts exp_parts(float x) {
  constexpr float kLowest = -87.33f, kHighest = 89.0f;
  x = x < kLowest ? kLowest : x;  // NaN stays
  x = x > kHighest ? kHighest : x;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the lower bits.
  constexpr float kRounder = 12582912.0f;
  const float rounded = x * 1.44269504088896341f + kRounder;
  const uint32_t exponent = float_to_bits(rounded) - float_to_bits(kRounder) + 127;
  const float n = rounded - kRounder;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // log(2) in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {bits_to_float(exponent << 23), p * (r * r) + r};
}

// exp(-depth). Results below the normal numbers are zero.
VOXELFIELD_HOST_DEVICE float light_behind(float depth) {
  const ExpParts e = exp_parts(-depth);
  const float light = e.power + e.power * e.fraction;
  return depth > 87.33f ? 0.0f : light;
}

VOXELFIELD_HOST_DEVICE double light_behind(double depth) { return std::exp(-depth); }

// 1 - exp(-thickness), without cancellation.
VOXELFIELD_HOST_DEVICE float opacity_of(float thickness) {
  const ExpParts e = exp_parts(-thickness);
  return (1.0f - e.power) - e.power * e.fraction;
}

VOXELFIELD_HOST_DEVICE double opacity_of(double thickness) { return -std::expm1(-thickness); }

constexpr int64_t kBlockSamples = 128;
// Loops over the buffers of a block run over whole groups, so that they have no remainder.
constexpr int64_t kBlockGroup = 16;

template <typename T>
struct alignas(64) BlockBuffer {
  T lane[kBlockSamples];

  VOXELFIELD_HOST_DEVICE T& operator[](int64_t i) { return lane[i]; }
  VOXELFIELD_HOST_DEVICE const T& operator[](int64_t i) const { return lane[i]; }
};

// Stores the sums (or with another `add`, the products) of the values before each one, and returns that of all. The
// count is a multiple of four.
template <typename T, typename Add>
VOXELFIELD_HOST_DEVICE T scan_before(const BlockBuffer<T>& values, int64_t count, T carry, BlockBuffer<T>& before,
                                     const Add& add) {
  for (int64_t k = 0; k < count; k += 4) {
    const T a = values[k], ab = add(a, values[k + 1]), abc = add(ab, values[k + 2]);
    const T cd = add(values[k + 2], values[k + 3]);
    before[k] = carry;
    before[k + 1] = add(carry, a);
    before[k + 2] = add(carry, ab);
    before[k + 3] = add(carry, abc);
    carry = add(carry, add(ab, cd));
  }
  return carry;
}

// The light along a ray, block by block.
template <typename Samples>
class BlockLight {
 public:
  using T = typename Samples::value_t;

  BlockBuffer<T> transmittance, weight;  // zero from the end of the ray on
  int64_t begin = 0, count = 0;          // the samples of the block
  int64_t whole = 0;                     // their number, rounded up to whole groups
  int64_t reached = 0;                   // how many of them come before the end of the ray

  VOXELFIELD_HOST_DEVICE void start(const RaySpan& ray) {
    span_ = ray;
    begin = ray.begin;
    count = whole = reached = 0;
    passed_ = Samples::kAlphas ? T(1) : T(0);
    ended_ = false;
  }

  // Advances to the next block; returns false at the end of the ray.
  VOXELFIELD_HOST_DEVICE bool next(const Samples& samples) {
    if (ended_ || begin + count >= span_.end) return false;
    begin += count;
    count = std::min(span_.end - begin, kBlockSamples);
    whole = (count + kBlockGroup - 1) / kBlockGroup * kBlockGroup;
    absorb(samples);
    const T limit = samples.min_transmittance;
    VOXELFIELD_VECTORIZE
    for (int64_t k = 0; k < whole; ++k) {
      const T light = transmittance[k], absorbed = light * opacity_[k];
      const bool dark = light < limit || light == T(0);
      transmittance[k] = dark ? T(0) : light;
      weight[k] = dark ? T(0) : absorbed;
    }
    reached = count;
    while (reached > 0 && transmittance[reached - 1] == T(0)) --reached;
    return true;
  }

  // Whether the block is the whole ray.
  VOXELFIELD_HOST_DEVICE bool holds_ray() const { return count == span_.end - span_.begin; }

  // The samples of the block from the end of the ray on.
  VOXELFIELD_HOST_DEVICE RaySpan unreached() const { return {begin + reached, begin + count}; }

  // The samples behind the blocks so far.
  VOXELFIELD_HOST_DEVICE RaySpan rest() const { return {begin + count, span_.end}; }

 private:
  BlockBuffer<T> absorbed_, opacity_;
  RaySpan span_;
  T passed_ = 0;  // optical depth, or for alphas transmittance, of the blocks so far
  bool ended_ = false;

  VOXELFIELD_HOST_DEVICE void absorb(const Samples& samples) {
    const T* density = samples.density + begin;
    if constexpr (Samples::kAlphas) {
      VOXELFIELD_VECTORIZE
      for (int64_t k = 0; k < count; ++k) {
        const T open = T(1) - density[k];
        const bool sound = density[k] <= T(1) && density[k] > T(-INFINITY);
        absorbed_[k] = sound ? open : T(1);
        opacity_[k] = sound ? density[k] : T(NAN);
      }
      for (int64_t k = count; k < whole; ++k) absorbed_[k] = 1, opacity_[k] = 0;
      passed_ = scan_before(absorbed_, whole, passed_, transmittance, std::multiplies<T>());
      ended_ = samples.stops(passed_);
    } else {
      const T* dt = samples.dt + begin;
      VOXELFIELD_VECTORIZE
      for (int64_t k = 0; k < count; ++k) {
        const T thickness = density[k] * dt[k];
        const bool sound = density[k] < T(INFINITY) && thickness > T(-INFINITY);
        absorbed_[k] = sound ? thickness : T(0);
        opacity_[k] = sound ? thickness : T(NAN);
      }
      for (int64_t k = count; k < whole; ++k) absorbed_[k] = opacity_[k] = 0;
      passed_ = scan_before(absorbed_, whole, passed_, transmittance, std::plus<T>());
      ended_ = samples.stops(light_behind(passed_));
      VOXELFIELD_VECTORIZE
      for (int64_t k = 0; k < whole; ++k) {
        transmittance[k] = light_behind(transmittance[k]);
        opacity_[k] = opacity_of(opacity_[k]);
      }
    }
  }
};

template <typename Samples>
struct BlockWork {
  using T = typename Samples::value_t;

  BlockLight<Samples> light;
  BlockBuffer<T> at_weight;  // the gradient of each weight
  BlockBuffer<T> share;      // weight (or transmittance) times its gradient
  BlockBuffer<T> before;     // the sum of the shares of the samples before each one
};

// From this number of channels on, the channels of a row are summed side by side; fewer, one after the other.
constexpr int64_t kMinAdjacentChannels = 8;

// sums_c += sum_k weight_k rows_kc
template <typename T>
VOXELFIELD_HOST_DEVICE void add_weighted_rows(const BlockBuffer<T>& weight, const T* rows, int64_t channels,
                                              int64_t count, T* sums) {
  if (channels == 3) {
    T r = 0, g = 0, b = 0;
    VOXELFIELD_VECTORIZE_SUM(r, g, b)
    for (int64_t k = 0; k < count; ++k) {
      r += weight[k] * rows[3 * k];
      g += weight[k] * rows[3 * k + 1];
      b += weight[k] * rows[3 * k + 2];
    }
    sums[0] += r;
    sums[1] += g;
    sums[2] += b;
  } else if (channels < kMinAdjacentChannels) {
    for (int64_t c = 0; c < channels; ++c) {
      T sum = 0;
      VOXELFIELD_VECTORIZE_SUM(sum)
      for (int64_t k = 0; k < count; ++k) sum += weight[k] * rows[k * channels + c];
      sums[c] += sum;
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      VOXELFIELD_VECTORIZE
      for (int64_t c = 0; c < channels; ++c) sums[c] += weight[k] * rows[k * channels + c];
    }
  }
}

// sums_k += sum_c scales_c rows_kc
template <typename T>
VOXELFIELD_HOST_DEVICE void add_row_products(const T* scales, const T* rows, int64_t channels, int64_t count,
                                             BlockBuffer<T>& sums) {
  if (channels == 3) {
    const T r = scales[0], g = scales[1], b = scales[2];
    VOXELFIELD_VECTORIZE
    for (int64_t k = 0; k < count; ++k) sums[k] += r * rows[3 * k] + g * rows[3 * k + 1] + b * rows[3 * k + 2];
  } else if (channels < kMinAdjacentChannels) {
    for (int64_t c = 0; c < channels; ++c) {
      const T scale = scales[c];
      VOXELFIELD_VECTORIZE
      for (int64_t k = 0; k < count; ++k) sums[k] += scale * rows[k * channels + c];
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      T sum = 0;
      VOXELFIELD_VECTORIZE_SUM(sum)
      for (int64_t c = 0; c < channels; ++c) sum += scales[c] * rows[k * channels + c];
      sums[k] += sum;
    }
  }
}

// rows_kc = weight_k scales_c
template <typename T>
VOXELFIELD_HOST_DEVICE void store_row_products(const BlockBuffer<T>& weight, const T* scales, int64_t channels,
                                               int64_t count, T* rows) {
  if (channels == 3) {
    const T r = scales[0], g = scales[1], b = scales[2];
    VOXELFIELD_VECTORIZE
    for (int64_t k = 0; k < count; ++k) {
      rows[3 * k] = weight[k] * r;
      rows[3 * k + 1] = weight[k] * g;
      rows[3 * k + 2] = weight[k] * b;
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      VOXELFIELD_VECTORIZE
      for (int64_t c = 0; c < channels; ++c) rows[k * channels + c] = weight[k] * scales[c];
    }
  }
}

template <typename Job>
VOXELFIELD_HOST_DEVICE void clear_rows(const Job& job, const RaySpan& rows) {
  for (int64_t i = rows.begin; i < rows.end; ++i) job.clear(i);
}

// Stores the gradients of the densities (or alphas) of a block, and of their lengths if they are wanted, from the
// shares of the samples that the ray reaches. `total` is the sum of the shares of the ray, and `passed` that of the
// blocks so far.
template <typename Job, typename Samples, typename T>
VOXELFIELD_HOST_DEVICE void store_gradient(const Job& job, T total, T& passed, BlockWork<Samples>& work) {
  const BlockLight<Samples>& light = work.light;
  const Samples samples = job.samples;
  T *const gradient = job.gradient, *const grad_dt = job.grad_dt();
  for (int64_t k = light.reached; k < light.whole; ++k) work.share[k] = 0;
  passed = scan_before(work.share, light.whole, passed, work.before, std::plus<T>());
  VOXELFIELD_VECTORIZE
  for (int64_t k = 0; k < light.reached; ++k) {
    const T suffix = total - (work.before[k] + work.share[k]);
    samples.store_gradient(light.begin + k, light.transmittance[k], light.weight[k], work.at_weight[k], suffix,
                           gradient, grad_dt);
  }
  clear_rows(job, light.unreached());
}

template <typename Samples>
VOXELFIELD_HOST_DEVICE void process_ray(const LightWalk<Samples>& job, int64_t /*ray*/, const RaySpan& span,
                                        BlockWork<Samples>& work) {
  BlockLight<Samples>& light = work.light;
  light.start(span);
  while (light.next(job.samples)) {
    const auto& values = job.transmittance ? light.transmittance : light.weight;
    std::copy_n(values.lane, light.count, job.values + light.begin);
  }
  clear_rows(job, light.rest());
}

template <typename Samples, typename T>
VOXELFIELD_HOST_DEVICE void store_block(const LightGradientWalk<Samples>& job, T total, T& passed,
                                        BlockWork<Samples>& work) {
  const BlockLight<Samples>& light = work.light;
  const T* grad = job.grad + light.begin;
  const auto& values = job.transmittance ? light.transmittance : light.weight;
  VOXELFIELD_VECTORIZE
  for (int64_t k = 0; k < light.reached; ++k) {
    work.share[k] = values[k] * grad[k];
    work.at_weight[k] = job.transmittance ? T(0) : grad[k];
  }
  store_gradient(job, total, passed, work);
}

template <typename Samples>
VOXELFIELD_HOST_DEVICE void process_ray(const LightGradientWalk<Samples>& job, int64_t /*ray*/, const RaySpan& span,
                                        BlockWork<Samples>& work) {
  using T = typename Samples::value_t;
  BlockLight<Samples>& light = work.light;
  T total = 0, passed = 0;
  light.start(span);
  while (light.next(job.samples)) {
    const auto& values = job.transmittance ? light.transmittance : light.weight;
    const T* grad = job.grad + light.begin;
    VOXELFIELD_VECTORIZE_SUM(total)
    for (int64_t k = 0; k < light.reached; ++k) total += values[k] * grad[k];
  }
  if (light.holds_ray()) {
    store_block(job, total, passed, work);
  } else {
    light.start(span);
    while (light.next(job.samples)) store_block(job, total, passed, work);
  }
  clear_rows(job, light.rest());
}

template <typename Samples>
VOXELFIELD_HOST_DEVICE void process_ray(const CompositeJob<Samples>& job, int64_t ray, const RaySpan& span,
                                        BlockWork<Samples>& work) {
  using T = typename Samples::value_t;
  BlockLight<Samples>& light = work.light;
  const CompositeValues<T*>& out = job.out;
  T* const rgb = out.rgb + ray * job.channels;
  const T origin = span.begin < span.end ? job.samples.t[span.begin] : T(0);
  T opacity = 0, depth_sum = 0, spread = 0;
  WeightMoments<T> ahead;
  std::fill_n(rgb, job.channels, T(0));
  light.start(span);
  while (light.next(job.samples)) {
    const T* t = job.samples.t + light.begin;
    std::copy_n(light.weight.lane, light.count, out.weights + light.begin);
    VOXELFIELD_VECTORIZE_SUM(opacity, depth_sum)
    for (int64_t k = 0; k < light.reached; ++k) {
      opacity += light.weight[k];
      depth_sum += light.weight[k] * t[k];
    }
    add_weighted_rows(light.weight, job.samples.rgb + light.begin * job.channels, job.channels, light.reached, rgb);
    if (out.distortion == nullptr) continue;
    for (int64_t k = 0; k < light.reached; ++k) {
      const T distance = t[k] - origin, dt = job.samples.dt[light.begin + k];
      spread += distortion_of(ahead.pass(light.weight[k], distance, SingleThread{}), light.weight[k], distance, dt);
    }
  }
  clear_rows(job, light.rest());
  out.opacity[ray] = opacity;
  out.depth_sum[ray] = depth_sum;
  if (out.distortion != nullptr) out.distortion[ray] = spread;
}

// The gradients of the sums of one ray.
template <typename T>
struct RayGradient {
  const T* rgb;  // may be null
  T opacity, depth_sum, distortion;
  T origin;                // the distance of the first sample
  WeightMoments<T> all;    // of the ray, for distortion
  WeightMoments<T> ahead;  // of the blocks so far
  T total;                 // the sum of all shares
  T passed = 0;            // the sum of the shares of the blocks so far
};

template <typename Samples, typename T>
VOXELFIELD_HOST_DEVICE void store_block(const CompositeGradientJob<Samples>& job, RayGradient<T>& ray,
                                        BlockWork<Samples>& work) {
  const BlockLight<Samples>& light = work.light;
  const int64_t begin = light.begin, channels = job.channels, reached = light.reached;
  const T *t = job.samples.t + begin, *rgb = job.samples.rgb + begin * channels;
  T* const grad_rgb = job.grad_rgb + begin * channels;
  VOXELFIELD_VECTORIZE
  for (int64_t k = 0; k < reached; ++k) work.at_weight[k] = ray.opacity + ray.depth_sum * t[k];
  if (ray.rgb != nullptr) {
    add_row_products(ray.rgb, rgb, channels, reached, work.at_weight);
    store_row_products(light.weight, ray.rgb, channels, reached, grad_rgb);
  } else {
    std::fill_n(grad_rgb, reached * channels, T(0));
  }
  if (job.gradients.weights != nullptr) {
    const T* at_weights = job.gradients.weights + begin;
    VOXELFIELD_VECTORIZE
    for (int64_t k = 0; k < reached; ++k) work.at_weight[k] += at_weights[k];
  }
  T *const grad_t = job.grad_t(), *const grad_dt = job.grad_dt();
  if (grad_t != nullptr) {
    VOXELFIELD_VECTORIZE
    for (int64_t k = 0; k < reached; ++k) grad_t[begin + k] = light.weight[k] * ray.depth_sum;
  }
  WeightMoments<T> ahead = ray.ahead;
  if (job.gradients.distortion != nullptr) {
    for (int64_t k = 0; k < reached; ++k) {
      const T distance = t[k] - ray.origin, weight = light.weight[k];
      const WeightMoments<T> before = ahead.pass(weight, distance, SingleThread{});
      const T dt = job.samples.dt[begin + k];
      work.at_weight[k] += ray.distortion * distortion_slope(before, ray.all, weight, distance, dt);
      if (grad_t != nullptr) {
        grad_t[begin + k] += ray.distortion * distortion_slope_in_distance(before, ray.all, weight);
      }
    }
  }
  ray.ahead = ahead;
  VOXELFIELD_VECTORIZE
  for (int64_t k = 0; k < reached; ++k) work.share[k] = light.weight[k] * work.at_weight[k];
  store_gradient(job, ray.total, ray.passed, work);
  if (grad_dt != nullptr && job.gradients.distortion != nullptr) {
    for (int64_t k = 0; k < reached; ++k) {
      grad_dt[begin + k] += ray.distortion * distortion_slope_in_length(light.weight[k]);
    }
  }
}

template <typename Samples>
VOXELFIELD_HOST_DEVICE void process_ray(const CompositeGradientJob<Samples>& job, int64_t ray, const RaySpan& span,
                                        BlockWork<Samples>& work) {
  using T = typename Samples::value_t;
  if (span.begin == span.end) return;
  const auto &gradients = job.gradients, &results = job.results;
  const int64_t channels = job.channels;
  RayGradient<T> gradient{};
  if (gradients.rgb != nullptr) {
    gradient.rgb = gradients.rgb + ray * channels;
    for (int64_t c = 0; c < channels; ++c) gradient.total += gradient.rgb[c] * results.rgb[ray * channels + c];
  }
  if (gradients.opacity != nullptr) gradient.opacity = gradients.opacity[ray];
  if (gradients.depth_sum != nullptr) gradient.depth_sum = gradients.depth_sum[ray];
  gradient.total += gradient.opacity * results.opacity[ray] + gradient.depth_sum * results.depth_sum[ray];
  gradient.origin = job.samples.t[span.begin];
  if (gradients.distortion != nullptr) {
    gradient.distortion = gradients.distortion[ray];
    gradient.total += 2 * gradient.distortion * results.distortion[ray];
    gradient.all = {results.opacity[ray], results.depth_sum[ray] - results.opacity[ray] * gradient.origin};
  }
  BlockLight<Samples>& light = work.light;
  light.start(span);
  if (gradients.weights != nullptr) {
    T sum = 0;
    while (light.next(job.samples)) {
      VOXELFIELD_VECTORIZE_SUM(sum)
      for (int64_t k = 0; k < light.reached; ++k) sum += light.weight[k] * gradients.weights[light.begin + k];
    }
    gradient.total += sum;
  }
  if (light.holds_ray()) {
    store_block(job, gradient, work);
  } else {
    light.start(span);
    while (light.next(job.samples)) store_block(job, gradient, work);
  }
  clear_rows(job, light.rest());
}

// Lists the visible samples of a ray, and returns their number.
template <typename Samples, typename T>
VOXELFIELD_MULTIVERSION int32_t find_visible(const Samples& samples, const RaySpan& span, const KeepRule<T>& rule,
                                             int32_t* kept) {
  BlockLight<Samples> light;
  int32_t count = 0;
  light.start(span);
  while (light.next(samples)) {
    for (int64_t k = 0; k < light.reached; ++k) {
      if (rule.keeps(light.weight[k])) kept[count++] = static_cast<int32_t>(light.begin + k);
    }
  }
  return count;
}

template <typename Samples, template <typename> class Job>
VOXELFIELD_MULTIVERSION void process_rays(const Job<Samples>& job, int64_t begin, int64_t end) {
  BlockWork<Samples> work;
  for (int64_t ray = begin; ray < end; ++ray) process_ray(job, ray, job.samples.rays[ray], work);
}

}  // namespace voxelfield
