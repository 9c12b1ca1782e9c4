/* Vectors of sixteen floats, for any vector unit that the compiler supports (vector extension of GCC and Clang). */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define LANES 16
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

/* Load sixteen elements from the `index`-th on of an array of bfloat16 or float. */
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

/* Load sixteen elements of an array of float16 without infinite ones. */
INLINE vec load_halves(const void *array, int64_t index) {
    hvec stored;
    memcpy(&stored, (const uint16_t *)array + index, sizeof stored);
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)stored);
#elif defined(__F16C__)
    vec values;
    for (int half = 0; half < 2; half++)
        _mm256_storeu_ps((float *)&values + 8 * half, _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)stored, half)));
    return values;
#else
    const uvec wide = __builtin_convertvector(stored, uvec);
    return (vec)((wide & 0x7fff) << 13 | (wide & 0x8000) << 16) * 0x1p112f;
#endif
}

/* Store sixteen values; for a bfloat16 array, round to nearest, ties to even. */
INLINE void store(void *array, int64_t index, vec values, const int is_bf16) {
    if (is_bf16) {
#if defined(__AVX512BF16__)
        const __m256bh half = _mm512_cvtneps_pbh((__m512)values);
#else
        uvec bits = (uvec)values;
        bits += 0x7fff + ((bits >> 16) & 1);
        const hvec half = __builtin_convertvector(bits >> 16, hvec);
#endif
        memcpy((uint16_t *)array + index, &half, sizeof half);
    } else {
        memcpy((float *)array + index, &values, sizeof values);
    }
}

INLINE float element(const void *array, int64_t index, const int is_bf16) {
    if (!is_bf16) return ((const float *)array)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)array)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Store the first `count` of the values, rounded as in `store`. */
INLINE void store_some(void *array, int64_t index, vec values, int64_t count, const int is_bf16) {
    char whole[sizeof values];
    store(whole, 0, values, is_bf16);
    const int64_t size = is_bf16 ? 2 : 4;
    memcpy((char *)array + index * size, whole, count * size);
}

/* Load the first `count` elements from the `index`-th on, followed by zeros. */
INLINE vec load_some(const void *array, int64_t index, int64_t count, const int is_bf16) {
    const int64_t size = is_bf16 ? 2 : 4;
    char whole[sizeof(vec)] = {0};
    memcpy(whole, (const char *)array + index * size, count * size);
    return load(whole, 0, is_bf16);
}

INLINE vec rounded(vec values, const int is_bf16) {
    if (!is_bf16) return values;
    uvec bits = (uvec)values;
    bits += 0x7fff + ((bits >> 16) & 1);
    return (vec)(bits & 0xffff0000u);
}

/* Every second lane of two vectors, concatenated. GCC 12 and Clang share one builtin; older GCC has another. */
#if defined(__clang__) || __GNUC__ >= 12
#define EVEN_LANES(a, b) \
    __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_LANES(a, b) \
    __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#else
#define EVEN_LANES(a, b) \
    __builtin_shuffle(a, b, (ivec){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30})
#define ODD_LANES(a, b) \
    __builtin_shuffle(a, b, (ivec){1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31})
#endif

INLINE vec all(float value) { return value - (vec){0}; }

INLINE vec either(ivec wanted, vec a, vec b) { return (vec)(((ivec)a & wanted) | ((ivec)b & ~wanted)); }

/* The larger value; `a` if either is NaN. */
INLINE vec larger(vec a, vec b) { return either(b > a, b, a); }

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

/* 2 to the power of x, within 2e-7, by a Taylor series around the nearest integer. 2^-126 for smaller x, infinite from
   128 on; NaN stays NaN. */
INLINE vec exp2_of(vec x) {
    const ivec is_number = x == x;
    const vec given = x;
    x = -larger(-larger(x, all(-126.0f)), all(-128.0f));
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
    return either(is_number, (vec)((ivec)power + (((ivec)shifted - (ivec)magic) << 23)), given);
}

/* Products work on words of four bytes: one float or two bfloat16 elements. */

INLINE int64_t size_of(const int is_bf16) { return is_bf16 ? 2 : 4; }

INLINE int64_t per_word(const int is_bf16) { return is_bf16 ? 2 : 1; }

INLINE uvec words_at(const char *from) {
    uvec words;
    memcpy(&words, from, sizeof words);
    return words;
}

INLINE uvec all_of(const char *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word - (uvec){0};
}

/* sum + a * b, lane by lane. A bfloat16 lane holds two elements, and both products are added, the lower one last. */
INLINE vec add_product(vec sum, uvec a, uvec b, const int is_bf16) {
    if (!is_bf16) return sum + (vec)a * (vec)b;
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vec)(a & 0xffff0000u) * (vec)(b & 0xffff0000u);
    return sum + (vec)(a << 16) * (vec)(b << 16);
#endif
}
