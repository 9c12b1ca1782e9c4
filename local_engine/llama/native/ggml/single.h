/* Product of one column with sixteen rows of weights in blocks of 256, row by row in memory order.

   For a single column, transposing sixteen rows takes longer than multiplying them. Sums of a block are integers, so
   that both methods give the same result. */

#pragma once

#include "product.h"

/* Sum the lanes of each of sixteen vectors. */
INLINE __m512i whole_sums(__m512i v[ROWS]) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i += 2)
        v[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[i], v[i + 1]), _mm512_unpackhi_epi32(v[i], v[i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i += 4)
        v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[i], v[i + 2]), _mm512_unpackhi_epi64(v[i], v[i + 2]));
#pragma GCC unroll 2
    for (int i = 0; i < ROWS; i += 8) {
        __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x44), b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xee);
        v[i] = _mm512_add_epi32(a, b);
    }
    return _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[8], 0x88), _mm512_shuffle_i32x4(v[0], v[8], 0xdd));
}

/* Add up sums of four products each, from two vectors of values, times the factors of their groups. */
INLINE __m512i weighed(__m512i total, __m512i one, __m512i other, __m512i factors) {
    return _mm512_dpwssd_epi32(total, _mm512_packs_epi32(one, other), factors);
}

INLINE __m512i times(__m512i values, __m512i column) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), values, column);
}

/* Arrange `factors` for `weighed`: of groups a, b, c and d for the first vector and e, f, g and h for the other. */
INLINE __m512i spread(__m512i factors, int a, int b, int c, int d, int e, int f, int g, int h) {
#define FOUR(x) (0x0001000100010001ll * (x))
    return _mm512_permutexvar_epi16(
        _mm512_setr_epi64(FOUR(a), FOUR(e), FOUR(b), FOUR(f), FOUR(c), FOUR(g), FOUR(d), FOUR(h)), factors);
#undef FOUR
}

/* A column's block, arranged for its products: values of groups that share bytes are separated. */
typedef struct {
    __m512i values[4];
    __m256i sums; /* of sixteen values each */
} Column;

INLINE Column column_of(const int type, const block_q8_K *b) {
    Column column = {.sums = _mm256_loadu_si256((const void *)b->bsums)};
    for (int i = 0; i < 4; i++) column.values[i] = _mm512_loadu_si512(b->qs + 64 * i);
    if (has_minimum(type))
        for (int i = 0; i < 4; i += 2) {
            __m512i first = column.values[i], next = column.values[i + 1];
            column.values[i] = _mm512_shuffle_i64x2(first, next, 0x44);
            column.values[i + 1] = _mm512_shuffle_i64x2(first, next, 0xee);
        }
    return column;
}

/* Move each value's bit to the fifth place: bit `one` of the first 32 bytes, bit `other` of the rest. */
INLINE __m512i fifth_bits(__m512i bits, __m512i four, int one, int other) {
    const int left = (4 - one) & 31, right = (4 - other) & 31;
    __m512i places = _mm512_setr_epi64(
        0x100000001ll * left, 0x100000001ll * left, 0x100000001ll * left, 0x100000001ll * left, 0x100000001ll * right,
        0x100000001ll * right, 0x100000001ll * right, 0x100000001ll * right);
    return _mm512_or_si512(four, _mm512_and_si512(_mm512_rolv_epi32(bits, places), _mm512_set1_epi8(16)));
}

/* Sums of a row of Q4_K or Q5_K, spread over lanes. `factors`: sixteen bits each, of eight groups. */
INLINE __m512i row_of_4_or_5(const int type, const char *row, __m128i factors, const Column *column) {
    const bool five = type == GGML_TYPE_Q5_K;
    const char *bytes = row + (five ? 48 : 16);
    __m512i four[4], wide = _mm512_castsi128_si512(factors), total = _mm512_setzero_si512();
    for (int i = 0; i < 2; i++) {
        __m512i both = _mm512_loadu_si512(bytes + 64 * i);
        four[2 * i] = low_bits(both, 4);
        four[2 * i + 1] = high_half(both);
        if (five) {
            __m512i bits = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(row + 16)));
            four[2 * i] = fifth_bits(bits, four[2 * i], 4 * i, 4 * i + 2);
            four[2 * i + 1] = fifth_bits(bits, four[2 * i + 1], 4 * i + 1, 4 * i + 3);
        }
    }
    for (int i = 0; i < 2; i++)
        total = weighed(
            total, times(four[2 * i], column->values[2 * i]), times(four[2 * i + 1], column->values[2 * i + 1]),
            spread(wide, 4 * i, 4 * i, 4 * i + 2, 4 * i + 2, 4 * i + 1, 4 * i + 1, 4 * i + 3, 4 * i + 3));
    return total;
}

/* Sums of a row of Q6_K, spread over lanes. */
INLINE __m512i row_of_6(const char *row, const Column *column) {
    const __m512i top = _mm512_set1_epi8(48);
    const __m512i to_left = _mm512_setr_epi32(4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2);
    const __m512i to_right = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    __m256i factors = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(row + 192)));
    __m512i wide = _mm512_castsi256_si512(factors);
    /* Values are stored unsigned, with an offset of 32. */
    __m256i less = _mm256_slli_epi32(_mm256_madd_epi16(factors, column->sums), 5);
    __m512i total = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_zextsi256_si512(less));
    for (int i = 0; i < 2; i++) {
        __m512i both = _mm512_loadu_si512(row + 64 * i);
        __m512i bits = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(row + 128 + 32 * i)));
        __m512i low = _mm512_and_si512(_mm512_sllv_epi32(bits, to_left), top);
        __m512i high = _mm512_and_si512(_mm512_srlv_epi32(bits, to_right), top);
        low = times(_mm512_or_si512(low_bits(both, 4), low), column->values[2 * i]);
        high = times(_mm512_or_si512(high_half(both), high), column->values[2 * i + 1]);
        const int g = 8 * i;
        total = weighed(total, low, high, spread(wide, g, g + 1, g + 2, g + 3, g + 4, g + 5, g + 6, g + 7));
    }
    return total;
}

/* Return the sums of a block of sixteen rows, and store the block's scales and minima in `head`. Prefetches the blocks
   from `next` on. */
INLINE __m512i single_block(
    const int type, Block256 *head, const char *at, int64_t stride, const Column *column, const char *next) {
    Rows rows = rows_at(at, stride);
    __m512i v[ROWS];
    if (type == GGML_TYPE_Q6_K) {
        head->scale = halves_at(&rows, 208);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            fetch_part(type, next, r);
            v[r] = row_of_6(at + r * stride, column);
        }
        return whole_sums(v);
    }
    __m512i factors[2];
    uint8_t by_row[2][64]; /* eight factors per row: first and second rows of every four, then third and fourth */
    unpack_head(head, factors, &rows);
    _mm512_storeu_si512(by_row[0], _mm512_unpacklo_epi32(factors[0], factors[1]));
    _mm512_storeu_si512(by_row[1], _mm512_unpackhi_epi32(factors[0], factors[1]));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        fetch_part(type, next, r);
        const uint8_t *of_row = by_row[r / 2 % 2] + 16 * (r / 4) + 8 * (r % 2);
        v[r] = row_of_4_or_5(type, at + r * stride, _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)of_row)), column);
    }
    return whole_sums(v);
}
