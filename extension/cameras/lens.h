// Lenses: the projection of a ray to an image point, and its inverse. voxelfield/rendering/lens.py documents the models
// and makes the rows of numbers that are read here.
//
// Image points are in the plane of the unit focal length, x to the right and y down from the principal point. Division,
// extended unified and field-of-view lenses map a point to its ray in closed form. For all others, a ray has an ideal
// point, which they distort. The ideal point's direction is that of the ray's component perpendicular to the optical
// axis. Its length is the tangent of the angle between ray and axis, or for a fisheye the angle itself in radians.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/platform.h"

namespace voxelfield {

// The values and the order of the numbers in a row are shared with voxelfield/rendering/lens.py.
enum class LensModel {
  kPinhole,
  kPerspective,
  kRational,
  kFisheye,
  kFisheye624,
  kFieldOfView,
  kDivision,
  kExtendedUnified,
  kCount
};

// A row holds the model, the coefficients, and between them the largest length of an ideal point, or 2 tan(omega / 2)
// of a field of view, whose formulas need it for every ray.
constexpr int kLensCoefficients = 12;
constexpr int kLensNumbers = 2 + kLensCoefficients;

constexpr float kPerPi = 0.318309886f;

// A ray's direction from the camera's centre, of any length.
struct CameraRay {
  float right, down, forward;
};

struct Lens {
  const float* row;  // null for a pinhole

  // The lens of a camera, of lenses that are stored one after another.
  VOXELFIELD_HOST_DEVICE Lens at(int64_t camera) const {
    return {row == nullptr ? nullptr : row + kLensNumbers * camera};
  }

  // Returns the ray that is imaged at a point.
  //
  // There may be no ray for the outermost points of an image: beyond some radius, rays fold back towards the centre, or
  // there are none. Such points get a ray near the outermost one, so that results are always finite.
  VOXELFIELD_HOST_DEVICE CameraRay ray_through(float x, float y) const {
    return row == nullptr || is(LensModel::kPinhole) ? CameraRay{x, y, 1.0f} : bent_ray(x, y);
  }

  // Sets the point that the formula gives for a ray. Rays behind a perspective camera or beyond the fold are not
  // imaged; only ray_through() determines whether the lens images the ray at that point.
  VOXELFIELD_HOST_DEVICE void point_of(const CameraRay& ray, float (&point)[2]) const {
    const float scale = row == nullptr ? 1.0f / ray.forward : scale_of(ray);
    point[0] = scale * ray.right;
    point[1] = scale * ray.down;
    if (row == nullptr || !is_distorted()) return;
    const Shown shown = show(point[0], point[1]);
    point[0] = shown.x;
    point[1] = shown.y;
  }

 private:
  // The image position of an ideal point, and the derivative there: dxy is the derivative of x along y.
  struct Shown {
    float x, y, dxx, dxy, dyx, dyy;
  };

  VOXELFIELD_HOST_DEVICE CameraRay bent_ray(float x, float y) const {
    if (is(LensModel::kFieldOfView)) return through_field_of_view(x, y);
    if (is(LensModel::kDivision)) return through_division(x, y);
    if (is(LensModel::kExtendedUnified)) return through_extended_unified(x, y);
    float ideal[2];
    ideal_point(x, y, ideal);
    if (!is_fisheye()) return {ideal[0], ideal[1], 1.0f};
    const float radius = std::sqrt(ideal[0] * ideal[0] + ideal[1] * ideal[1]);
    const SineCosine of = sine_cosine(fminf(radius * kPerPi, 1.0f));
    const float scale = radius > 0.0f ? of.sine / radius : 1.0f;
    return {scale * ideal[0], scale * ideal[1], of.cosine};
  }

  struct SineCosine {
    float sine, cosine;
  };

  // The sine and cosine of an angle in half turns, which need no reduction of large angles.
  static VOXELFIELD_HOST_DEVICE SineCosine sine_cosine(float half_turns) {
#if defined(__CUDA_ARCH__)
    return {sinpif(half_turns), cospif(half_turns)};
#else
    return {std::sin(half_turns / kPerPi), std::cos(half_turns / kPerPi)};
#endif
  }

