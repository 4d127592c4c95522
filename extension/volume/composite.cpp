// Compositing on the CPU: rays in parallel, samples of a ray in order.
#include "common/backend.h"
#include "volume/composite_ops.h"
#include "volume/walk_samples.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 64;

// Calls visit(ray, span) for every ray, which returns the first sample behind the ray's end, and clear(i) for the
// samples from there on and for those that belong to no ray.
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
  static void light(const PackedSamples<T>& samples, LightValue value, T* values) {
    for_each_ray(
        samples,
        [&](int64_t /*ray*/, const RaySpan& span) {
          return walk_samples(samples, span, [&](int64_t i, T transmittance, T weight) {
            values[i] = value == LightValue::kWeight ? weight : transmittance;
          });
        },
        [&](int64_t i) { values[i] = 0; });
  }

  template <typename T>
  static void light_backward(const PackedSamples<T>& samples, LightValue value, const T* grad, T* grad_density) {
    for_each_ray(
        samples,
        [&](int64_t /*ray*/, const RaySpan& span) {
          T suffix_grad = 0;
          walk_samples(samples, span, [&](int64_t i, T transmittance, T weight) {
            suffix_grad += (value == LightValue::kWeight ? weight : transmittance) * grad[i];
          });
          return walk_samples(samples, span, [&](int64_t i, T transmittance, T weight) {
            suffix_grad -= (value == LightValue::kWeight ? weight : transmittance) * grad[i];
            const T at_weight = value == LightValue::kWeight ? grad[i] : T(0);
            grad_density[i] = samples.gradient(i, transmittance, weight, at_weight, suffix_grad);
          });
        },
        [&](int64_t i) { grad_density[i] = 0; });
  }

  template <typename T>
  static void forward(const PackedSamples<T>& samples, const CompositeOutputs<T>& out) {
    for_each_ray(
        samples,
        [&](int64_t ray, const RaySpan& span) {
          RayTotals<T> totals;
          WeightMoments<T> before;
          T distortion = 0;
          const int64_t end = walk_samples(samples, span, [&](int64_t i, T /*transmittance*/, T weight) {
            out.weights[i] = weight;
            totals.add(weight, samples.rgb + 3 * i, samples.t[i]);
            if (out.distortion == nullptr) return;
            const T distance = samples.t[i] - samples.t[span.begin];
            distortion += distortion_of(before, weight, distance, samples.dt[i]);
            before.add(weight, distance);
          });
          out.write(ray, totals, distortion);
          return end;
        },
        [&](int64_t i) { out.weights[i] = 0; });
  }

  template <typename T>
  static void backward(const PackedSamples<T>& samples, const CompositeValues<T>& gradients,
                       const CompositeValues<T>& results, const SampleGradients<T>& out) {
    for_each_ray(
        samples,
        [&](int64_t ray, const RaySpan& span) {
          const RayTotals<T> gradient = gradients.totals(ray), totals = results.totals(ray);
          const T at_distortion = gradients.distortion_of_ray(ray);
          // Distortion is a sum of products of two weights, so that each of its terms counts twice.
          T suffix_grad = gradient.of_ray(totals) + 2 * at_distortion * results.distortion_of_ray(ray);
          if (gradients.weights != nullptr) {
            walk_samples(samples, span, [&](int64_t i, T /*transmittance*/, T weight) {
              suffix_grad += weight * gradients.weights[i];
            });
          }
          const T origin = span.begin < span.end ? samples.t[span.begin] : T(0);
          const WeightMoments<T> all{totals.opacity, totals.depth_sum - totals.opacity * origin};
          WeightMoments<T> before;
          return walk_samples(samples, span, [&](int64_t i, T transmittance, T weight) {
            T at_weight = gradient.at_weight(samples.rgb + 3 * i, samples.t[i]) + gradients.at_weight(i);
            if (gradients.distortion != nullptr) {
              const T distance = samples.t[i] - origin;
              at_weight += at_distortion * distortion_slope(before, all, weight, distance, samples.dt[i]);
              before.add(weight, distance);
            }
            suffix_grad -= weight * at_weight;
            out.density[i] = samples.gradient(i, transmittance, weight, at_weight, suffix_grad);
            for (int channel = 0; channel < 3; ++channel) out.rgb[3 * i + channel] = weight * gradient.rgb[channel];
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
  m.impl("ray_light", TORCH_BOX(&CompositeOps<Cpu>::ray_light));
  m.impl("ray_light_backward", TORCH_BOX(&CompositeOps<Cpu>::ray_light_backward));
  m.impl("composite", TORCH_BOX(&CompositeOps<Cpu>::composite));
  m.impl("composite_backward", TORCH_BOX(&CompositeOps<Cpu>::composite_backward));
}

}  // namespace voxelfield
