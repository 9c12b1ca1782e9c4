/* Sixteen rows of weights, unpacked to unsigned bytes and transposed so that each lane of a vector is a row.

   Blocks have ggml's layout. */

#pragma once

#include <immintrin.h>

#include "types.h"

#define ROWS 16

/* A block of 32 values of sixteen rows; each lane of `quads` holds four consecutive values of a row. */
typedef struct {
    __m512i quads[8];
    __m512 scale;
} Block32;

/* Values of a block of 256 that share one factor in each row; groups of sixteen use only the first four quads. */
typedef struct {
    __m512i quads[8];
    __m512i factor;
} Group;

/* A block of 256 values of sixteen rows. A value is `scale` times its group's factor times the stored value, less, if
   the type has minima, `minimum` times its group's entry in `minima`: two groups per lane, sixteen bits each. */
typedef struct {
    Group groups[16];
    __m512i minima[4];
    __m512 scale, minimum;
} Block256;

/* Properties of a weight type: values per block and per group, bytes per block, offset that makes values unsigned, and
   whether groups have minima. */
INLINE int block_values(int type) { return type >= GGML_TYPE_Q4_K ? 256 : 32; }
INLINE int group_values(int type) { return type == GGML_TYPE_Q6_K ? 16 : 32; }
INLINE int groups_of(int type) { return block_values(type) / group_values(type); }
INLINE bool has_minimum(int type) { return type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K; }
INLINE int block_bytes(int type) {
    return type == GGML_TYPE_Q4_0   ? sizeof(block_q4_0)
           : type == GGML_TYPE_Q5_0 ? sizeof(block_q5_0)
           : type == GGML_TYPE_Q8_0 ? sizeof(block_q8_0)
           : type == GGML_TYPE_Q4_K ? sizeof(block_q4_K)
           : type == GGML_TYPE_Q5_K ? sizeof(block_q5_K)
                                    : sizeof(block_q6_K);
}
INLINE int too_much(int type) {
    return type == GGML_TYPE_Q4_0   ? 8
           : type == GGML_TYPE_Q5_0 ? 16
           : type == GGML_TYPE_Q8_0 ? 128
           : type == GGML_TYPE_Q6_K ? 32
                                    : 0;
}

/* Start of the current block in sixteen rows: every fourth row's address, and the distances of the next rows. */
typedef struct {
    const char *first, *fifth, *ninth, *thirteenth;
    int64_t stride, three_strides;
} Rows;

INLINE Rows rows_at(const char *at, int64_t stride) {
    return (Rows){at, at + 4 * stride, at + 8 * stride, at + 12 * stride, stride, 3 * stride};
}

/* Load sixteen bytes from each of four rows, `further` bytes after the start of the block of every fourth row. */
INLINE __m512i four_rows(const Rows *r, int64_t further) {
    __m512i bytes = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(r->first + further)));
    bytes = _mm512_inserti32x4(bytes, _mm_loadu_si128((const void *)(r->fifth + further)), 1);
    bytes = _mm512_inserti32x4(bytes, _mm_loadu_si128((const void *)(r->ninth + further)), 2);
    return _mm512_inserti32x4(bytes, _mm_loadu_si128((const void *)(r->thirteenth + further)), 3);
}

/* Load sixteen bytes of each row: to[0] gets the first four bytes of every row, and so on. */
INLINE void turned(__m512i to[4], const Rows *r, int place) {
    __m512i a = four_rows(r, place), b = four_rows(r, place + r->stride);
    __m512i c = four_rows(r, place + 2 * r->stride), d = four_rows(r, place + r->three_strides);
    __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    __m512i later_ab = _mm512_unpackhi_epi32(a, b), later_cd = _mm512_unpackhi_epi32(c, d);
    to[0] = _mm512_unpacklo_epi64(ab, cd);
    to[1] = _mm512_unpackhi_epi64(ab, cd);
    to[2] = _mm512_unpacklo_epi64(later_ab, later_cd);
    to[3] = _mm512_unpackhi_epi64(later_ab, later_cd);
}

INLINE __m512i low_bits(__m512i bytes, int count) { return _mm512_and_si512(bytes, _mm512_set1_epi8((1 << count) - 1)); }

INLINE __m512i high_half(__m512i bytes) { return low_bits(_mm512_srli_epi32(bytes, 4), 4); }

/* Convert the low sixteen bits of each lane from half precision. */
INLINE __m512 halves(__m512i lanes) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(lanes)); }

