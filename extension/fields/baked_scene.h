// A field that is stored as values at the vertices of a sparse lattice, and the walk of a ray through it. Nothing
// stored depends on the viewing direction: what a ray sums up is shaded afterwards, once per ray (Hedman et al. 2021,
// SNeRG; Reiser et al. 2023, MERF).
#pragma once

#include "common/narrow.h"
#include "rays/nested_boxes.h"
#include "stencil/sparse_grid.h"
#include "volume/keep_rule.h"

namespace voxelfield {

// The 8-bit values of a vertex, which are read at once.
template <int Values>
struct alignas(Values) BakedRow {
  uint8_t value[Values];
};

struct BakedScene {
  CellsView cells;
  BlockTable table;
  const Half* log_density;  // (X, Y, Z), of the atlas; rows of eight along z, each in one block, start at 16 bytes
  const uint8_t* values;    // (X, Y, Z, Values)
  int32_t atlas[3];
  const float* aabb;  // the box of the lattice, in warped coordinates
  float step, steps_per_length;
  KeepRule<float> rule;
  NestedBoxes boxes;  // used only if rays are cut into pieces
};

template <int Values>
struct BakedTotals {
  float opacity = 0.0f, depth = 0.0f;
  float values[Values] = {};
};

template <bool Pieces, int Values>
class BakedWalk {
 public:
  VOXELFIELD_HOST_DEVICE explicit BakedWalk(const BakedScene& scene) : scene_(scene), light_(scene.rule) {}

  VOXELFIELD_HOST_DEVICE BakedTotals<Values> operator()(Ray ray) {
    if constexpr (Pieces) {
      RayPieces pieces(scene_.boxes, ray);
      while (!light_.stopped() && pieces.next(scene_.boxes, scene_.step, ray)) {
        piece(ray, [&](float t) { return pieces.distance(scene_.boxes, t); });
      }
    } else if (ray.near < ray.far) {
      piece(ray, [](float t) { return t; });
    }
    return totals_;
  }

 private:
  template <typename Distance>
  VOXELFIELD_HOST_DEVICE void piece(const Ray& ray, const Distance& distance) {
    const RayView view = ray.view(scene_.step, scene_.steps_per_length);
    const CubeRay cube(view, scene_.aabb);
    SampleWalk<CellsView> walk(scene_.cells, view);
    for (float t; !light_.stopped() && walk.next(t);) {
      float point[3], placed[3];
      cube.point(t, point);
      if (!scene_.table.place(point, placed)) continue;
      const GridLocator<float, true> locator{
          {scene_.atlas[0], scene_.atlas[1], scene_.atlas[2]}, Padding::kBorder, 1, 0, true, false};
      const Stencil<float, int32_t> stencil = locator(placed, 0);
      float log_density = 0.0f;
      VOXELFIELD_UNROLL
      for (int k = 0; k < kCorners; k += 2) {
        const Pair pair = pair_along_z(stencil.offset(k));
        log_density += stencil.value(k) * pair.lower + stencil.value(k + 1) * pair.upper;
      }
      const EvaluatedSample<float> sample =
          light_.evaluate(absorption_of_density(std::exp(log_density), scene_.step), true, SingleThread{});
      if (sample.kept) add(stencil, sample.weight, distance(t));
    }
  }

  struct Pair {
    float lower, upper;
  };

  // The logarithms at a vertex and at the next one along z, which is in the same block.
  VOXELFIELD_HOST_DEVICE Pair pair_along_z(int32_t vertex) const {
#if defined(__CUDA_ARCH__)
    // One load of the whole row replaces two, of values that may lie in different words.
    const int32_t within = vertex % kBlockVertices;
    const uint4 row = __ldg(reinterpret_cast<const uint4*>(scene_.log_density + (vertex - within)));
    const unsigned low = within < 4 ? (within < 2 ? row.x : row.y) : (within < 6 ? row.z : row.w);
    const unsigned next = within < 4 ? (within < 2 ? row.y : row.z) : row.w;
    const unsigned both = within % 2 == 0 ? low : __funnelshift_r(low, next, 16);
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(both));
    return {pair.x, pair.y};
#else
    return {widen(scene_.log_density[vertex]), widen(scene_.log_density[vertex + 1])};
#endif
  }

  VOXELFIELD_HOST_DEVICE void add(const Stencil<float, int32_t>& stencil, float weight, float t) {
    totals_.opacity += weight;
    totals_.depth += weight * t;
    const auto* rows = reinterpret_cast<const BakedRow<Values>*>(scene_.values);
    float sum[Values] = {};
    VOXELFIELD_UNROLL
    for (int k = 0; k < kCorners; ++k) {
      const BakedRow<Values> row = rows[stencil.offset(k)];
      const float share = weight * stencil.value(k);
      VOXELFIELD_VECTORIZE
      for (int v = 0; v < Values; ++v) sum[v] += share * static_cast<float>(row.value[v]);
    }
    VOXELFIELD_VECTORIZE
    for (int v = 0; v < Values; ++v) totals_.values[v] += sum[v];
  }

  const BakedScene& scene_;
  VisibleLight<float> light_;
  BakedTotals<Values> totals_;
};

}  // namespace voxelfield
