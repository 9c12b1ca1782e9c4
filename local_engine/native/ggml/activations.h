/* Activations, quantised by ggml, in the order in which a product reads them.

   A group of so many columns: the values of each, then of each where its sums start (what weights without a sign make
   them too much, or for weights with minima the sum of the values times the scale), then the scale of each. */

#pragma once

#include <immintrin.h>

#include "weights.h"

typedef struct {
    uint16_t scale; /* float16 */
    int8_t values[32];
} Q8_0;

typedef struct {
    float scale;
    int8_t values[256];
    int16_t sums[16]; /* of sixteen values each */
} Q8_K;

/* Bytes of a group of so many columns, and bytes of an activation block. */
INLINE int64_t unit(int type, int64_t columns) { return columns * (group_values(type) + 8); }
INLINE size_t activation_bytes(int type) { return block_values(type) == 32 ? sizeof(Q8_0) : sizeof(Q8_K); }

INLINE void pack_group(
    const int type, uint8_t *to, const int columns, const int j, const int8_t *values, float scale, int sum) {
    const int count = group_values(type);
    __builtin_memcpy(to + count * j, values, count);
    if (has_minimum(type))
        ((float *)(to + count * columns))[j] = scale * (float)sum;
    else
        ((int32_t *)(to + count * columns))[j] = -too_much(type) * sum;
    ((float *)(to + (count + 4) * columns))[j] = scale;
}

INLINE int sum_of_32(const int8_t *values) {
    __m256i bytes = _mm256_loadu_si256((const void *)values);
    __m256i eight = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

/* `columns` rows of `k` blocks, `ldb` blocks apart. */
INLINE void pack(const int type, uint8_t *to, const void *b, int64_t ldb, int64_t k, int columns) {
    for (int64_t block = 0; block < k; block++, to += groups_of(type) * unit(type, columns))
        for (int j = 0; j < columns; j++) {
            if (block_values(type) == 32) {
                const Q8_0 *from = (const Q8_0 *)b + ldb * j + block;
                pack_group(type, to, columns, j, from->values, _cvtsh_ss(from->scale), sum_of_32(from->values));
                continue;
            }
            const Q8_K *from = (const Q8_K *)b + ldb * j + block;
            for (int g = 0; g < groups_of(type); g++) {
                int place = place_of(type, g), sum = from->sums[place / 16];
                if (group_values(type) == 32) sum += from->sums[place / 16 + 1];
                pack_group(type, to + g * unit(type, columns), columns, j, from->values + place, from->scale, sum);
            }
        }
}
