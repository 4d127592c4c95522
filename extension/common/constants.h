// Limits and layouts that are shared by host and device code, by several families of ops, or by C++ and Python. Python
// reads its part from the op `constants` (module/library.cpp), so that each number is defined only once. Plain C++, for
// tests without a GPU.
#pragma once

#include <cstdint>

namespace voxelfield {

// Maximum number of grids per call: the levels of a pyramid, or the parameters of one optimizer step.
constexpr int kMaxLevels = 16;

// Limits of a small network (mlp/): the number of matrices, and the rows or columns of each.
constexpr int kMaxLayers = 16;
constexpr int kMaxWidth = 128;

// Limits of a pyramid followed by a density network (fields/): its levels, the channels per level, the layers of a
// network that is evaluated during a march, and the outputs of the density network.
constexpr int kMaxFieldLevels = 8;
constexpr int kLevelChannels = 4;
constexpr int kMaxFieldLayers = 4;
constexpr int kMaxGeometry = 16;
// Raw density is clamped to this value. A density of e^12 per world unit is opaque within a ten-thousandth of a unit,
// so larger values would make no difference.
constexpr int kHighestRaw = 12;

// The highest degree of spherical harmonics.
constexpr int kMaxDegree = 3;

// Log2 of the cells along each axis of a brick, whose occupancy is stored in one word.
constexpr int32_t kBrickShift = 2;

// Maximum number of nested boxes (rays/nested_boxes.h).
constexpr int kMaxBoxes = 12;

// Packing (rays/segments.h) divides the rays into at most kMaxParts parts. The length of a part is a multiple of
// kPartRays rays and of kPartSegments segments.
constexpr int64_t kPartRays = 32;
constexpr int64_t kPartSegments = 64;
constexpr int64_t kMaxParts = 2048;
// The maximum number of step ranges that a walk through occupied cells stores for the second pass (rays/march_ops.h).
constexpr int kStepRanges = 8;

// A tile is 4 x 4 x 8 vertices of a grid; the shifts are log2 of these sizes (see optim/optim_ops.h). A tile id
// stores the position of the tile along each axis in kTileBits bits.
constexpr int kOptimizerTileShiftXY = 2;
constexpr int kOptimizerTileShiftZ = 3;
constexpr int kTileBits = 10;

// Sizes of a sparse grid (stencil/sparse_grid.h): vertices along each axis of a block, and of the atlas that stores the
// blocks.
constexpr int kBlockVertices = 8;
constexpr int64_t kMaxAtlasVertices = 4096;

// How a gradient is summed into a grid. The values are part of the op schemas.
enum class SplatMethod : int64_t { kAutomatic = 0, kAtomic = 1, kTiled = 2, kDeterministic = 3 };

// The bytes of shared memory that a block may use without an opt-in through the driver.
constexpr int kSharedWithoutOptIn = 48 << 10;

// Shared memory of launches whose requirements are known at compile time; each launch asserts its own limit. Launches
// that depend on a network are planned in mlp/plan.h and fields/pyramid_plan.h.
constexpr int kGatherShared = 24 << 10;
constexpr int kSplatTiledShared = kSharedWithoutOptIn;
constexpr int kRenderGridShared = kSharedWithoutOptIn;

}  // namespace voxelfield
