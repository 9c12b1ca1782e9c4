/* Values, mixed by the weights of their cells, in double precision. */

#pragma once

#include "attention.h"

#define GATHER 8 /* queries processed at a time */
#define SPAN 2   /* vectors of a value at a time, for four or fewer queries */

INLINE __m512d lower(__m512 v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
INLINE __m512d upper(__m512 v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }

/* Add sixteen elements, from `i` on, of all values to `queries` queries from `q` on. */
INLINE void gather_lanes(const int queries, int q, int i, int cells) {
    __m512d mixed[GATHER][2];
#pragma GCC unroll 8
    for (int j = 0; j < queries; j++)
        for (int h = 0; h < 2; h++) mixed[j][h] = _mm512_load_pd(mixed_of(q + j) + i + 8 * h);
    for (int cell = 0; cell < cells; cell++) {
        __m512d one = _mm512_load_pd(piece.values[cell]), other = _mm512_load_pd(piece.values[cell] + 8);
#pragma GCC unroll 8
        for (int j = 0; j < queries; j++) {
            __m512d weight = _mm512_set1_pd(piece.weights[q + j][cell]);
            mixed[j][0] = _mm512_fmadd_pd(weight, one, mixed[j][0]);
            mixed[j][1] = _mm512_fmadd_pd(weight, other, mixed[j][1]);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < queries; j++)
        for (int h = 0; h < 2; h++) _mm512_store_pd(mixed_of(q + j) + i + 8 * h, mixed[j][h]);
}

/* Add `vectors` vectors of each value, from element `i` on, to up to four queries, directly from the cache. */
INLINE void gather_vectors(const int queries, const int vectors, int q, int i, const Head *head, const Seen *seen) {
    __m512d mixed[4][2 * SPAN];
    for (int j = 0; j < queries; j++)
        for (int k = 0; k < 2 * vectors; k++) mixed[j][k] = _mm512_load_pd(mixed_of(q + j) + i + 8 * k);
    for (int cell = 0; cell < seen->count; cell++) {
        const uint16_t *value = (const uint16_t *)(head->values + seen->cells[cell] * head->value_stride) + i;
        for (int k = 0; k < vectors; k++) {
            __m512 part = halves(value + k * LANES);
            __m512d one = lower(part), other = upper(part);
            for (int j = 0; j < queries; j++) {
                __m512d weight = _mm512_set1_pd(piece.weights[q + j][cell]);
                mixed[j][2 * k] = _mm512_fmadd_pd(weight, one, mixed[j][2 * k]);
                mixed[j][2 * k + 1] = _mm512_fmadd_pd(weight, other, mixed[j][2 * k + 1]);
            }
        }
    }
    for (int j = 0; j < queries; j++)
        for (int k = 0; k < 2 * vectors; k++) _mm512_store_pd(mixed_of(q + j) + i + 8 * k, mixed[j][k]);
}

INLINE void gather_straight(const int queries, int q, const Head *head, const Seen *seen) {
    int i = 0;
    for (; i + SPAN * LANES <= piece.length; i += SPAN * LANES) gather_vectors(queries, SPAN, q, i, head, seen);
    for (; i < piece.length; i += LANES) gather_vectors(queries, 1, q, i, head, seen);
}

/* Mix values for all queries of a key head. For many queries, each sixteen elements are converted only once. */
static void gather(const Head *head, const Seen *seen) {
    const char *next = head->values + (seen->cells[seen->count - 1] + 1) * head->value_stride;
    for (int cell = 0; cell < CELLS; cell++) fetch(next + cell * head->value_stride);
    if (piece.count <= FEW) {
        FOR_ALL(gather_straight, 4, head, head, seen)
        return;
    }
    for (int i = 0; i < piece.length; i += LANES) {
        for (int cell = 0; cell < seen->count; cell++) {
            __m512 value = halves((const uint16_t *)(head->values + seen->cells[cell] * head->value_stride) + i);
            _mm512_store_pd(piece.values[cell], lower(value));
            _mm512_store_pd(piece.values[cell] + 8, upper(value));
        }
        FOR_ALL(gather_lanes, GATHER, head, i, seen->count)
    }
}

/* Whether all values of the cells are finite. */
static bool are_numbers(const Head *head, const Seen *seen) {
    const __m256i exponent = _mm256_set1_epi16(0x7c00);
    __mmask16 non_finite = 0;
    for (int cell = 0; cell < seen->count; cell++) {
        const uint16_t *value = (const uint16_t *)(head->values + seen->cells[cell] * head->value_stride);
        for (int i = 0; i < piece.length; i += LANES) {
            __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const void *)(value + i)), exponent);
            non_finite |= _mm256_cmpeq_epi16_mask(bits, exponent);
        }
    }
    return !non_finite;
}

/* Do the same as `gather` for query `q` alone, skipping cells that it does not see: these have no weight, but zero
   times infinity would be NaN. */
static void gather_seen(const Head *head, const Seen *seen, int q, uint64_t visible) {
    for (; visible; visible &= visible - 1) {
        const int cell = __builtin_ctzll(visible);
        const uint16_t *value = (const uint16_t *)(head->values + seen->cells[cell] * head->value_stride);
        const __m512d weight = _mm512_set1_pd(piece.weights[q][cell]);
        for (int i = 0; i < piece.length; i += LANES) {
            __m512 part = halves(value + i);
            double *mixed = mixed_of(q) + i;
            _mm512_store_pd(mixed, _mm512_fmadd_pd(weight, lower(part), _mm512_load_pd(mixed)));
            _mm512_store_pd(mixed + 8, _mm512_fmadd_pd(weight, upper(part), _mm512_load_pd(mixed + 8)));
        }
    }
}
