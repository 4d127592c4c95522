// Where a ray stops, which of its samples are kept, and how much light reaches each: the one statement of the rule that
// every renderer follows (Max 1995; Mildenhall et al. 2020, eq. 3), in terms of optical depth:
//   transmittance_i = exp(-sum_{j<i} density_j dt_j),  weight_i = transmittance_i (1 - exp(-density_i dt_i)).
//
// A ray stops in front of the first sample that less than min_transmittance of the light reaches. Renderers that drop
// faint samples keep those whose weight exceeds min_weight and treat the others as if they did not exist: they neither
// show nor cast a shadow. Such a renderer follows two optical depths: that of all samples, by which a ray stops and
// samples are kept, and that of the kept ones, from which their final weights follow.
//
// A density that is not finite must be visible. Its sample has an opacity of NaN, which no threshold drops, and a
// thickness of zero, which does not affect its neighbours' optical depths: a pixel is NaN exactly if its ray reaches a
// sample of this kind, however the samples of the ray are distributed over threads.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace voxelfield {

template <typename T>
VOXELFIELD_HOST_DEVICE T transmittance_at(T optical_depth) {
  return std::exp(-optical_depth);
}

// One sample's optical thickness, and the share of the arriving light that it stops.
template <typename T>
struct Absorption {
  T thickness;
  T opacity;
};

template <typename T>
VOXELFIELD_HOST_DEVICE Absorption<T> absorption_of_density(T density, T dt) {
  const T thickness = density * dt;
  const bool sound = density < T(INFINITY) && thickness == thickness;
  return {sound ? thickness : T(0), sound ? -std::expm1(-thickness) : T(NAN)};
}

// An alpha of 1 is an infinite thickness, behind which no light is left.
template <typename T>
VOXELFIELD_HOST_DEVICE Absorption<T> absorption_of_alpha(T alpha) {
  const bool sound = alpha <= T(1);
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

// A sample as the rule sees it; transmittance and weight are zero unless it is kept.
template <typename T>
struct JudgedSample {
  bool kept;
  T transmittance;
  T weight;
};

// A thread that walks its ray alone: a team of one, see keep_rule.cuh. A call scans the values of a team's threads.
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

  VOXELFIELD_HOST_DEVICE bool any(bool value) const { return value; }
};

// The light along a ray of which faint samples are dropped.
template <typename T>
class KeptLight {
 public:
  VOXELFIELD_HOST_DEVICE explicit KeptLight(const KeepRule<T>& rule) : rule_(rule) {}

  // Judges the next sample, or one sample for each thread of a team that shares the ray; `found` is false for threads
  // without a sample. `scan(value)` returns the sums of a team's values before a thread's own and in total.
  template <typename Scan>
  VOXELFIELD_HOST_DEVICE JudgedSample<T> judge(const Absorption<T>& sample, bool found, const Scan& scan) {
    const auto all = scan(found ? sample.thickness : T(0));
    const T reaching = Scan::kSize == 1 ? reaching_ : transmittance_at(depth_of_all_ + all.before());
    JudgedSample<T> judged{found && !rule_.stops(reaching) && rule_.keeps(reaching * sample.opacity), T(0), T(0)};
    const auto kept = scan(judged.kept ? sample.thickness : T(0));
    const T kept_before = kept.before();
    if (judged.kept) {
      judged.transmittance = transmittance_at(depth_of_kept_ + kept_before);
      judged.weight = judged.transmittance * sample.opacity;
    }
    depth_of_all_ += all.total();
    depth_of_kept_ += kept.total();
    reaching_ = transmittance_at(depth_of_all_);
    return judged;
  }

  // Whether the ray ends here.
  VOXELFIELD_HOST_DEVICE bool stopped() const { return rule_.stops(reaching_); }

 private:
  KeepRule<T> rule_;
  T depth_of_all_ = 0, depth_of_kept_ = 0;
  T reaching_ = 1;  // the light that is left behind all samples so far
};

}  // namespace voxelfield
