// Renderers of pyramids on the CPU, where networks of any width fit.
#include "common/tensors.h"

namespace voxelfield {
namespace {

bool pyramid_image_fits(const Tensor& /*like*/, int64_t /*width*/) { return true; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { m.impl("pyramid_image_fits", TORCH_BOX(&pyramid_image_fits)); }

}  // namespace voxelfield
