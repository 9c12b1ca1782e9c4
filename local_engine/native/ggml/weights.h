/* Sixteen rows of weights at once, unpacked to bytes without a sign and turned so that each lane of a vector is a row.

   Blocks lie as ggml has them. */

#pragma once

#include <immintrin.h>

#include "types.h"

#define ROWS 16

/* Values of sixteen rows that have one scale in each: four consecutive ones of a row in each lane of `quads`.
   `minimum`: what such a value stands above, where the type has it. */
typedef struct {
    __m512i quads[8];
    __m512 scale, minimum;
} Group;

/* Of a type of weights: values of a block and of a group, bytes of a block, what is added to a value to be without a
   sign, and whether groups have minima. */
INLINE int block_values(int type) { return type >= TYPE_Q4_K ? 256 : 32; }
INLINE int group_values(int type) { return type == TYPE_Q6_K ? 16 : 32; }
INLINE int groups_of(int type) { return block_values(type) / group_values(type); }
INLINE bool has_minimum(int type) { return type == TYPE_Q4_K || type == TYPE_Q5_K; }
INLINE int block_bytes(int type) {
    return type == TYPE_Q4_0   ? 18
           : type == TYPE_Q5_0 ? 22
           : type == TYPE_Q8_0 ? 34
           : type == TYPE_Q4_K ? 144
           : type == TYPE_Q5_K ? 176
                               : 210;
}
INLINE int too_much(int type) {
    return type == TYPE_Q4_0 ? 8 : type == TYPE_Q5_0 ? 16 : type == TYPE_Q8_0 ? 128 : type == TYPE_Q6_K ? 32 : 0;
}

/* Where the values of a block's group stand among the 256 of it: Q6_K's come in another order out of their bytes. */
INLINE int place_of(int type, int group) {
    return type == TYPE_Q6_K ? 128 * (group / 8) + 32 * (group % 4) + 16 * (group / 4 % 2) : group_values(type) * group;
}

/* Where a block of each of the sixteen rows begins: of every fourth row, and how far the next ones are. */
typedef struct {
    const char *first, *fifth, *ninth, *thirteenth;
    int64_t stride, three_strides;
} Rows;

INLINE Rows rows_at(const char *at, int64_t stride) {
    return (Rows){at, at + 4 * stride, at + 8 * stride, at + 12 * stride, stride, 3 * stride};
}

/* Sixteen bytes each of four rows, `place` bytes behind where their blocks begin, `further` behind every fourth row. */
INLINE __m512i four_rows(const Rows *r, int64_t further) {
    __m512i found = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(r->first + further)));
    found = _mm512_inserti32x4(found, _mm_loadu_si128((const void *)(r->fifth + further)), 1);
    found = _mm512_inserti32x4(found, _mm_loadu_si128((const void *)(r->ninth + further)), 2);
    return _mm512_inserti32x4(found, _mm_loadu_si128((const void *)(r->thirteenth + further)), 3);
}

/* Sixteen bytes of each row: the first four of every row in to[0], and so on. */
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

/* The low sixteen bits of each lane as a number. */
INLINE __m512 halves(__m512i lanes) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(lanes)); }

/* Numbers of half precision, one of each row, `place` bytes behind where its block begins. */
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

INLINE void unpack_q8_0(Group *to, const Rows *r) {
    for (int half = 0; half < 2; half++) {
        turned(to->quads + 4 * half, r, 2 + 16 * half);
        for (int i = 4 * half; i < 4 * half + 4; i++)
            to->quads[i] = _mm512_xor_si512(to->quads[i], _mm512_set1_epi8((char)0x80));
    }
    to->scale = halves_at(r, 0);
}

INLINE void unpack_q4_0(Group *to, const Rows *r) {
    __m512i bytes[4];
    turned(bytes, r, 2);
    for (int i = 0; i < 4; i++) to->quads[i] = low_bits(bytes[i], 4), to->quads[4 + i] = high_half(bytes[i]);
    to->scale = halves_at(r, 0);
}

/* A scale, 32 fifth bits, and the other bits of values 0-15 and, in the upper halves, 16-31. */
INLINE void unpack_q5_0(Group *to, const Rows *r) {
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

/* Byte `place` of each lane's four, without a sign or with. */
INLINE __m512i byte_of(__m512i lanes, int place) {
    return _mm512_and_si512(_mm512_srli_epi32(lanes, 8 * place), _mm512_set1_epi32(255));
}
INLINE __m512i signed_byte_of(__m512i lanes, int place) {
    return _mm512_srai_epi32(_mm512_slli_epi32(lanes, 24 - 8 * place), 24);
}

/* Scales and minima of the eight groups of a block of Q4_K or Q5_K: its scale and minimum times six bits each. */
INLINE void unpack_scales(Group to[8], const Rows *r) {
    const __m512i six = _mm512_set1_epi32(63), four = _mm512_set1_epi32(15), two = _mm512_set1_epi32(48);
    __m512i head[4];
    turned(head, r, 0);
    __m512 scale = halves(head[0]), minimum = halves(_mm512_srli_epi32(head[0], 16));
    for (int g = 0; g < 8; g++) {
        __m512i one = byte_of(head[1], g % 4), other = byte_of(head[2], g % 4), both = byte_of(head[3], g % 4);
        __m512i scales = _mm512_and_si512(one, six), minima = _mm512_and_si512(other, six);
        if (g >= 4) {
            scales = _mm512_or_si512(_mm512_and_si512(both, four), _mm512_and_si512(_mm512_srli_epi32(one, 2), two));
            minima = _mm512_or_si512(_mm512_srli_epi32(both, 4), _mm512_and_si512(_mm512_srli_epi32(other, 2), two));
        }
        to[g].scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(scales));
        to[g].minimum = _mm512_mul_ps(minimum, _mm512_cvtepi32_ps(minima));
    }
}

