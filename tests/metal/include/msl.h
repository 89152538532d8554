// What a kernel of ours uses of the Metal Shading Language, in C++17. Not the whole language:
// what is missing does not compile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "gpu.h"

// Address spaces: nothing to the compiler here. `lint.h` gives them a meaning to clang.
#define device
#define constant
#define thread
#define METAL_FUNC inline

typedef unsigned int uint;
typedef unsigned short ushort;
typedef gpu::Size uint3;
typedef _Float16 half;
typedef half float16_t;

// The upper half of a float, rounded to nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    uint32_t all;
    std::memcpy(&all, &value, sizeof all);
    const bool is_nan = value != value;
    bits = is_nan ? 0x7fc0 : uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, sizeof value);
    return value;
  }
};
typedef bfloat bfloat16_t;

namespace metal {

template <typename T, int N>
struct vec;

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T all) : x(all), y(all) {}
  vec(T x, T y) : x(x), y(y) {}
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T all) : x(all), y(all), z(all), w(all) {}
};

inline vec<float, 2> operator*(vec<float, 2> a, float b) { return {a.x * b, a.y * b}; }
inline vec<float, 2> operator*(float a, vec<float, 2> b) { return b * a; }
inline void operator*=(vec<float, 2>& a, float b) { a = a * b; }

// ---- barriers and simdgroup operations ----------------------------------------------------------

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

#define MSL_LINE int line = __builtin_LINE()

inline void threadgroup_barrier(mem_flags, MSL_LINE) {
  gpu::meet(gpu::Meeting::threadgroup, "threadgroup_barrier", line);
}

inline bool simd_any(bool value, MSL_LINE) {
  const auto all = gpu::exchange(value, "simd_any", line);
  bool any = false;
  for (int lane = 0; lane < gpu::kLanes; lane++) any |= all(lane);
  return any;
}

template <typename T>
T simd_shuffle_xor(T value, ushort mask, MSL_LINE) {
  return gpu::exchange(value, "simd_shuffle_xor", line)(gpu::self().lane() ^ mask);
}

// ---- matrices of a simdgroup --------------------------------------------------------------------

// 8 x 8 elements, two a lane. Metal's specification leaves open where; this is the order that MLX's
// kernels rely on.
template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Apple GPUs have matrices of 8 x 8");
  vec<T, 2> elements;
  simdgroup_matrix() { std::memset(&elements, 0xff, sizeof elements); }
  vec<T, 2>& thread_elements() { return elements; }
};

inline unsigned matrix_row(unsigned lane) { return (lane & 16) / 4 + (lane & 6) / 2; }
inline unsigned matrix_column(unsigned lane) { return (lane & 8) / 2 + (lane & 1) * 2; }
inline unsigned matrix_lane(unsigned row, unsigned column) {
  return (row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2;
}

using float8x8 = simdgroup_matrix<float, 8, 8>;

inline void simdgroup_multiply_accumulate(
    float8x8& d, const float8x8& a, const float8x8& b, const float8x8& c, MSL_LINE) {
  struct Pair {
    vec<float, 2> a, b;
  };
  const auto all = gpu::exchange(Pair{a.elements, b.elements}, "multiply_accumulate", line);
  const unsigned row = matrix_row(gpu::self().lane()), column = matrix_column(gpu::self().lane());
  vec<float, 2> sum = c.elements;
  for (unsigned k = 0; k < 8; k++) {
    const auto left = all(matrix_lane(row, k)).a, right = all(matrix_lane(k, column)).b;
    const float factor = k % 2 ? left.y : left.x;
    sum.x += factor * right.x;
    sum.y += factor * right.y;
  }
  d.elements = sum;
}

// ---- functions ------------------------------------------------------------------------------------

inline float max(float a, float b) { return std::fmax(a, b); }

namespace fast {
inline float exp2(float x) { return std::exp2(x); }
}  // namespace fast

}  // namespace metal

using namespace metal;

typedef vec<float, 2> float2;

// ---- the host ---------------------------------------------------------------------------------

#include "host.h"
