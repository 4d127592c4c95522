// Compositing on the CPU: rays in parallel, samples of a ray in order.
#include "../composite_ops.h"
#include "backend.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 64;

// Calls visit(i, transmittance, weight) for every sample of a ray; both are zero behind min_transmittance.
template <typename T, typename Visit>
void walk_ray(const PackedSamples<T>& samples, int64_t ray, const Visit& visit) {
  T optical_depth = 0;
  for (int64_t i = samples.ray_offsets[ray]; i < samples.ray_offsets[ray + 1]; ++i) {
    const T thickness = samples.density[i] * samples.dt[i];
    T transmittance = transmittance_at(optical_depth);
    if (transmittance < samples.min_transmittance) transmittance = 0;
    visit(i, transmittance, transmittance * opacity_of(thickness));
    optical_depth += thickness;
  }
}

template <typename T, typename F>
void for_each_ray(const PackedSamples<T>& samples, const F& f) {
  torch::stable::parallel_for(0, samples.rays, kRaysPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t ray = begin; ray < end; ++ray) f(ray);
  });
}

struct Cpu : CpuBackend {
  template <typename T>
  static void weights(const PackedSamples<T>& samples, T* weights) {
    for_each_ray(samples, [&](int64_t ray) {
      walk_ray(samples, ray, [&](int64_t i, T /*transmittance*/, T weight) { weights[i] = weight; });
    });
  }

  template <typename T>
  static void forward(const PackedSamples<T>& samples, const CompositeOutputs<T>& out) {
    for_each_ray(samples, [&](int64_t ray) {
      RayColor<T> color;
      walk_ray(samples, ray, [&](int64_t i, T /*transmittance*/, T weight) {
        out.weights[i] = weight;
        color.add(samples, i, weight);
      });
      for (int channel = 0; channel < 3; ++channel) out.rgb[3 * ray + channel] = color.rgb[channel];
      out.opacity[ray] = color.opacity;
      out.depth[ray] = color.depth;
    });
  }

  template <typename T>
  static void backward(const PackedSamples<T>& samples, const CompositeGradients<T>& gradients, T* d_density,
                       T* d_rgb) {
    for_each_ray(samples, [&](int64_t ray) {
      const RayGradient<T> gradient = gradients.of_ray(ray);
      T behind = 0;
      walk_ray(samples, ray,
               [&](int64_t i, T /*transmittance*/, T weight) { behind += weight * gradient.at_weight(samples, i); });
      walk_ray(samples, ray, [&](int64_t i, T transmittance, T weight) {
        const T at_weight = gradient.at_weight(samples, i);
        behind -= weight * at_weight;
        d_density[i] =
            transmittance > T(0) ? density_gradient(samples.dt[i], transmittance, weight, at_weight, behind) : T(0);
        for (int channel = 0; channel < 3; ++channel) d_rgb[3 * i + channel] = weight * gradient.rgb[channel];
      });
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
