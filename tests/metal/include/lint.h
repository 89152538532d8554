// Declarations for clang, which has the address spaces of Metal's pointers under another name: with
// them it refuses what Metal's compiler would, such as a threadgroup pointer taken for a device one.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;
struct uint3 {
  uint x, y, z;
};

namespace lint {
template <typename T, int N>
struct vector {
  typedef T type __attribute__((ext_vector_type(N)));
};
}  // namespace lint

namespace metal {
template <typename T, int N>
using vec = typename lint::vector<T, N>::type;

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
bool simd_any(bool);
float simd_shuffle_xor(float, ushort);
float max(float, float);
namespace fast {
float exp2(float);
}

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  vec<T, 2> elements;
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> float8x8;
void simdgroup_multiply_accumulate(float8x8&, float8x8, float8x8, float8x8);
}  // namespace metal

using namespace metal;
typedef vec<float, 2> float2;
float2 make_float2(float both);
float2 make_float2(float x, float y);
#define float2(...) make_float2(__VA_ARGS__)
