// Defines where a ray stops, which of its samples are kept, and how much light reaches each sample. All renderers
// follow this definition (Max 1995; Mildenhall et al. 2020, eq. 3), which uses optical depth:
//   transmittance_i = exp(-sum_{j<i} density_j dt_j),  weight_i = transmittance_i (1 - exp(-density_i dt_i)).
//
// A ray stops before the first sample whose transmittance is below min_transmittance. Renderers that drop faint samples
// keep those whose weight exceeds min_weight, and treat the others as if they did not exist: dropped samples are
// not visible and absorb no light. Such a renderer tracks two optical depths. The optical depth of all samples
// determines where a ray stops and which samples are kept, and that of the kept samples determines their final weights.
//
// A density that is not finite must be visible. Its sample has an opacity of NaN, which no threshold drops, and a
// thickness of zero, which does not affect the optical depths of other samples. A pixel is therefore NaN if and only if
// its ray reaches such a sample, regardless of how the samples of the ray are distributed over threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/platform.h"

namespace voxelfield {

template <typename T>
VOXELFIELD_HOST_DEVICE T transmittance_at(T optical_depth) {
  return std::exp(-optical_depth);
}

// The optical thickness of one sample, and the fraction of the arriving light that it absorbs.
template <typename T>
struct Absorption {
  T thickness;
  T opacity;
};

template <typename T>
VOXELFIELD_HOST_DEVICE Absorption<T> absorption_of_density(T density, T dt) {
  const T thickness = density * dt;
  const bool sound = density < T(INFINITY) && thickness > T(-INFINITY);  // false for NaN
  return {sound ? thickness : T(0), sound ? -std::expm1(-thickness) : T(NAN)};
}

// An alpha of 1 is an infinite thickness. No light remains after it.
template <typename T>
VOXELFIELD_HOST_DEVICE Absorption<T> absorption_of_alpha(T alpha) {
  const bool sound = alpha <= T(1) && alpha > T(-INFINITY);
  return {sound ? -std::log1p(-alpha) : T(0), sound ? alpha : T(NAN)};
}

template <typename T>
struct KeepRule {
  T min_transmittance;
  T min_weight;

  VOXELFIELD_HOST_DEVICE bool stops(T transmittance) const { return transmittance < min_transmittance; }
  // True for NaN.
  VOXELFIELD_HOST_DEVICE bool keeps(T weight) const { return !(weight <= min_weight); }
};

// The result of the rule for one sample. Transmittance and weight are zero unless the sample is kept.
template <typename T>
struct EvaluatedSample {
  bool kept;
  T transmittance;
  T weight;
};

// Russian roulette among the faint samples of a ray (Arvo and Kirk 1990, "Particle transport and image synthesis").
// Samples of a weight below `threshold` are kept at random. Those that are kept are longer, so that the transmittance
// behind them, and thus the weights of all samples, have the same mean as without the roulette.
struct Roulette {
  float threshold;  // 0: all samples are kept

  // By what factor a sample becomes longer: 1 if it is kept in any case, 0 if it is left out. `chance` is uniform in
  // [0, 1).
  VOXELFIELD_HOST_DEVICE float stretch(const EvaluatedSample<float>& sample, float chance) const {
    // Samples that hardly any light reaches are kept so often that their opacity becomes a quarter at most: the
    // gradient of a nearly opaque sample is nearly zero.
    constexpr float kLeastRatio = 4.0f;
    if (!(sample.weight < threshold)) return 1.0f;  // NaN is kept
    const float opacity = sample.weight / sample.transmittance;
    const float probability = opacity * std::fmax(sample.transmittance / threshold, kLeastRatio);
    if (probability >= 1.0f) return 1.0f;
    if (!(chance < probability)) return 0.0f;
    return std::log1p(-opacity / probability) / std::log1p(-opacity);
  }
};

// A number in [0, 1) that looks random, for the sample at a distance along a ray (finaliser of MurmurHash3, Appleby).
VOXELFIELD_HOST_DEVICE float chance_of(int64_t ray, float t) {
  uint32_t bits;
  std::memcpy(&bits, &t, sizeof(bits));
  bits = (bits * 0x9e3779b9u) ^ static_cast<uint32_t>(ray);
  bits = (bits ^ bits >> 16) * 0x85ebca6bu;
  bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
  return static_cast<float>((bits ^ bits >> 16) >> 8) * 0x1p-24f;
}

// A thread that walks its ray alone. It has the interface of a team of one thread (see keep_rule.cuh), including the
// scan over the values of the team.
struct SingleThread {
  static constexpr int kSize = 1, seat = 0;
  static constexpr bool leads = true;

  template <typename T>
  struct Sums {
    T through;

    VOXELFIELD_HOST_DEVICE T before() const { return T(0); }
    VOXELFIELD_HOST_DEVICE T total() const { return through; }
  };

  template <typename T>
  VOXELFIELD_HOST_DEVICE Sums<T> operator()(T value) const {
    return {value};
  }

  template <typename T>
  VOXELFIELD_HOST_DEVICE T sum(T value) const {
    return value;
  }

  // The value of the thread `step` places before, or of the last thread.
  template <typename T>
  VOXELFIELD_HOST_DEVICE T moved_up(T value, int /*step*/) const {
    return value;
  }

  template <typename T>
  VOXELFIELD_HOST_DEVICE T last(T value) const {
    return value;
  }

  VOXELFIELD_HOST_DEVICE bool any(bool value) const { return value; }
};

// The light along a ray from which faint samples are dropped.
template <typename T>
class VisibleLight {
 public:
  VOXELFIELD_HOST_DEVICE explicit VisibleLight(const KeepRule<T>& rule) : rule_(rule) {}

  // Applies the rule to the next sample, or to one sample per thread of a team that shares the ray. `found` is false
  // for threads without a sample. `scan(value)` returns the sums of the values of a team: before this thread, and in
  // total.
  template <typename Scan>
  VOXELFIELD_HOST_DEVICE EvaluatedSample<T> evaluate(const Absorption<T>& sample, bool found, const Scan& scan) {
    const auto all = scan(found ? sample.thickness : T(0));
    const T reaching = Scan::kSize == 1 ? reaching_ : transmittance_at(depth_of_all_ + all.before());
    EvaluatedSample<T> evaluated{found && !rule_.stops(reaching) && rule_.keeps(reaching * sample.opacity), T(0), T(0)};
    const auto kept = scan(evaluated.kept ? sample.thickness : T(0));
    const T kept_before = kept.before();
    if (evaluated.kept) {
      evaluated.transmittance = transmittance_at(depth_of_kept_ + kept_before);
      evaluated.weight = evaluated.transmittance * sample.opacity;
    }
    depth_of_all_ += all.total();
    depth_of_kept_ += kept.total();
    reaching_ = transmittance_at(depth_of_all_);
    return evaluated;
  }

  // Whether the ray ends here.
  VOXELFIELD_HOST_DEVICE bool stopped() const { return rule_.stops(reaching_); }

 private:
  KeepRule<T> rule_;
  T depth_of_all_ = 0, depth_of_kept_ = 0;
  T reaching_ = 1;  // the light that remains after all samples so far
};

}  // namespace voxelfield
