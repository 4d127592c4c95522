// How much shared memory a block of each launch may take. Plain C++, so that a test can compare it with what every GPU
// allows without having one. Launches whose needs depend on a network are planned in mlp/plan.h and
// fields/pyramid_plan.h.
#pragma once

namespace voxelfield {

// Bytes that a block may have without asking the driver for more.
constexpr int kSharedWithoutOptIn = 48 << 10;

// Bounds of launches whose needs are known when they are compiled; each asserts its own.
constexpr int kGatherShared = 24 << 10;
constexpr int kSplatTiledShared = kSharedWithoutOptIn;
constexpr int kSplatBinnedShared = 56 << 10;
constexpr int kSplatCoarseShared = 56 << 10;
constexpr int kRenderGridShared = kSharedWithoutOptIn;

}  // namespace voxelfield
