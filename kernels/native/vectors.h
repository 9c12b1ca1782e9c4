/* Sixteen floats at a time, for whatever vector unit the compiler finds (GCC's and Clang's vector extension). */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

/* Sixteen elements from the `index`-th on of an array of bfloat16 or float. */
INLINE vec load(const void *array, int64_t index, const int is_bf16) {
    if (is_bf16) {
        hvec half;
        memcpy(&half, (const uint16_t *)array + index, sizeof half);
        return (vec)(__builtin_convertvector(half, uvec) << 16);
    }
    vec values;
    memcpy(&values, (const float *)array + index, sizeof values);
    return values;
}

/* Rounds to the nearest bfloat16, ties to even, where the array is one. */
INLINE void store(void *array, int64_t index, vec values, const int is_bf16) {
    if (is_bf16) {
        uvec bits = (uvec)values;
        bits += 0x7fff + ((bits >> 16) & 1);
        hvec half = __builtin_convertvector(bits >> 16, hvec);
        memcpy((uint16_t *)array + index, &half, sizeof half);
    } else {
        memcpy((float *)array + index, &values, sizeof values);
    }
}

INLINE vec rounded(vec values, const int is_bf16) {
    if (!is_bf16) return values;
    uvec bits = (uvec)values;
    bits += 0x7fff + ((bits >> 16) & 1);
    return (vec)(bits & 0xffff0000u);
}

INLINE vec all(float value) { return value - (vec){0}; }

INLINE vec larger(vec a, vec b) {
    ivec is_a = a > b;
    return (vec)(((ivec)a & is_a) | ((ivec)b & ~is_a));
}

INLINE float sum_of(vec values) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
}

INLINE float largest_of(vec values) {
    float largest = values[0];
    for (int lane = 1; lane < LANES; lane++) largest = values[lane] > largest ? values[lane] : largest;
    return largest;
}

/* 2 to the power of x, within 2e-7 of it, x held between -126 and 127. Taylor's series around the nearest integer. */
INLINE vec exp2_of(vec x) {
    x = -larger(-larger(x, all(-126.0f)), all(-127.0f));
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x + magic;
    vec f = x - (shifted - magic);
    vec power = all(1.5403530e-4f);
    power = power * f + all(1.3333558e-3f);
    power = power * f + all(9.6181291e-3f);
    power = power * f + all(5.5504109e-2f);
    power = power * f + all(2.4022651e-1f);
    power = power * f + all(6.9314718e-1f);
    power = power * f + all(1.0f);
    return (vec)((ivec)power + (((ivec)shifted - (ivec)magic) << 23));
}
