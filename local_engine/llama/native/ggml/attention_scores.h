/* Scores: queries times keys, in sixteen sums that are added in the same order on every code path. */

#pragma once

#include "attention.h"

#define HALF 32  /* cells whose scores with SCORED queries fill the registers */
#define SCORED 2 /* queries at a time; their partial sums also stay in registers */

/* Sum the lanes of each of sixteen vectors. */
INLINE __m512 sums(__m512 v[LANES]) {
    for (int i = 0; i < LANES; i += 2)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 1]), _mm512_unpackhi_ps(v[i], v[i + 1]));
    for (int i = 0; i < LANES; i += 4) {
        __m512d a = (__m512d)v[i], b = (__m512d)v[i + 2];
        v[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    for (int i = 0; i < LANES; i += 8) {
        __m512 a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x44), b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee);
        v[i] = _mm512_add_ps(a, b);
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[8], 0x88), _mm512_shuffle_f32x4(v[0], v[8], 0xdd));
}

/* Order in which `sums` adds lanes: pairs, pairs of pairs, and so on. */
static const int8_t ORDER[LANES] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

/* Transpose sixteen vectors: lane i of vector j becomes lane j of vector i. */
INLINE void turn(__m512 v[LANES]) {
    __m512 t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + j], (__m512d)t[i + j + 2]);
            v[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + j], (__m512d)t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < LANES; j += 8) {
            t[j + i] = _mm512_shuffle_f32x4(v[j + i], v[j + i + 4], 0x88);
            t[j + i + 4] = _mm512_shuffle_f32x4(v[j + i], v[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

/* Transpose the keys of the cells, and prefetch the keys after them. */
INLINE void turn_keys(const Head *head, const Seen *seen) {
    const char *next = head->keys + (seen->cells[seen->count - 1] + 1) * head->key_stride;
    for (int cell = 0; cell < CELLS; cell += LANES) {
        const char *keys[LANES];
        for (int j = 0; j < LANES; j++) {
            keys[j] = head->keys + seen->cells[cell + j < seen->count ? cell + j : 0] * head->key_stride;
            fetch(next + (cell + j) * head->key_stride);
        }
        for (int i = 0; i < piece.length; i += LANES) {
            __m512 block[LANES];
            for (int j = 0; j < LANES; j++) block[j] = halves((const uint16_t *)keys[j] + i);
            turn(block);
            for (int j = 0; j < LANES; j++) _mm512_store_ps(&piece.keys[i + j][cell], block[j]);
        }
    }
}

/* Compute scores of `queries` queries from `q` on with half of the cells, one lane per cell. */
INLINE void score_half(const int queries, int q, int cell) {
    __m512 levels[5][SCORED][2]; /* pending sums of 1, 2, 4, 8 and 16 sums */
#pragma GCC unroll 16
    for (int place = 0; place < LANES; place++) {
        __m512 one[SCORED], other[SCORED];
#pragma GCC unroll 2
        for (int j = 0; j < queries; j++) one[j] = other[j] = _mm512_setzero_ps();
        for (int i = ORDER[place]; i < piece.length; i += LANES) {
            __m512 a = _mm512_load_ps(&piece.keys[i][cell]), b = _mm512_load_ps(&piece.keys[i][cell + LANES]);
#pragma GCC unroll 2
            for (int j = 0; j < queries; j++) {
                __m512 query = _mm512_set1_ps(piece.turned[i][q + j]);
                one[j] = _mm512_fmadd_ps(query, a, one[j]);
                other[j] = _mm512_fmadd_ps(query, b, other[j]);
            }
        }
        int level = 0;
#pragma GCC unroll 5
        for (; place >> level & 1; level++)
#pragma GCC unroll 2
            for (int j = 0; j < queries; j++) {
                one[j] = _mm512_add_ps(levels[level][j][0], one[j]);
                other[j] = _mm512_add_ps(levels[level][j][1], other[j]);
            }
#pragma GCC unroll 2
        for (int j = 0; j < queries; j++) {
            levels[level][j][0] = one[j];
            levels[level][j][1] = other[j];
        }
    }
#pragma GCC unroll 2
    for (int j = 0; j < queries; j++) {
        _mm512_store_ps(&piece.scores[q + j][cell], levels[4][j][0]);
        _mm512_store_ps(&piece.scores[q + j][cell + LANES], levels[4][j][1]);
    }
}

/* Compute scores of 1, 2 or 4 queries with all cells, directly from the cache. LANES / `queries` cells are processed at
   a time, and each vector holds the partial sums of one score. */
INLINE void score_straight(const int queries, int q, const Head *head, const Seen *seen) {
    const char *next = head->keys + (seen->cells[seen->count - 1] + 1) * head->key_stride;
    const int at_once = LANES / queries;
    for (int cell = 0; cell < seen->count; cell += at_once) {
        const char *keys[LANES];
        __m512 v[LANES];
        float scores[LANES] __attribute__((aligned(64)));
        for (int c = 0; c < at_once; c++) {
            keys[c] = head->keys + seen->cells[cell + c < seen->count ? cell + c : 0] * head->key_stride;
            fetch(next + (cell + c) * head->key_stride);
        }
        for (int c = 0; c < LANES; c++) v[c] = _mm512_setzero_ps();
        for (int i = 0; i < piece.length; i += LANES)
            for (int c = 0; c < at_once; c++) {
                __m512 key = halves((const uint16_t *)keys[c] + i);
                for (int j = 0; j < queries; j++) {
                    __m512 query = _mm512_load_ps(piece.query + (q + j) * piece.length + i);
                    v[c * queries + j] = _mm512_fmadd_ps(query, key, v[c * queries + j]);
                }
            }
        _mm512_store_ps(scores, sums(v));
        for (int c = 0; c < at_once; c++)
            for (int j = 0; j < queries; j++) piece.scores[q + j][cell + c] = scores[c * queries + j];
    }
}

/* Compute scores of all queries of a key head. Few queries are processed four at a time; the last four may overlap. */
static void score(const Head *head, const Seen *seen) {
    if (piece.count > FEW) {
        turn_keys(head, seen);
        for (int cell = 0; cell < seen->count; cell += HALF) FOR_ALL(score_half, SCORED, head, cell)
        return;
    }
    int q = head->first, end = q + piece.count;
    for (; q + 4 <= end; q += 4) score_straight(4, q, head, seen);
    if (q < end && piece.count > 4) {
        score_straight(4, end - 4, head, seen);
        return;
    }
    for (; q + 2 <= end; q += 2) score_straight(2, q, head, seen);
    if (q < end) score_straight(1, q, head, seen);
}
