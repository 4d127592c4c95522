// Lines through grids on the CPU: a thread walks one ray after the other. Backprojection divides grids into slabs along
// x, to each of which one thread adds the parts of all rays, so that sums do not depend on the number of threads.
#include "common/backend.h"
#include "lines/line_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kSlabs = 32, kMinPlanes = 4;

// Adds the rays of a grid to its planes `first` to `last` - 1 along x.
template <typename T>
VOXELFIELD_MULTIVERSION void add_to_slab(const Backprojection<T>& job, int64_t grid, int32_t first, int32_t last,
                                         T* sums) {
  const int64_t plane = int64_t{job.rays.resolution[1]} * job.rays.resolution[2];
  const int64_t begin = first * plane, end = last * plane;
  const int64_t per_grid = job.rays.rays_per_grid > 0 ? job.rays.rays_per_grid : job.rays.count;
  T* const data = sums + grid * job.rays.vertices() * job.channels;
  for (int64_t ray = grid * per_grid; ray < (grid + 1) * per_grid; ++ray) {
    Line<T> line(job.rays, ray);
    // The cells before a plane contain it too.
    if (line.misses() || !line.restrict_to(first > 0 ? first - 1 : 0, last)) continue;
    const T* const values = job.values + ray * job.labels.count * job.channels;
    line.walk(
        [&](T from, T to) {
          T weight[kCorners] = {};
          line.add_weights(from, to, weight);
          for (int corner = 0; corner < kCorners; ++corner) {
            const int64_t vertex = line.cell.offset(corner);
            int64_t label = 0;
            if (vertex < begin || vertex >= end || !job.labels.find(vertex, label)) continue;
            for (int64_t c = 0; c < job.channels; ++c) {
              data[vertex * job.channels + c] += weight[corner] * values[label * job.channels + c];
            }
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
  static void backproject(const Backprojection<T>& job, void* sums, const double* /*scale*/) {
    const int64_t size = job.rays.resolution[0];
    const int64_t planes = std::max(kMinPlanes, (size + kSlabs - 1) / kSlabs), slabs = (size + planes - 1) / planes;
    for_each_task(job.grids() * slabs, [&](int64_t task, int64_t /*thread*/) {
      const int64_t first = task % slabs * planes;
      add_to_slab(job, task / slabs, static_cast<int32_t>(first), static_cast<int32_t>(std::min(first + planes, size)),
                  static_cast<T*>(sums));
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { LineOps<Cpu>::implement(m); }

}  // namespace voxelfield
