// A field that is stored at the vertices of a sparse lattice, and the walk of a ray through it. Nothing stored depends
// on the viewing direction: what a ray sums up is shaded afterwards, once per ray, by a network whose inputs are
// written here (Hedman et al. 2021, SNeRG; Reiser et al. 2023, MERF). Each block has values at as many vertices as its
// values need, in 4 bits between a least and a greatest value of its own. The host side calls
// Backend::render<Pieces, Values>(scene, pixels).
#pragma once

#include "cameras/camera.h"
#include "color/color.h"
#include "common/narrow.h"
#include "common/whole_numbers.h"
#include "rays/cut_rays_ops.h"
#include "rays/ray_inputs.h"
#include "stencil/sparse_grid_ops.h"
#include "volume/keep_rule.h"

namespace voxelfield {

// The least or the greatest values of a block, in 8 bits.
template <int Values>
struct alignas(Values) BakedRange {
  uint8_t value[Values];
};

// The values of a vertex, in 4 bits: of each two, the first one is lower.
template <int Values>
struct alignas(Values / 2) BakedVertex {
  uint32_t eight[Values / 8];

  VOXELFIELD_HOST_DEVICE float operator[](int value) const {
    return int_to_float(static_cast<int32_t>(eight[value / 8] >> 4 * (value % 8) & 15));
  }
};

// The rows from the first to beyond the last of the eight vertices around a point, at most.
constexpr int32_t kCellSpan = (kBlockVertices + 1) * kBlockVertices + 2;

// The code of a density that is not finite, which makes its pixels not finite.
constexpr int32_t kNotFinite = 255;

struct BakedScene {
  CellsView cells;
  BlockTable table;
  const uint8_t* density;  // (X, Y, Z), of the atlas; rows of eight along z, each in one block, start at 8 bytes
  const uint8_t* values;   // (vertices, Values / 2): BakedVertex
  const int32_t* first;    // for each block of the atlas, its first vertex
  const uint8_t* side;     // the number of its vertices along each axis
  const uint8_t* ranges;   // (blocks, 2, Values): BakedRange, least and greatest
  int32_t vertices;
  float log_low, log_step;  // the logarithm of density that code 0 stands for, and the difference between codes
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
      float code = 0.0f;
      int32_t highest = 0;
      VOXELFIELD_UNROLL
      for (int k = 0; k < kCorners; k += 2) {
        const Pair pair = pair_along_z(stencil.offset(k));
        code +=
            stencil.value(k) * static_cast<float>(pair.lower) + stencil.value(k + 1) * static_cast<float>(pair.upper);
        const int32_t higher = pair.lower > pair.upper ? pair.lower : pair.upper;
        highest = higher > highest ? higher : highest;
      }
      const float log_density = highest == kNotFinite ? NAN : scene_.log_low + scene_.log_step * code;
      const EvaluatedSample<float> sample =
          light_.evaluate(absorption_of_density(std::exp(log_density), scene_.step), true, SingleThread{});
      if (sample.kept) add(stencil, sample.weight, distance(t));
    }
  }

  struct Pair {
    int32_t lower, upper;
  };

  // The codes of a vertex and of the next one along z, which is in the same block.
  VOXELFIELD_HOST_DEVICE Pair pair_along_z(int32_t vertex) const {
#if defined(__CUDA_ARCH__)
    // One load of the whole row replaces two, of bytes that may lie in different words.
    const int32_t within = vertex % kBlockVertices;
    const uint2 row = __ldg(reinterpret_cast<const uint2*>(scene_.density + (vertex - within)));
    const uint32_t both = static_cast<uint32_t>((uint64_t{row.y} << 32 | row.x) >> 8 * within);
    return {static_cast<int32_t>(both & 255), static_cast<int32_t>(both >> 8 & 255)};
#else
    return {scene_.density[vertex], scene_.density[vertex + 1]};
#endif
  }

  VOXELFIELD_HOST_DEVICE void add(const Stencil<float, int32_t>& stencil, float weight, float t) {
    totals_.opacity += weight;
    totals_.depth += weight * t;
    int32_t block = 0;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      block = block * (scene_.atlas[axis] / kBlockVertices) + stencil.lower[axis] / kBlockVertices;
    }
    // Invalid tables must not cause accesses out of bounds.
    const int32_t stored = scene_.side[block], side = stored < 2                ? 2
                                                      : stored < kBlockVertices ? stored
                                                                                : kBlockVertices;
    int32_t vertex = 0;
    float share[3][2];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float within = static_cast<float>(stencil.lower[axis] % kBlockVertices) + stencil.weight[axis][1];
      const float u = within * static_cast<float>(side - 1) * (1.0f / kBlockCells);
      const int32_t lower = static_cast<int32_t>(u) < side - 2 ? static_cast<int32_t>(u) : side - 2;
      vertex = vertex * side + lower;
      share[axis][1] = u - static_cast<float>(lower);
      share[axis][0] = 1.0f - share[axis][1];
    }
    vertex = wrapping_add(vertex, scene_.first[block]);
    if (vertex < 0 || vertex > scene_.vertices - kCellSpan) vertex = 0;
    const auto* vertices = reinterpret_cast<const BakedVertex<Values>*>(scene_.values) + vertex;
    float sum[Values] = {};
    VOXELFIELD_UNROLL
    for (int k = 0; k < kCorners; ++k) {
      const int x = corner_side(k, 0), y = corner_side(k, 1), z = corner_side(k, 2);
      const BakedVertex<Values> corner = vertices[(x * side + y) * side + z];
      const float part = share[0][x] * share[1][y] * share[2][z];
      VOXELFIELD_UNROLL
      for (int v = 0; v < Values; ++v) sum[v] += part * corner[v];
    }
    const auto* ranges = reinterpret_cast<const BakedRange<Values>*>(scene_.ranges) + 2 * static_cast<int64_t>(block);
    const BakedRange<Values> least = ranges[0], greatest = ranges[1];
    VOXELFIELD_VECTORIZE
    for (int v = 0; v < Values; ++v) {
      const float low = static_cast<float>(least.value[v]), high = static_cast<float>(greatest.value[v]);
      totals_.values[v] += weight * (low + (high - low) * (1.0f / 15.0f) * sum[v]);
    }
  }

  const BakedScene& scene_;
  VisibleLight<float> light_;
  BakedTotals<Values> totals_;
};

