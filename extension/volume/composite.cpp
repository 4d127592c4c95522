// Compositing on the CPU: rays in parallel, samples of a ray in order.
#include "common/backend.h"
#include "volume/composite_ops.h"
#include "volume/walk_samples.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 64;

// Calls visit(ray, span) for every ray, which returns the first sample that it left out, and clear(i) for samples left
// out and for those that belong to no ray.
template <typename T, typename Visit, typename Clear>
void for_each_ray(const PackedSamples<T>& samples, const Visit& visit, const Clear& clear) {
  torch::stable::parallel_for(0, samples.rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t ray = begin; ray < end; ++ray) {
      const RaySpan span = samples.rays[ray];
      for (int64_t i = visit(ray, span); i < span.end; ++i) clear(i);
    }
  });
  for (const RaySpan& rows : {samples.rays.before(), samples.rays.behind()}) {
    for (int64_t i = rows.begin; i < rows.end; ++i) clear(i);
  }
}

struct Cpu : CpuBackend {
  template <typename T>
  static void weights(const PackedSamples<T>& samples, T* weights) {
    for_each_ray(
        samples,
        [&](int64_t /*ray*/, const RaySpan& span) {
          return walk_samples(samples, span, [&](int64_t i, T /*transmittance*/, T weight) { weights[i] = weight; });
        },
        [&](int64_t i) { weights[i] = 0; });
  }

  template <typename T>
  static void forward(const PackedSamples<T>& samples, const CompositeOutputs<T>& out) {
    for_each_ray(
        samples,
        [&](int64_t ray, const RaySpan& span) {
          RayResult<T> result;
          Matter<T> before;
          const int64_t stop = walk_samples(samples, span, [&](int64_t i, T /*transmittance*/, T weight) {
            out.weights[i] = weight;
            result.add(samples, i, weight);
            const T distance = samples.t[i] - samples.t[span.begin];
            result.distortion += distortion_of(before, weight, distance, samples.dt[i]);
            before.add(weight, distance);
          });
          out.write(ray, result);
          return stop;
        },
        [&](int64_t i) { out.weights[i] = 0; });
  }

  template <typename T>
  static void backward(const PackedSamples<T>& samples, const CompositeValues<T>& gradients,
                       const CompositeValues<T>& results, const SampleGradients<T>& out) {
    for_each_ray(
        samples,
        [&](int64_t ray, const RaySpan& span) {
          const RayGradient<T> gradient{gradients.of_ray(ray), gradients.weights};
          const RayResult<T> result = results.of_ray(ray);
          T behind = gradient.of_all(result);
          if (gradient.weights != nullptr) {
            walk_samples(samples, span,
                         [&](int64_t i, T /*transmittance*/, T weight) { behind += weight * gradient.weights[i]; });
          }
          const T origin = span.begin < span.end ? samples.t[span.begin] : T(0);
          const Matter<T> all{result.opacity, result.depth - result.opacity * origin};
          Matter<T> before;
          return walk_samples(samples, span, [&](int64_t i, T transmittance, T weight) {
            const T distance = samples.t[i] - origin;
            const T at_weight = gradient.at_weight(samples, i) +
                                gradient.at.distortion * distortion_slope(before, all, weight, distance, samples.dt[i]);
            before.add(weight, distance);
            behind -= weight * at_weight;
            out.density[i] = density_gradient(samples.dt[i], transmittance, weight, at_weight, behind);
            for (int channel = 0; channel < 3; ++channel) {
              out.rgb[3 * i + channel] = weight * gradient.at.rgb[channel];
            }
          });
        },
        [&](int64_t i) {
          out.density[i] = 0;
          for (int channel = 0; channel < 3; ++channel) out.rgb[3 * i + channel] = 0;
        });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("ray_weights", TORCH_BOX(&CompositeOps<Cpu>::ray_weights));
  m.impl("composite", TORCH_BOX(&CompositeOps<Cpu>::composite));
  m.impl("composite_backward", TORCH_BOX(&CompositeOps<Cpu>::composite_backward));
}

}  // namespace voxelfield