  VOXELFIELD_HOST_DEVICE bool is(LensModel model) const { return row[0] == static_cast<float>(model); }
  VOXELFIELD_HOST_DEVICE bool is_fisheye() const { return is(LensModel::kFisheye) || is(LensModel::kFisheye624); }
  // Whether an ideal point is distorted, as for any model whose projection of a ray is not a closed formula.
  VOXELFIELD_HOST_DEVICE bool is_distorted() const {
    return row[0] >= static_cast<float>(LensModel::kPerspective) &&
           row[0] <= static_cast<float>(LensModel::kFisheye624);
  }
  VOXELFIELD_HOST_DEVICE float largest_ideal_radius() const { return row[1]; }
  VOXELFIELD_HOST_DEVICE const float* coefficients() const { return row + 2; }

  // Returns the factor from a ray to its ideal point, or to its image if that needs no distortion.
  VOXELFIELD_HOST_DEVICE float scale_of(const CameraRay& ray) const {
    const float square = ray.right * ray.right + ray.down * ray.down, forward = ray.forward;
    const float across = std::sqrt(square), first = coefficients()[0];
    if (is_fisheye()) return across > 0.0f ? std::atan2(across, forward) / across : 0.0f;
    if (is(LensModel::kDivision))
      return 2.0f / (forward + std::sqrt(fmaxf(forward * forward - 4.0f * first * square, 0.0f)));
    if (is(LensModel::kExtendedUnified))
      return 1.0f / (first * std::sqrt(coefficients()[1] * square + forward * forward) + (1.0f - first) * forward);
    if (is(LensModel::kFieldOfView) && across > 0.0f)
      return std::atan2(row[1] * across, forward) / (std::fabs(first) * across);
    return 1.0f / forward;
  }

  // Devernay and Faugeras 2001: tan(omega * radius) = 2 tan(omega / 2) * tan(angle of the ray).
  VOXELFIELD_HOST_DEVICE CameraRay through_field_of_view(float x, float y) const {
    const float omega = std::fabs(coefficients()[0]), radius = std::sqrt(x * x + y * y);
    const SineCosine of = sine_cosine(fminf(omega * radius * kPerPi, 0.5f));
    const float scale = radius > 0.0f ? of.sine / radius : omega;
    return {scale * x, scale * y, row[1] * of.cosine};
  }

  // Fitzgibbon 2001. With a positive coefficient, rays fold back at the radius where k * square is 1.
  VOXELFIELD_HOST_DEVICE CameraRay through_division(float x, float y) const {
    const float bend = coefficients()[0] * (x * x + y * y);
    const float inwards = bend > 1.0f ? 1.0f / std::sqrt(bend) : 1.0f;
    const float forward = 1.0f + fminf(fmaxf(bend, -1e30f), 1.0f), scale = 1.0f / fmaxf(std::fabs(forward), 1.0f);
    return {scale * inwards * x, scale * inwards * y, scale * forward};
  }

  // Khomutenko, Garcia and Martinet 2016. With alpha above 1/2, no ray is imaged beyond the radius where the argument
  // of the root is 0.
  VOXELFIELD_HOST_DEVICE CameraRay through_extended_unified(float x, float y) const {
    const float alpha = coefficients()[0], square = coefficients()[1] * (x * x + y * y);
    const float wide = 2.0f * alpha - 1.0f, outside = wide * square;
    const float inwards = outside > 1.0f ? 1.0f / std::sqrt(outside) : 1.0f, within = inwards * inwards * square;
    const float root = std::sqrt(fmaxf(1.0f - wide * within, 0.0f));
    // The same quotient, without a division of 0 by 0 at an alpha of 1/2 or of 1.
    const float forward = wide > 0.5f ? (alpha * root - 1.0f + alpha) / wide
                                      : (1.0f - alpha * alpha * within) / (alpha * root + 1.0f - alpha);
    return {inwards * x, inwards * y, forward};
  }