// The inputs of the colour network for a pixel: mean values, then the spherical harmonics of the ray's direction.
template <int Values, typename scalar_t>
struct alignas(8) ShadingRow {
  scalar_t input[Values + kMaxShBasis];
};

// The pixels of an image, and where their results go.
template <int Values, typename scalar_t>
struct BakedPixels {
  CameraView camera;
  const float *low, *extent;  // (Values), what 0 stands for, and 255 less 0
  const float* background;
  int degree;  // of the harmonics; those of higher degrees are zero
  ShadingRow<Values, scalar_t>* inputs;
  float *rgb, *opacity, *depth;

  template <bool Pieces>
  VOXELFIELD_HOST_DEVICE void render(const BakedScene& scene, int64_t x, int64_t y) const {
    const int64_t pixel = y * camera.width + x;
    const Ray ray = camera(static_cast<int32_t>(x), static_cast<int32_t>(y));
    const BakedTotals<Values> totals = BakedWalk<Pieces, Values>(scene)(ray);
    const float scale = 1.0f / fmaxf(totals.opacity, 1e-6f);
    ShadingRow<Values, scalar_t> row;
    VOXELFIELD_UNROLL
    for (int v = 0; v < Values; ++v) {
      const float mean = low[v] + extent[v] * (totals.values[v] * (1.0f / 255.0f)) * scale;
      if (v < 3) rgb[3 * pixel + v] = totals.opacity * mean + (1.0f - totals.opacity) * background[v];
      row.input[v] = static_cast<scalar_t>(mean);
    }
    float basis[kMaxShBasis] = {};
    // The direction of a ray that sees nothing may not be finite.
    if (totals.opacity != 0.0f) spherical_harmonics(ray.direction, degree, basis);
    VOXELFIELD_UNROLL
    for (int i = 0; i < kMaxShBasis; ++i) row.input[Values + i] = static_cast<scalar_t>(basis[i]);
    inputs[pixel] = row;
    opacity[pixel] = totals.opacity;
    depth[pixel] = totals.depth * scale;
  }
};

