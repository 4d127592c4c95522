// Lines through grids on the CPU: a thread walks one ray after the other. Backprojection divides grids into slabs along
// x, to each of which one thread adds the parts of all rays, so that sums do not depend on the number of threads.
// Images are small enough that each of several parts of the rays has sums of its own.
#include "common/backend.h"
#include "lines/line_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kSlabs = 32, kMinPlanes = 16, kParts = 8;

// Whether rays cross an image whose vertices float32 can count.
template <typename T>
bool is_image(const RayBundle<T>& rays) {
  return rays.resolution[2] == 1 && std::max(rays.resolution[0], rays.resolution[1]) <= 1 << 24 && rays.channels == 1 &&
         rays.labels == nullptr;
}

template <typename T>
VOXELFIELD_MULTIVERSION void integrate_image(const RayBundle<T>& rays, const T* grid, int64_t begin, int64_t end,
                                             T* out) {
  for (int64_t ray = begin; ray < end; ++ray) {
    Line<T> line(rays, ray);
    const T* const data = grid + rays.grid_of(ray) * rays.vertices();
    T sum = T(0);
    line.walk_plane([&](T distance, T u, T v, T uv) {
      const T *const low = data + line.cell.origin, *const high = low + line.cell.step[0];
      sum += (distance - u - v + uv) * low[0] + (v - uv) * low[line.cell.step[1]] + (u - uv) * high[0] +
             uv * high[line.cell.step[1]];
    });
    out[ray] = sum;
  }
}

template <typename T>
VOXELFIELD_MULTIVERSION void add_to_image(const RayBundle<T>& rays, const T* values, int64_t begin, int64_t end,
                                          T* sums) {
  for (int64_t ray = begin; ray < end; ++ray) {
    Line<T> line(rays, ray);
    T* const data = sums + rays.grid_of(ray) * rays.vertices();
    const T value = values[ray];
    line.walk_plane([&](T distance, T u, T v, T uv) {
      T *const low = data + line.cell.origin, *const high = low + line.cell.step[0];
      low[0] += value * (distance - u - v + uv);
      low[line.cell.step[1]] += value * (v - uv);
      high[0] += value * (u - uv);
      high[line.cell.step[1]] += value * uv;
    });
  }
}

// Adds the rays of a grid to its planes `first` to `last` - 1 along x.
template <typename T>
VOXELFIELD_MULTIVERSION void add_to_slab(const RayBundle<T>& rays, const T* values, int64_t grid, int32_t first,
                                         int32_t last, T* sums) {
  const int64_t plane = int64_t{rays.resolution[1]} * rays.resolution[2];
  const int64_t begin = first * plane, end = last * plane;
  const int64_t per_grid = rays.rays_per_grid > 0 ? rays.rays_per_grid : rays.count;
  const bool single = rays.channels == 1 && rays.labels == nullptr;
  T* const data = sums + grid * rays.vertices() * rays.channels;
  for (int64_t ray = grid * per_grid; ray < (grid + 1) * per_grid; ++ray) {
    Line<T> line(rays, ray);
    // The cells before a plane contain it too.
    if (line.misses() || !line.restrict_to(first > 0 ? first - 1 : 0, last)) continue;
    line.walk([] {},
              [&](T from, T to) {
                T weight[kCorners] = {};
                line.add_weights(from, to, weight);
                for (int side = 0; side < 2; ++side) {
                  const int64_t plane_vertex = line.cell.offset(4 * side);
                  if (plane_vertex < begin || plane_vertex >= end) continue;
                  for (int corner = 4 * side; corner < 4 * side + 4; ++corner) {
                    const int64_t vertex = line.cell.offset(corner);
                    if (single) {
                      data[vertex] += weight[corner] * values[ray];
                      continue;
                    }
                    const int64_t label = rays.label_of(vertex);
                    if (label < 0) continue;
                    const T* const row = values + rays.row(ray, label);
                    for (int64_t c = 0; c < rays.channels; ++c)
                      data[vertex * rays.channels + c] += weight[corner] * row[c];
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
  static void for_each(int64_t n, const IntegrateRays<T, 1, false>& f) {
    if (!is_image(f.rays)) return CpuBackend::for_each(n, f, 64);
    for_each_range(f.rays.count, 64,
                   [&](int64_t begin, int64_t end) { integrate_image(f.rays, f.grid, begin, end, f.out); });
  }

  template <typename T>
  static void backproject(const RayBundle<T>& rays, const T* values, void* sums, const double* /*scale*/,
                          const Tensor& /*like*/) {
    const int64_t size = rays.resolution[0];
    const int64_t planes = std::max(kMinPlanes, (size + kSlabs - 1) / kSlabs), slabs = (size + planes - 1) / planes;
    const int64_t grids = rays.rays_per_grid > 0 ? rays.count / rays.rays_per_grid : 1;
    const int64_t total = grids * rays.vertices(), steps = rays.count * (size + rays.resolution[1]);
    if (is_image(rays) && kParts * total <= steps) {
      std::vector<T> parts(kParts * total);
      for_each_task(kParts, [&](int64_t part, int64_t /*thread*/) {
        const int64_t begin = rays.count * part / kParts, end = rays.count * (part + 1) / kParts;
        add_to_image(rays, values, begin, end, parts.data() + part * total);
      });
      for (int64_t i = 0; i < kParts * total; ++i) static_cast<T*>(sums)[i % total] += parts[i];
      return;
    }
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
