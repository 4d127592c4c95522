// Functions that host and device code share, called one by one for ops/test_device_helpers.py.
#include <algorithm>
#include <vector>

#include "cameras/lens.h"
#include "rays/ray_walk.h"
#include "stencil/trilinear.h"

using namespace voxelfield;

namespace {

// For each point and corner: the offset, and value, three first and three mixed derivatives (xy, xz, yz) of the weight.
template <typename Locator>
void write_stencils(const Locator& locator, const double* points, int64_t count, int64_t* offsets, double* weights) {
  for (int64_t n = 0; n < count; ++n) {
    const auto s = locator(points, n);
    for (int corner = 0; corner < kCorners; ++corner) {
      *offsets++ = s.empty ? 0 : s.offset(corner);
      const double all[] = {s.value(corner),
                            s.partial(corner, 0),
                            s.partial(corner, 1),
                            s.partial(corner, 2),
                            s.mixed_partial(corner, 0, 1),
                            s.mixed_partial(corner, 0, 2),
                            s.mixed_partial(corner, 1, 2)};
      for (const double weight : all) *weights++ = s.empty ? 0.0 : weight;
    }
  }
}

template <typename Cells>
void mark_hits(const Cells& cells, const RayView& ray, int32_t piece, uint8_t* walked, uint8_t* sampled) {
  const RayWalk<Cells> walk(cells, ray);
  const StepRange all = walk.range();
  for (int32_t begin = all.begin; begin < all.end; begin += piece) {
    walk.walk({begin, begin + piece < all.end ? begin + piece : all.end}, [&](const StepRange& hits) {
      for (int32_t k = hits.begin; k < hits.end; ++k) ++walked[k];
      return true;
    });
  }
  SampleWalk<Cells> samples(cells, ray);
  for (float t; samples.next(t);) ++sampled[ray.steps_before(t)];
}

}  // namespace

// `form` 0 finds any grid, 1 all but periodic ones, 2 the common case.
extern "C" void stencils(int form, const double* points, int64_t count, const int32_t* size, int padding, bool aligned,
                         bool nearest, int64_t* offsets, double* weights) {
  const GridLocator<double> grid{{size[0], size[1], size[2]}, static_cast<Padding>(padding), 1, 0, aligned, nearest};
  if (form == 0) write_stencils(grid, points, count, offsets, weights);
  if (form == 1) write_stencils(grid.without_wrapping(), points, count, offsets, weights);
  if (form == 2) write_stencils(grid.plain(), points, count, offsets, weights);
}

// Counts how often each lattice position is a hit, by walks of pieces of the ray and by samples in their order. `ray`
// is its origin, direction, near, far, offset and step.
extern "C" void hits(const float* ray, const bool* occupied, const uint8_t* distances, const int32_t* size,
                     const float* aabb, int32_t piece, uint8_t* walked, uint8_t* sampled) {
  const RayView view{ray, ray + 3, ray[6], ray[7], ray[8], ray[9], 1.0f / ray[9]};
  OccupancyView bits{nullptr, {size[0], size[1], size[2]}, {}, aabb};
  for (int axis = 0; axis < 3; ++axis) bits.bricks[axis] = (size[axis] + kBrickCells - 1) / kBrickCells;
  std::vector<int64_t> words(bits.bricks[0] * bits.bricks[1] * bits.bricks[2]);
  for (size_t brick = 0; brick < words.size(); ++brick) PackBricks{occupied, bits, words.data()}(brick);
  bits.words = words.data();
  mark_hits(CellsView{bits, distances}, view, piece, walked, sampled);
}

// Converts rays to image points, or image points to rays.
extern "C" void lens(bool inverse, const float* row, const float* in, int64_t count, float* out) {
  for (int64_t n = 0; n < count; ++n) {
    if (inverse) {
      const CameraRay ray = Lens{row}.ray_through(in[2 * n], in[2 * n + 1]);
      std::copy_n(&ray.right, 3, out + 3 * n);
    } else {
      float point[2];
      Lens{row}.point_of({in[3 * n], in[3 * n + 1], in[3 * n + 2]}, point);
      std::copy_n(point, 2, out + 2 * n);
    }
  }
}