/* Bit `place` of each byte, moved to the fifth place. */
INLINE __m512i fifth_bit(__m512i bytes, int place) {
    __m512i moved = place < 4 ? _mm512_slli_epi32(bytes, 4 - place) : _mm512_srli_epi32(bytes, place - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(16));
}

/* Of every 64 values the first 32 are the lower halves of 32 bytes, the others the upper ones. Q5_K has, before them, a
   fifth bit of each value. */
INLINE void unpack_q4_or_5_k(const int type, Group to[8], const Rows *r) {
    __m512i fifth[8];
    unpack_scales(to, r);
    for (int half = 0; half < 2 && type == TYPE_Q5_K; half++) turned(fifth + 4 * half, r, 16 + 16 * half);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++)
        for (int half = 0; half < 2; half++) {
            __m512i bytes[4];
            turned(bytes, r, (type == TYPE_Q5_K ? 48 : 16) + 32 * pair + 16 * half);
            for (int i = 0; i < 4; i++) {
                __m512i low = low_bits(bytes[i], 4), high = high_half(bytes[i]);
                if (type == TYPE_Q5_K) {
                    low = _mm512_or_si512(low, fifth_bit(fifth[4 * half + i], 2 * pair));
                    high = _mm512_or_si512(high, fifth_bit(fifth[4 * half + i], 2 * pair + 1));
                }
                to[2 * pair].quads[4 * half + i] = low;
                to[2 * pair + 1].quads[4 * half + i] = high;
            }
        }
}

/* 128 bytes of four bits each of two values, 64 of two more of four values, sixteen scales and the block's. */
INLINE void unpack_q6_k(Group to[16], const Rows *r) {
    const __m512i top = _mm512_set1_epi8(48);
    __m512i scales[4];
    turned(scales, r, 192);
    __m512 scale = halves_at(r, 208);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++, to += 4) {
            __m512i low[4], next[4], high[4];
            turned(low, r, 64 * half + 16 * part);
            turned(next, r, 64 * half + 32 + 16 * part);
            turned(high, r, 128 + 32 * half + 16 * part);
            for (int i = 0; i < 4; i++) {
                __m512i h = high[i];
                to[0].quads[i] = _mm512_or_si512(low_bits(low[i], 4), _mm512_and_si512(_mm512_slli_epi32(h, 4), top));
                to[1].quads[i] = _mm512_or_si512(low_bits(next[i], 4), _mm512_and_si512(_mm512_slli_epi32(h, 2), top));
                to[2].quads[i] = _mm512_or_si512(high_half(low[i]), _mm512_and_si512(h, top));
                to[3].quads[i] = _mm512_or_si512(high_half(next[i]), _mm512_and_si512(_mm512_srli_epi32(h, 2), top));
                int index = 8 * half + 2 * i + part; /* of the scale of group i */
                __m512i of_group = signed_byte_of(scales[index / 4], index % 4);
                to[i].scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(of_group));
            }
        }
}

/* Blocks of 256 in functions of their own: once for each tile they would take long to compile. */
__attribute__((noinline, unused)) static void unpacked_q4_k(Group *to, Rows rows) {
    unpack_q4_or_5_k(TYPE_Q4_K, to, &rows);
}
__attribute__((noinline, unused)) static void unpacked_q5_k(Group *to, Rows rows) {
    unpack_q4_or_5_k(TYPE_Q5_K, to, &rows);
}
__attribute__((noinline, unused)) static void unpacked_q6_k(Group *to, Rows rows) { unpack_q6_k(to, &rows); }

/* All groups of a block. */
INLINE void unpack(const int type, Group *to, Rows rows) {
    if (type == TYPE_Q4_0) unpack_q4_0(to, &rows);
    if (type == TYPE_Q5_0) unpack_q5_0(to, &rows);
    if (type == TYPE_Q8_0) unpack_q8_0(to, &rows);
    if (type == TYPE_Q4_K) unpacked_q4_k(to, rows);
    if (type == TYPE_Q5_K) unpacked_q5_k(to, rows);
    if (type == TYPE_Q6_K) unpacked_q6_k(to, rows);
}