template <typename Backend>
struct BakedImageOps {
  static TensorTuple<4> render_baked_image(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens,
                                           int64_t width, int64_t height, int64_t across, const Tensor& occupied,
                                           std::vector<int64_t> resolution, const Tensor& aabb_occupancy,
                                           const Tensor& any_density, double log_low, double log_step,
                                           const Tensor& any_values, const Tensor& any_first, const Tensor& any_side,
                                           const Tensor& any_ranges, const Tensor& any_low, const Tensor& any_extent,
                                           const Tensor& blocks, const Tensor& any_aabb, const OptionalTensor& any_clip,
                                           const Tensor& background, int64_t degree, double step,
                                           double min_transmittance, double min_weight, std::vector<double> boxes) {
    const CameraInputs camera{c2w, intrinsics, lens, width, height, across, background};
    const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
    const typename Backend::Guard guard(c2w);
    check_step(step);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    STD_TORCH_CHECK(degree >= 0 && degree <= kMaxDegree, "degree must be 0 to 3, got ", degree);
    const Tensor density = checked("density", any_density, {kAny, kAny, kAny}, ScalarType::Byte, c2w);
    const std::vector<int64_t> atlas = shape_of(density);
    const Tensor values = checked("values", any_values, {kAny, kAny}, ScalarType::Byte, c2w);
    const int64_t vertices = values.size(0), count = 2 * values.size(1);
    STD_TORCH_CHECK(count == 8 || count == 16, "values must be 8 or 16 for each vertex, got ", count);
    STD_TORCH_CHECK(vertices >= kCellSpan && vertices < 0x7fffffff, "values must have ", kCellSpan,
                    " to 2^31 - 2 vertices, got ", vertices);
    const int64_t stored = density.numel() / (kBlockVertices * kBlockVertices * kBlockVertices);
    const Tensor first = checked("first", any_first, {stored}, ScalarType::Int, c2w);
    const Tensor side = checked("side", any_side, {stored}, ScalarType::Byte, c2w);
    const Tensor ranges = checked("ranges", any_ranges, {stored, 2, count}, ScalarType::Byte, c2w);
    const Tensor low = checked("low", any_low, {count}, ScalarType::Float, c2w);
    const Tensor extent = checked("extent", any_extent, {count}, ScalarType::Float, c2w);
    const Tensor aabb = checked("aabb", any_aabb, {2, 3}, ScalarType::Float, c2w);
    const OptionalTensor clip = checked("clip", any_clip, {2, 3}, ScalarType::Float, c2w);
    const auto check_start = [](const char* name, const Tensor& bytes, int64_t multiple) {
      STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(bytes.data_ptr()) % multiple == 0, name,
                      " must start at a multiple of ", multiple, " bytes");
    };
    check_start("density", density, kBlockVertices);
    check_start("values", values, count / 2);
    check_start("ranges", ranges, count);
    STD_TORCH_CHECK(density.numel() < 0x7fffffff, "density must have fewer than 2^31 - 1 numbers, got ",
                    density.numel());
    BakedScene scene{};
    scene.cells = cells.either();
    scene.table = block_table("blocks", blocks, atlas, c2w);
    scene.density = data_of(density);
    scene.values = data_of(values);
    scene.first = data_of(first);
    scene.side = data_of(side);
    scene.ranges = data_of(ranges);
    scene.vertices = static_cast<int32_t>(vertices);
    scene.log_low = static_cast<float>(log_low);
    scene.log_step = static_cast<float>(log_step);
    for (int axis = 0; axis < 3; ++axis) scene.atlas[axis] = static_cast<int32_t>(atlas[axis]);
    scene.aabb = data_of(aabb);
    scene.step = static_cast<float>(step);
    scene.steps_per_length = steps_per_length(step);
    scene.rule = {static_cast<float>(min_transmittance), static_cast<float>(min_weight)};
    const bool pieces = !boxes.empty();
    STD_TORCH_CHECK(pieces != clip.has_value(), "clip must be given if and only if there are no boxes, which cut rays");
    if (pieces) scene.boxes = nested_boxes(boxes);
    using scalar_t = typename Backend::ShadingInput;
    const Tensor inputs = new_empty(c2w, {height * width, count + kMaxShBasis}, scalar_type_of<scalar_t>());
    const Tensor rgb = new_empty(c2w, {height, width, 3}, ScalarType::Float);
    const Tensor opacity = new_empty(c2w, {height, width}, ScalarType::Float);
    const Tensor depth = new_empty(c2w, {height, width}, ScalarType::Float);
    const CameraView view = camera.view(data_of(clip));
    dispatch_flag(pieces, [&](auto in_pieces) {
      dispatch_value<8, 16>(count, [&](auto number) {
        constexpr int kValues = decltype(number)::value;
        Backend::template render<decltype(in_pieces)::value>(
            scene, BakedPixels<kValues, scalar_t>{view, data_of(low), data_of(extent), data_of(camera.background),
                                                  static_cast<int>(degree),
                                                  reinterpret_cast<ShadingRow<kValues, scalar_t>*>(inputs.data_ptr()),
                                                  data_of(rgb), data_of(opacity), data_of(depth)});
      });
    });
    return {rgb, opacity, depth, inputs};
  }

  static void implement(Library& m) { m.impl("render_baked_image", TORCH_BOX(&BakedImageOps::render_baked_image)); }
};

}  // namespace voxelfield
