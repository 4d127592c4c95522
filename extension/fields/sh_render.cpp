// Renders a voxel field of spherical harmonics on the CPU: rays in parallel, the samples of a ray in order. The
// gradient is summed into the grid layer by layer along x. Even layers run in parallel, then odd layers, so that no two
// threads write to the same vertex and the sums do not depend on the number of threads.
#include <vector>

#include "common/backend.h"
#include "common/narrow.h"
#include "fields/sh_render_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 64;
constexpr int kMaxChannels = 1 + 3 * kMaxShBasis;

// Zero if the stencil is empty, as in sampling.
template <typename scalar_t>
VOXELFIELD_HOST_DEVICE float raw_density(const ShGridView<scalar_t>& grid, const Stencil<float, int32_t>& s) {
  if (s.empty) return 0.0f;
  float raw = 0.0f;
  for (int k = 0; k < kCorners; ++k) raw += s.value(k) * widen(grid.density[s.offset(k) * grid.density_stride]);
  return raw;
}

template <typename scalar_t>
VOXELFIELD_HOST_DEVICE void shade(const ShGridView<scalar_t>& grid, const Stencil<float, int32_t>& s,
                                  const float* basis, float* rgb) {
  const int used = grid.used_channels(), size = grid.basis_size();
  float feature[kMaxChannels] = {};
  for (int k = 0; k < kCorners && !s.empty; ++k) {
    const scalar_t* row = grid.rows + s.offset(k) * grid.channels;
    const float weight = s.value(k);
    VOXELFIELD_VECTORIZE
    for (int c = 1; c < used; ++c) feature[c] += weight * widen(row[c]);
  }
  for (int color = 0; color < 3; ++color) {
    float sum = 0.0f;
    for (int b = 0; b < size; ++b) sum += feature[1 + color * size + b] * basis[b];
    rgb[color] = sigmoid(sum);
  }
}

// Calls visit(sample, stencil) for the kept samples of a ray.
template <typename scalar_t, typename Visit>
VOXELFIELD_HOST_DEVICE void walk_ray(const RenderScene<scalar_t>& scene, const RayView& ray, const Visit& visit) {
  float basis[kMaxShBasis];
  spherical_harmonics(ray.direction, scene.grid.degree, basis);
  SampleWalk walk(scene.cells, ray);
  const CubeRay cube(ray, scene.grid.aabb);
  VisibleLight<float> light(scene.rule);
  WalkedSample sample;
  while (!light.stopped() && walk.next(sample.t)) {
    const Stencil<float, int32_t> stencil = scene.grid.at(cube, sample.t);
    sample.raw = raw_density(scene.grid, stencil);
    static_cast<EvaluatedSample<float>&>(sample) =
        light.evaluate(absorption_of_density(scene.grid.density_of(sample.raw), scene.step), true, SingleThread{});
    if (!sample.kept) continue;
    shade(scene.grid, stencil, basis, sample.rgb);
    visit(sample, stencil);
  }
}

template <typename scalar_t, typename Rays>
VOXELFIELD_MULTIVERSION void render_range(const RenderScene<scalar_t>& scene, const Rays& rays, int64_t begin,
                                          int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const Ray ray = rays[index];
    RayTotals<float> totals;
    walk_ray(scene, ray.view(scene.step, scene.steps_per_length),
             [&](const WalkedSample& sample, const auto&) { totals.add(sample.weight, sample.rgb, sample.t); });
    rays.store(index, totals);
  }
}

// The contribution of one sample to the gradient of the grid.
struct Contribution {
  Stencil<float, int32_t> stencil;
  int64_t ray;
  float gradient[4];  // with respect to raw density and to the colours before the sigmoid
};

template <typename scalar_t>
VOXELFIELD_MULTIVERSION void find_contributions(const RenderScene<scalar_t>& scene, const RayBatch& rays, int64_t begin,
                                                int64_t end, const RenderedPointers<const float>& gradients,
                                                const RenderedPointers<const float>& results,
                                                std::vector<Contribution>& found) {
  for (int64_t ray = begin; ray < end; ++ray) {
    const RayTotals<float> gradient = gradients.load(ray);
    float suffix_grad = gradient.of_ray(results.load(ray));
    walk_ray(scene, rays[ray], [&](const WalkedSample& sample, const Stencil<float, int32_t>& stencil) {
      const float at_weight = gradient.at_weight(sample.rgb, sample.t);
      suffix_grad -= sample.weight * at_weight;
      if (stencil.empty) return;
      found.push_back({stencil, ray, {}});
      sample_gradient(scene, gradient, sample, at_weight, suffix_grad, found.back().gradient);
    });
  }
}

// The contributions whose lower vertices lie in one layer along x, in the order of the rays. They add to this layer and
// to the next one.
using Layer = std::vector<const Contribution*>;

template <typename scalar_t>
VOXELFIELD_MULTIVERSION void scatter_layer(const ShGridView<scalar_t>& grid, const RayBatch& rays, const Layer& layer,
                                           float* grad_rows) {
  const int used = grid.used_channels(), size = grid.basis_size();
  for (const Contribution* const item : layer) {
    const Contribution& one = *item;
    float basis[kMaxShBasis], value[kMaxChannels];
    spherical_harmonics(rays[one.ray].direction, grid.degree, basis);
    value[0] = one.gradient[0];
    for (int color = 0; color < 3; ++color) {
      for (int b = 0; b < size; ++b) value[1 + color * size + b] = one.gradient[1 + color] * basis[b];
    }
    for (int k = 0; k < kCorners; ++k) {
      const float weight = one.stencil.value(k);
      if (weight == 0.0f) continue;
      float* row = grad_rows + one.stencil.offset(k) * grid.channels;
      VOXELFIELD_VECTORIZE
      for (int c = 0; c < used; ++c) row[c] += weight * value[c];
    }
  }
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Rays>
  static void render(const RenderScene<scalar_t>& scene, const Rays& rays) {
    for_each_range(rays.count(), kRaysPerTask,
                   [&](int64_t begin, int64_t end) { render_range(scene, rays, begin, end); });
  }

  template <typename scalar_t>
  static void render_backward(const RenderScene<scalar_t>& scene, const RayBatch& rays,
                              const RenderedPointers<const float>& gradients,
                              const RenderedPointers<const float>& results, float* grad_rows) {
    std::vector<std::vector<Contribution>> parts((rays.count + kRaysPerTask - 1) / kRaysPerTask);
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      find_contributions(scene, rays, begin, end, gradients, results, parts[begin / kRaysPerTask]);
    });
    std::vector<Layer> layers(scene.grid.locator.resolution[0]);
    for (const auto& part : parts) {
      for (const Contribution& one : part) layers[one.stencil.lower[0]].push_back(&one);
    }
    for (size_t parity = 0; parity < 2; ++parity) {
      for_each_task((layers.size() - parity + 1) / 2, [&](int64_t task, int64_t /*thread*/) {
        scatter_layer(scene.grid, rays, layers[2 * task + parity], grad_rows);
      });
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { RenderOps<Cpu>::implement(m); }

}  // namespace voxelfield
