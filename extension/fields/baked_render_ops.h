// A field that is stored as values at the vertices of a sparse lattice, and the walk of a ray through it. Nothing
// stored depends on the viewing direction: what a ray sums up is shaded afterwards, once per ray (Hedman et al. 2021,
// SNeRG; Reiser et al. 2023, MERF). The host side calls Backend::render<Pieces, Values>(scene, pixels).
#pragma once

#include "cameras/camera.h"
#include "common/narrow.h"
#include "rays/cut_rays_ops.h"
#include "rays/ray_inputs.h"
#include "stencil/sparse_grid_ops.h"
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

// The pixels of an image, and where the sums and directions of their rays go.
template <int Values>
struct BakedPixels {
  CameraView camera;
  float *sums, *opacity, *depth, *directions;

  template <bool Pieces>
  VOXELFIELD_HOST_DEVICE void render(const BakedScene& scene, int64_t x, int64_t y) const {
    const int64_t pixel = y * camera.width + x;
    const Ray ray = camera(x, y);
    for (int axis = 0; axis < 3; ++axis) directions[3 * pixel + axis] = ray.direction[axis];
    const BakedTotals<Values> totals = BakedWalk<Pieces, Values>(scene)(ray);
    VOXELFIELD_VECTORIZE
    for (int v = 0; v < Values; ++v) sums[Values * pixel + v] = totals.values[v] * (1.0f / 255.0f);
    opacity[pixel] = totals.opacity;
    depth[pixel] = totals.depth / fmaxf(totals.opacity, 1e-6f);
  }
};

template <typename Backend>
struct BakedImageOps {
  static TensorTuple<4> render_baked_image(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens,
                                           int64_t width, int64_t height, const Tensor& occupied,
                                           std::vector<int64_t> resolution, const Tensor& aabb_occupancy,
                                           const Tensor& any_log_density, const Tensor& any_values,
                                           const Tensor& blocks, const Tensor& any_aabb, const OptionalTensor& any_clip,
                                           double step, double min_transmittance, double min_weight,
                                           std::vector<double> boxes) {
    const CameraInputs camera{c2w, intrinsics, lens, width, height, std::nullopt};
    const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
    const typename Backend::Guard guard(c2w);
    check_step(step);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    const Tensor log_density = checked("log_density", any_log_density, {kAny, kAny, kAny}, ScalarType::Half, c2w);
    const std::vector<int64_t> atlas = shape_of(log_density);
    const Tensor values = checked("values", any_values, {atlas[0], atlas[1], atlas[2], kAny}, ScalarType::Byte, c2w);
    const Tensor aabb = checked("aabb", any_aabb, {2, 3}, ScalarType::Float, c2w);
    const OptionalTensor clip = checked("clip", any_clip, {2, 3}, ScalarType::Float, c2w);
    const int64_t count = values.size(3);
    STD_TORCH_CHECK(count == 8 || count == 16, "values must be 8 or 16 for each vertex, got ", count);
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(values.data_ptr()) % count == 0, "values must start at a multiple of ",
                    count, " bytes");
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(log_density.data_ptr()) % (kBlockVertices * sizeof(Half)) == 0,
                    "log_density must start at a multiple of ", kBlockVertices * sizeof(Half), " bytes");
    STD_TORCH_CHECK(log_density.numel() < 0x7fffffff, "log_density must have fewer than 2^31 - 1 numbers, got ",
                    log_density.numel());
    BakedScene scene{};
    scene.cells = cells.either();
    scene.table = block_table("blocks", blocks, atlas, c2w);
    scene.log_density = data_of(log_density);
    scene.values = data_of(values);
    for (int axis = 0; axis < 3; ++axis) scene.atlas[axis] = static_cast<int32_t>(atlas[axis]);
    scene.aabb = data_of(aabb);
    scene.step = static_cast<float>(step);
    scene.steps_per_length = steps_per_length(step);
    scene.rule = {static_cast<float>(min_transmittance), static_cast<float>(min_weight)};
    const bool pieces = !boxes.empty();
    STD_TORCH_CHECK(pieces != clip.has_value(), "clip must be given if and only if there are no boxes, which cut rays");
    if (pieces) scene.boxes = nested_boxes(boxes);
    const Tensor sums = new_empty(c2w, {height, width, count}, ScalarType::Float);
    const Tensor opacity = new_empty(c2w, {height, width}, ScalarType::Float);
    const Tensor depth = new_empty(c2w, {height, width}, ScalarType::Float);
    const Tensor directions = new_empty(c2w, {height, width, 3}, ScalarType::Float);
    const CameraView view = camera.view(data_of(clip));
    dispatch_flag(pieces, [&](auto in_pieces) {
      dispatch_value<8, 16>(count, [&](auto number) {
        Backend::template render<decltype(in_pieces)::value>(
            scene, BakedPixels<decltype(number)::value>{view, data_of(sums), data_of(opacity), data_of(depth),
                                                        data_of(directions)});
      });
    });
    return {sums, opacity, depth, directions};
  }

  static void implement(Library& m) { m.impl("render_baked_image", TORCH_BOX(&BakedImageOps::render_baked_image)); }
};

}  // namespace voxelfield