/* Load one half-precision number per row, `place` bytes after the start of its block. */
INLINE __m512 halves_at(const Rows *r, int place) {
    __m128i one = _mm_setzero_si128(), other = one;
#define HALF(every, further) (*(const uint16_t *)(r->every + (further) + place))
#define INSERT(row, further)                                                                                        \
    one = _mm_insert_epi16(_mm_insert_epi16(one, HALF(first, further), row), HALF(fifth, further), (row) + 4);       \
    other = _mm_insert_epi16(_mm_insert_epi16(other, HALF(ninth, further), row), HALF(thirteenth, further), (row) + 4)
    INSERT(0, 0);
    INSERT(1, r->stride);
    INSERT(2, 2 * r->stride);
    INSERT(3, r->three_strides);
#undef INSERT
#undef HALF
    return _mm512_cvtph_ps(_mm256_set_m128i(other, one));
}

INLINE void unpack_q8_0(Block32 *to, const Rows *r) {
    for (int half = 0; half < 2; half++) {
        turned(to->quads + 4 * half, r, 2 + 16 * half);
        for (int i = 4 * half; i < 4 * half + 4; i++)
            to->quads[i] = _mm512_xor_si512(to->quads[i], _mm512_set1_epi8((char)0x80));
    }
    to->scale = halves_at(r, 0);
}

INLINE void unpack_q4_0(Block32 *to, const Rows *r) {
    __m512i bytes[4];
    turned(bytes, r, 2);
    for (int i = 0; i < 4; i++) to->quads[i] = low_bits(bytes[i], 4), to->quads[4 + i] = high_half(bytes[i]);
    to->scale = halves_at(r, 0);
}

/* A block holds a scale, 32 fifth bits, and the low four bits of values 0-15 and, in the upper halves, 16-31. */
INLINE void unpack_q5_0(Block32 *to, const Rows *r) {
    __m512i head[4], bytes[4];
    turned(head, r, 0);
    turned(bytes, r, 6);
    __m512i fifth = _mm512_or_si512(_mm512_srli_epi32(head[0], 16), _mm512_slli_epi32(head[1], 16));
    for (int i = 0; i < 8; i++) {
        __m512i byte = _mm512_shuffle_epi8(fifth, _mm512_set4_epi32(
            0x0c0c0c0c + 0x01010101 * (i / 2), 0x08080808 + 0x01010101 * (i / 2), 0x04040404 + 0x01010101 * (i / 2),
            0x01010101 * (i / 2)));
        __mmask64 set = _mm512_test_epi8_mask(byte, _mm512_set1_epi32(i % 2 ? (int)0x80402010 : 0x08040201));
        __m512i four = i < 4 ? low_bits(bytes[i], 4) : high_half(bytes[i - 4]);
        to->quads[i] = _mm512_mask_add_epi8(four, set, four, _mm512_set1_epi8(16));
    }
    to->scale = halves_at(r, 0);
}

/* Unpack a block of 32 of any type. */
INLINE void unpack_32(const int type, Block32 *to, Rows rows) {
    if (type == GGML_TYPE_Q4_0) unpack_q4_0(to, &rows);
    if (type == GGML_TYPE_Q5_0) unpack_q5_0(to, &rows);
    if (type == GGML_TYPE_Q8_0) unpack_q8_0(to, &rows);
}

/* Byte `place` of the four bytes in each lane, unsigned or signed. */
INLINE __m512i byte_of(__m512i lanes, int place) {
    return _mm512_and_si512(_mm512_srli_epi32(lanes, 8 * place), _mm512_set1_epi32(255));
}
INLINE __m512i signed_byte_of(__m512i lanes, int place) {
    return _mm512_srai_epi32(_mm512_slli_epi32(lanes, 24 - 8 * place), 24);
}

/* Shift `lanes` right by `count` bits and apply `mask` to each byte. */
INLINE __m512i bits_of(__m512i lanes, int count, int mask) {
    return _mm512_and_si512(_mm512_srli_epi32(lanes, count), _mm512_set1_epi8((char)mask));
}

/* Widen a lane's first or last two bytes to sixteen bits each. */
INLINE __m512i widened(__m512i lanes, bool last) {
    const char x = (char)0x80;
    const __m128i first = _mm_setr_epi8(0, x, 1, x, 4, x, 5, x, 8, x, 9, x, 12, x, 13, x);
    const __m128i other = _mm_setr_epi8(2, x, 3, x, 6, x, 7, x, 10, x, 11, x, 14, x, 15, x);
    return _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(last ? other : first));
}

