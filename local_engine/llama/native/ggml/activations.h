/* Activations, quantized by ggml, in the order in which a product reads them.

   For weights in blocks of 32, a block of several columns holds the values of each column, then each column's start of
   the sum (which corrects the offset of unsigned weights), then the scale of each. For blocks of 256: group by group,
   the values of each column and its start of the sum, or, for weights with minima, the sums of this group and the next
   in sixteen bits each; then the scales. */

#pragma once

#include "weights.h"

/* Bytes of a packed block of `columns` columns, and of ggml's block of one column. */
INLINE int64_t unit(int type, int64_t columns) { return columns * (block_values(type) + 4 * groups_of(type) + 4); }
INLINE size_t activation_bytes(int type) { return block_values(type) == 32 ? sizeof(block_q8_0) : sizeof(block_q8_K); }

INLINE int sum_of_32(const int8_t *values) {
    __m256i bytes = _mm256_loadu_si256((const void *)values);
    __m256i eight = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

INLINE void pack_32(const int type, uint8_t *to, const int columns, const int j, const block_q8_0 *from) {
    __builtin_memcpy(to + 32 * j, from->qs, 32);
    ((int32_t *)(to + 32 * columns))[j] = -too_much(type) * sum_of_32(from->qs);
    ((float *)(to + 36 * columns))[j] = _cvtsh_ss(from->d);
}

/* The eight sums of 32 values each. */
INLINE __m128i sums_of_32(const block_q8_K *from) {
    __m256i sums = _mm256_madd_epi16(_mm256_loadu_si256((const void *)from->bsums), _mm256_set1_epi16(1));
    return _mm256_cvtepi32_epi16(sums);
}

INLINE void pack_256(const int type, uint8_t *to, const int columns, const int j, const block_q8_K *from) {
    const int count = group_values(type);
    int32_t pairs[4];
    _mm_storeu_si128((void *)pairs, sums_of_32(from));
    for (int g = 0; g < groups_of(type); g++, to += columns * (count + 4)) {
        __builtin_memcpy(to + count * j, from->qs + count * g, count);
        ((int32_t *)(to + count * columns))[j] = has_minimum(type) ? pairs[g / 2] : -too_much(type) * from->bsums[g];
    }
    ((float *)to)[j] = from->d;
}

/* Pack `columns` rows of `k` blocks, `ldb` blocks apart. */
INLINE void pack(const int type, uint8_t *to, const void *b, int64_t ldb, int64_t k, int columns) {
    for (int64_t block = 0; block < k; block++, to += unit(type, columns))
        for (int j = 0; j < columns; j++)
            if (block_values(type) == 32)
                pack_32(type, to, columns, j, (const block_q8_0 *)b + ldb * j + block);
            else
                pack_256(type, to, columns, j, (const block_q8_K *)b + ldb * j + block);
}
