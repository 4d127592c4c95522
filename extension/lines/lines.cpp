// Lines through grids on the CPU: a thread walks one ray after the other. Backprojection divides grids into slabs along
// x, to each of which one thread adds the parts of all rays, so that sums do not depend on the number of threads.
#include "common/backend.h"
#include "lines/line_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kSlabs = 32, kMinPlanes = 4;

// Adds the rays of a grid to its planes `first` to `last` - 1 along x.
template <typename T>
VOXELFIELD_MULTIVERSION void add_to_slab(const RayBundle<T>& rays, const T* values, int64_t grid, int32_t first,
                                         int32_t last, T* sums) {
  const int64_t plane = int64_t{rays.resolution[1]} * rays.resolution[2];
  const int64_t begin = first * plane, end = last * plane;
  const int64_t per_grid = rays.rays_per_grid > 0 ? rays.rays_per_grid : rays.count;
  T* const data = sums + grid * rays.vertices() * rays.channels;
  for (int64_t ray = grid * per_grid; ray < (grid + 1) * per_grid; ++ray) {
    Line<T> line(rays, ray);
    // The cells before a plane contain it too.
    if (line.misses() || !line.restrict_to(first > 0 ? first - 1 : 0, last)) continue;
    line.walk([] {},
              [&](T from, T to) {
                T weight[kCorners] = {};
                line.add_weights(from, to, weight);
                for (int corner = 0; corner < kCorners; ++corner) {
                  const int64_t vertex = line.cell.offset(corner);
                  if (vertex < begin || vertex >= end) continue;
                  const int64_t label = rays.label_of(vertex);
                  if (label < 0) continue;
                  const T* const row = values + rays.row(ray, label);
                  for (int64_t c = 0; c < rays.channels; ++c)
                    data[vertex * rays.channels + c] += weight[corner] * row[c];
                }
                return true;
              },
              [](int /*axis*/) {});
  }
}

struct Cpu : CpuBackend {
  static constexpr bool kAddsInAnyOrder = false;

  template <typename F>
  static void for_each(int64_t n, const F& f) {
    CpuBackend::for_each(n, f, 64);
  }

  template <typename T>
  static void backproject(const RayBundle<T>& rays, const T* values, void* sums, const double* /*scale*/) {
    const int64_t size = rays.resolution[0];
    const int64_t planes = std::max(kMinPlanes, (size + kSlabs - 1) / kSlabs), slabs = (size + planes - 1) / planes;
    const int64_t grids = rays.rays_per_grid > 0 ? rays.count / rays.rays_per_grid : 1;
    for_each_task(grids * slabs, [&](int64_t task, int64_t /*thread*/) {
      const auto first = static_cast<int32_t>(task % slabs * planes);
      const auto last = static_cast<int32_t>(std::min(first + planes, size));
      add_to_slab(rays, values, task / slabs, first, last, static_cast<T*>(sums));
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { LineOps<Cpu>::implement(m); }

}  // namespace voxelfield