/* Unpack the scales and minima of a Q4_K or Q5_K block. `factors`: bytes of each lane are those of groups 0 to 3, and
   of groups 4 to 7. */
INLINE void unpack_head(Block256 *to, __m512i factors[2], const Rows *r) {
    __m512i head[4]; /* a scale and a minimum; six bits each of eight factors and of eight minima */
    turned(head, r, 0);
    __m512i first = bits_of(head[2], 0, 63);
    __m512i last = _mm512_or_si512(bits_of(head[3], 4, 15), bits_of(head[2], 2, 48));
    factors[0] = bits_of(head[1], 0, 63);
    factors[1] = _mm512_or_si512(bits_of(head[3], 0, 15), bits_of(head[1], 2, 48));
    to->scale = halves(head[0]);
    to->minimum = halves(_mm512_srli_epi32(head[0], 16));
    for (int i = 0; i < 4; i++) to->minima[i] = widened(i < 2 ? first : last, i % 2);
}

/* Move bit `place` of each byte to the fifth place. */
INLINE __m512i fifth_bit(__m512i bytes, int place) {
    __m512i moved = place < 4 ? _mm512_slli_epi32(bytes, 4 - place) : _mm512_srli_epi32(bytes, place - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(16));
}

/* Of every 64 values, the first 32 are the lower halves of 32 bytes, the others the upper halves. Before them, Q5_K
   stores a fifth bit of each value. */
INLINE void unpack_q4_or_5_k(const int type, Block256 *block, const Rows *r) {
    Group *to = block->groups;
    __m512i fifth[8], factors[2];
    unpack_head(block, factors, r);
    for (int g = 0; g < 8; g++) to[g].factor = byte_of(factors[g / 4], g % 4);
    for (int half = 0; half < 2 && type == GGML_TYPE_Q5_K; half++) turned(fifth + 4 * half, r, 16 + 16 * half);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++)
        for (int half = 0; half < 2; half++) {
            __m512i bytes[4];
            turned(bytes, r, (type == GGML_TYPE_Q5_K ? 48 : 16) + 32 * pair + 16 * half);
            for (int i = 0; i < 4; i++) {
                __m512i low = low_bits(bytes[i], 4), high = high_half(bytes[i]);
                if (type == GGML_TYPE_Q5_K) {
                    low = _mm512_or_si512(low, fifth_bit(fifth[4 * half + i], 2 * pair));
                    high = _mm512_or_si512(high, fifth_bit(fifth[4 * half + i], 2 * pair + 1));
                }
                to[2 * pair].quads[4 * half + i] = low;
                to[2 * pair + 1].quads[4 * half + i] = high;
            }
        }
}

/* 128 bytes hold four bits each of two values, 64 bytes two more bits of four; then sixteen scales and the block's. */
INLINE void unpack_q6_k(Block256 *block, const Rows *r) {
    const __m512i top = _mm512_set1_epi8(48);
    __m512i factors[4];
    turned(factors, r, 192);
    block->scale = halves_at(r, 208);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            __m512i low[4], next[4], high[4];
            turned(low, r, 64 * half + 16 * part);
            turned(next, r, 64 * half + 32 + 16 * part);
            turned(high, r, 128 + 32 * half + 16 * part);
            Group *to = block->groups + 8 * half + part;
            for (int i = 0; i < 4; i++) {
                __m512i h = high[i];
                to[0].quads[i] = _mm512_or_si512(low_bits(low[i], 4), _mm512_and_si512(_mm512_slli_epi32(h, 4), top));
                to[2].quads[i] = _mm512_or_si512(low_bits(next[i], 4), _mm512_and_si512(_mm512_slli_epi32(h, 2), top));
                to[4].quads[i] = _mm512_or_si512(high_half(low[i]), _mm512_and_si512(h, top));
                to[6].quads[i] = _mm512_or_si512(high_half(next[i]), _mm512_and_si512(_mm512_srli_epi32(h, 2), top));
            }
        }
    for (int g = 0; g < 16; g++) block->groups[g].factor = signed_byte_of(factors[g / 4], g % 4);
}

INLINE void unpack_256(const int type, Block256 *to, Rows rows) {
    if (type == GGML_TYPE_Q6_K)
        unpack_q6_k(to, &rows);
    else
        unpack_q4_or_5_k(type, to, &rows);
}