  // With q the square of the length of the ideal point (x, y), and s the square of the length of (u, v):
  //   radial = 1 + k1 q + ... + k6 q^6, or (1 + k1 q + k2 q^2 + k3 q^3) / (1 + k4 q + k5 q^2 + k6 q^3) if rational,
  //   x * radial + 2 p1 u v + p2 (s + 2 u^2) + s1 s + s2 s^2,   y * radial + p1 (s + 2 v^2) + 2 p2 u v + s3 s + s4 s^2,
  // where (u, v) is the ideal point, or that point times radial for the lens of 6 + 2 + 4 coefficients.
  VOXELFIELD_HOST_DEVICE Shown show(float x, float y) const {
    const float* c = coefficients();
    const float k4 = c[3], p1 = c[4], p2 = c[5], s1 = c[6], s2 = c[7], s3 = c[8], s4 = c[9], k5 = c[10], k6 = c[11];
    const float q = x * x + y * y;
    const float low = 1.0f + q * (c[0] + q * (c[1] + q * c[2]));
    const float low_slope = c[0] + q * (2.0f * c[1] + q * 3.0f * c[2]);
    const float high = k4 + q * (k5 + q * k6), high_slope = k5 + q * 2.0f * k6;
    float radial, slope;
    if (is(LensModel::kRational)) {
      const float below = 1.0f / (1.0f + q * high);
      radial = low * below;
      slope = (low_slope - radial * (high + q * high_slope)) * below;
    } else {
      const float cube = q * q * q;
      radial = low + cube * q * high;
      slope = low_slope + cube * (4.0f * high + q * high_slope);
    }
    const float bend = 2.0f * slope * x * y;
    Shown shown{x * radial, y * radial, radial + 2.0f * slope * x * x, bend, bend, radial + 2.0f * slope * y * y};
    const bool later = is(LensModel::kFisheye624);
    const float u = later ? shown.x : x, v = later ? shown.y : y, s = u * u + v * v, cross = 2.0f * u * v;
    const float prism_x = 2.0f * s1 + 4.0f * s2 * s, prism_y = 2.0f * s3 + 4.0f * s4 * s;
    const float both = 2.0f * (p1 * u + p2 * v);
    const float txx = 2.0f * p1 * v + (6.0f * p2 + prism_x) * u, txy = both + prism_x * v;
    const float tyx = both + prism_y * u, tyy = (6.0f * p1 + prism_y) * v + 2.0f * p2 * u;
    shown.x += p1 * cross + p2 * (s + 2.0f * u * u) + s * (s1 + s2 * s);
    shown.y += p1 * (s + 2.0f * v * v) + p2 * cross + s * (s3 + s4 * s);
    // The derivative of (u, v): the radial part's, or the identity.
    const float uxx = later ? shown.dxx : 1.0f, uxy = later ? bend : 0.0f, uyy = later ? shown.dyy : 1.0f;
    shown.dxx += txx * uxx + txy * uxy;
    shown.dxy += txx * uxy + txy * uyy;
    shown.dyx += tyx * uxx + tyy * uxy;
    shown.dyy += tyx * uxy + tyy * uyy;
    return shown;
  }

  // Newton's iteration, starting from the point itself. It stays in the region around the optical axis in which the
  // lens does not fold: a step across the fold is halved, and later steps are no longer than the halved one.
  VOXELFIELD_HOST_DEVICE void ideal_point(float x, float y, float (&ideal)[2]) const {
    constexpr int kSteps = 48;            // three to five suffice where a ray exists
    constexpr float kFold = 1e-4f;        // the lens folds where the determinant of its derivative is smaller
    constexpr float kOverflow = 1e18f;    // larger values would overflow
    constexpr float kConverged = 1e-10f;  // squared step below which the error is less than rounding
    const float farthest = largest_ideal_radius() * largest_ideal_radius();
    float at[2] = {x, y}, longest = 1.0f;
    ideal[0] = ideal[1] = 0.0f;
    for (int step = 0; step < kSteps; ++step) {
      const Shown shown = show(at[0], at[1]);
      const float determinant = shown.dxx * shown.dyy - shown.dxy * shown.dyx;
      // The condition is written so that NaN counts as beyond the fold.
      if (!(determinant > kFold && determinant < kOverflow && shown.dxx + shown.dyy > 0.0f &&
            at[0] * at[0] + at[1] * at[1] <= farthest)) {
        at[0] = 0.5f * (at[0] + ideal[0]);
        at[1] = 0.5f * (at[1] + ideal[1]);
        const float right = at[0] - ideal[0], down = at[1] - ideal[1];
        longest = std::sqrt(right * right + down * down);
        continue;
      }
      ideal[0] = at[0];
      ideal[1] = at[1];
      const float lack_x = x - shown.x, lack_y = y - shown.y;
      float right = (shown.dyy * lack_x - shown.dxy * lack_y) / determinant;
      float down = (shown.dxx * lack_y - shown.dyx * lack_x) / determinant;
      const float square = right * right + down * down;
      if (square > longest * longest) {
        const float shorter = longest / std::sqrt(square);
        right *= shorter;
        down *= shorter;
      }
      at[0] += right;
      at[1] += down;
      if (square > kConverged) continue;
      ideal[0] = at[0];
      ideal[1] = at[1];
      return;
    }
  }
};

}  // namespace voxelfield
