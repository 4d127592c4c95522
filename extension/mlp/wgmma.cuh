// Matrix products of a warpgroup, four warps, whose operands are in shared memory (`wgmma`, on sm_90a only), and the
// layout of these operands.
//
// A product's operand is 16 numbers deep. A row of a matrix in shared memory is a line of 128 or 64 bytes, with its
// pieces of 16 bytes permuted so that eight lines cover all banks ("swizzle"); a wider matrix is several such panels,
// one after the other. Both orders of an operand can be read from that layout, so no matrix is transposed.
#pragma once

#include "mlp/fragments.cuh"

namespace voxelfield {

constexpr int kWarpgroup = 4 * kWarp;

// A matrix of float16 in shared memory, in panels of `Line` bytes a row. It begins at a multiple of 8 lines.
template <int Line>
struct PanelMatrix {
  unsigned address;
  int panel_bytes;

  // The address of the column `column`, an even number, of a row.
  __device__ __forceinline__ unsigned at(int row, int column) const {
    const int piece = column % (Line / 2) / 8 ^ (Line == 128 ? row % 8 : row / 2 % 4);
    return address + column / (Line / 2) * panel_bytes + row * Line + piece * 16 + column % 8 * 2;
  }

  // The address that a lane passes to ldmatrix and stmatrix for the Fragment at `row`, `column`.
  __device__ __forceinline__ unsigned fragment(int row, int column) const {
    return at(row + lane_of_warp() % 16, column + lane_of_warp() / 16 * 8);
  }

  // The operand whose depth is along columns: the 16 columns from 16 * step on, of the rows from `row` on.
  __device__ __forceinline__ uint64_t along_columns(int row, int step) const {
    return operand(address + step / (Line / 32) * panel_bytes + row * Line + step % (Line / 32) * 32);
  }

  // The operand whose depth is along rows: the 16 rows from 16 * step on, of the columns from a panel's first one on.
  __device__ __forceinline__ uint64_t along_rows(int step, int panel = 0) const {
    return operand(address + panel * panel_bytes + step * 16 * Line);
  }

 private:
  __device__ __forceinline__ uint64_t operand(unsigned from) const {
    const unsigned low = (from & 0x3ffff) >> 4 | static_cast<unsigned>(panel_bytes) >> 4 << 16;
    const unsigned high = (8 * Line) >> 4 | (Line == 128 ? 1u : 2u) << 30;
    return static_cast<uint64_t>(high) << 32 | low;
  }
};

// The dimension along which an operand's depth is; the values are those of the instruction.
constexpr int kAlongColumns = 0, kAlongRows = 1;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define VOXELFIELD_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VOXELFIELD_SUMS_16(d, i) \
  VOXELFIELD_SUMS_4(d, i), VOXELFIELD_SUMS_4(d, i + 4), VOXELFIELD_SUMS_4(d, i + 8), VOXELFIELD_SUMS_4(d, i + 12)
#define VOXELFIELD_SUMS_64(d) \
  VOXELFIELD_SUMS_16(d, 0), VOXELFIELD_SUMS_16(d, 16), VOXELFIELD_SUMS_16(d, 32), VOXELFIELD_SUMS_16(d, 48)
#define VOXELFIELD_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define VOXELFIELD_NAMES_64                                                                      \
  VOXELFIELD_NAMES_16                                                                            \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "   \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// sums += left * right for 64 rows and 128, 32 or 8 columns, or sums = left * right if `from_zero`. The warpgroup must
// not touch the sums, nor change the operands, until it has waited for the product.
template <int Left, int Right>
__device__ __forceinline__ void warpgroup_multiply(float (&sums)[64], uint64_t left, uint64_t right, bool from_zero) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{" VOXELFIELD_NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;}"
      : VOXELFIELD_SUMS_64(sums)
      : "l"(left), "l"(right), "r"(int(from_zero)), "n"(Left), "n"(Right));
}

template <int Right>
__device__ __forceinline__ void warpgroup_multiply(float (&sums)[64], const Fragment& left, uint64_t right,
                                                   bool from_zero) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{" VOXELFIELD_NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
      : VOXELFIELD_SUMS_64(sums)
      : "r"(left.part[0]), "r"(left.part[1]), "r"(left.part[2]), "r"(left.part[3]), "l"(right), "r"(int(from_zero)),
        "n"(Right));
}

template <int Left, int Right>
__device__ __forceinline__ void warpgroup_multiply(float (&sums)[16], uint64_t left, uint64_t right, bool from_zero) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{" VOXELFIELD_NAMES_16 "}, %16, %17, p, 1, 1, %19, %20;}"
      : VOXELFIELD_SUMS_16(sums, 0)
      : "l"(left), "l"(right), "r"(int(from_zero)), "n"(Left), "n"(Right));
}

template <int Left, int Right>
__device__ __forceinline__ void warpgroup_multiply(float (&sums)[4], uint64_t left, uint64_t right, bool from_zero) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %8;}"
      : VOXELFIELD_SUMS_4(sums, 0)
      : "l"(left), "l"(right), "r"(int(from_zero)), "n"(Left), "n"(Right));
}

template <int Right>
__device__ __forceinline__ void warpgroup_multiply(float (&sums)[4], const Fragment& left, uint64_t right,
                                                   bool from_zero) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, %10;}"
      : VOXELFIELD_SUMS_4(sums, 0)
      : "r"(left.part[0]), "r"(left.part[1]), "r"(left.part[2]), "r"(left.part[3]), "l"(right), "r"(int(from_zero)),
        "n"(Right));
}

#undef VOXELFIELD_SUMS_4
#undef VOXELFIELD_SUMS_16
#undef VOXELFIELD_SUMS_64
#undef VOXELFIELD_NAMES_16
#undef VOXELFIELD_NAMES_64

// Writes half of a Fragment, 16 rows of 8 columns, transposed. Lane i gives the address of row i % 8 of the result,
// from its column i / 8 % 2 * 8 on.
__device__ __forceinline__ void store_transposed(unsigned address, unsigned upper, unsigned lower) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(upper), "r"(lower)
               : "memory");
}

// Must precede products whose sums or left operand other instructions have written.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Groups` of the latest groups are not finished. `sums` are those that may be read then.
template <int Groups, int N>
__device__ __forceinline__ void wait_for_products(float (&sums)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Makes what this thread has written to shared memory visible to products; a barrier must follow.
__device__ __forceinline__ void publish_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void synchronize_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, %1;" ::"r"(warpgroup + 1), "n"(kWarpgroup) : "memory");
}

#endif

}  // namespace voxelfield
