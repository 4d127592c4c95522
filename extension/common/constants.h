// Limits and layouts that host and device code, or several families, or C++ and Python share. Python reads its part
// from the op `constants` (module/library.cpp), so that no number is written down twice. Plain C++, for tests without
// a GPU.
#pragma once

#include <cstdint>

namespace voxelfield {

// Grids that one call takes: the levels of a pyramid, or the parameters of one optimizer step.
constexpr int kMaxLevels = 16;

// A small network (mlp/): matrices, and rows or columns of each.
constexpr int kMaxLayers = 16;
constexpr int kMaxWidth = 128;

// A pyramid followed by a density network (fields/): its levels, their channels, the layers of a network beside a
// march, and the outputs of the density network.
constexpr int kMaxPyramidLevels = 8;
constexpr int kLevelChannels = 4;
constexpr int kMaxFieldLayers = 4;
constexpr int kFieldOutputs = 16;
// Raw density is clamped here: e^12 per world unit is opaque within a ten-thousandth of one, so nothing is gained
// beyond.
constexpr int kHighestRawDensity = 12;

// The highest band of spherical harmonics.
constexpr int kMaxShDegree = 3;

// Cells along each axis of a brick, whose occupancy one word holds, as a power of two.
constexpr int32_t kBrickShift = 2;

// Nested boxes (rays/nested_boxes.h).
constexpr int kMaxBoxes = 12;

// Packing (rays/packing.h) counts a multiple of these many rays, and of these many segments, in each of so many parts.
constexpr int64_t kPartRays = 32;
constexpr int64_t kPartSegments = 64;
constexpr int64_t kMaxParts = 2048;
// Ranges of steps that a walk through occupied cells keeps for the second pass (rays/march_ops.h).
constexpr int kStoredRanges = 8;

// A tile is 4 x 4 x 8 vertices of a grid, as powers of two; see optim/vertex_grid.h. Its id has the tile's number
// along each axis in so many bits.
constexpr int kTileShiftXY = 2;
constexpr int kTileShiftZ = 3;
constexpr int kTileBits = 10;

// A sparse grid (stencil/sparse_grid.h): vertices along each axis of its blocks, and of the atlas they lie in.
constexpr int kBlockVertices = 8;
constexpr int64_t kMaxAtlasVertices = 4096;

// How a gradient is summed into a grid. The numbers are part of the op schemas.
enum class SplatMethod : int64_t { kAutomatic = 0, kAtomic = 1, kTiled = 2, kDeterministic = 3, kBinned = 4 };

// Bytes of shared memory that a block may have without asking the driver for more.
constexpr int kSharedWithoutOptIn = 48 << 10;

// Shared memory of launches whose requirements are known at compile time; each launch asserts its own limit. Launches
// that depend on a network are planned in mlp/plan.h and fields/pyramid_plan.h.
constexpr int kGatherShared = 24 << 10;
constexpr int kSplatTiledShared = kSharedWithoutOptIn;
constexpr int kSplatBinnedShared = 56 << 10;
constexpr int kSplatCoarseShared = 56 << 10;
constexpr int kRenderGridShared = kSharedWithoutOptIn;

}  // namespace voxelfield
