/* The product of one type of weights with quantised activations: sixteen rows of the matrix at a time.

   Integers are exact; floats are added block by block, in the same order however many columns and threads there are: a
   column has the same bits alone and in company. A file that includes this says which types it is for, and how sixteen
   rows of each are multiplied. */

#pragma once

#include <immintrin.h>

#include "activations.h"
#include "types.h"
#include "weights.h"

#define SHORT 256 /* values of a row: with shorter ones, of tiny models, little is won, and they keep ggml's own bits */

/* Packed activations of one product at most: they stay in the second-level cache. Not on the stack, of which a thread
   may have no more than this: the C library takes it from the heap at a thread's first product, and frees it with it. */
#define PACKED_BYTES (1 << 19)
extern _Thread_local uint8_t updraft_packed[PACKED_BYTES] __attribute__((aligned(64), visibility("hidden")));

INLINE __m512i four_bytes(const uint8_t *at) { return _mm512_set1_epi32(*(const int32_t *)at); }

/* A tile of the result: so many columns of `c`, of those sixteen rows of it that `rows` names. */
typedef struct {
    const uint8_t *b; /* packed */
    float *c;
    int64_t ldc;
    __mmask16 rows;
} Tile;

/* Columns are packed tile by tile, all of but equal width, `most` at most. */
INLINE int64_t tiles_of(const Product *p, int64_t most) { return (p->n + most - 1) / most; }
INLINE int64_t first_of(const Product *p, int64_t tiles, int64_t tile) { return p->n * tile / tiles; }

INLINE const char *line_of(const char *at) { return (const char *)((intptr_t)at & -64); }

/* The `part`-th sixteenth of what sixteen blocks take in memory from `next` on. All at once they would be waited for;
   and a line that is left out, as some are where lines are counted from a place that is not the start of one, too. */
INLINE void fetch_part(const int type, const char *next, const int part) {
    const char *end = line_of(next + block_bytes(type) * (part + 1));
    for (const char *line = line_of(next + block_bytes(type) * part); line < end; line += 64)
        _mm_prefetch(line, _MM_HINT_T1);
}

INLINE void fetch_blocks(const int type, const char *next) {
    const char *end = line_of(next + ROWS * block_bytes(type));
    for (const char *line = line_of(next); line < end; line += 64) _mm_prefetch(line, _MM_HINT_T1);
}

/* Sixteen rows of the matrix, from `at` on, times all columns: rows of `c` that `rows` names. */
typedef void Strip(const Product *p, const char *at, float *c, __mmask16 rows);

/* This thread's rows of the matrix times columns that fit the buffer when packed. */
INLINE void rows_of_thread(const int type, const int64_t most, Strip *strip, const Params *params, const Product *p) {
    const int64_t stride = p->lda * block_bytes(type), tiles = tiles_of(p, most);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = first_of(p, tiles, t), to = first_of(p, tiles, t + 1);
        const char *b = (const char *)p->b + p->ldb * from * (int64_t)activation_bytes(type);
        pack(type, updraft_packed + p->k * unit(type, from), b, p->ldb, p->k, (int)(to - from));
    }
    int64_t strips = (p->m + ROWS - 1) / ROWS;
    int64_t first = strips * params->ith / params->nth, end = strips * (params->ith + 1) / params->nth;
    for (int64_t s = first; s < end; s++) {
        int64_t row = ROWS * s <= p->m - ROWS ? ROWS * s : p->m - ROWS; /* the last strip may begin in the one before */
        strip(p, (const char *)p->a + stride * row, p->c + row, (__mmask16)(0xffff << (ROWS * s - row)));
    }
}

/* `most`: columns of a tile. */
INLINE bool compute(const int type, const int64_t most, Strip *strip, const Params *params, const Product *whole) {
    int64_t at_once = PACKED_BYTES / (whole->k * unit(type, 1)); /* columns */
    if (whole->m < ROWS || whole->k * block_values(type) < SHORT || at_once < 1) return false;
    if (at_once > most) at_once -= at_once % most;
    for (int64_t from = 0; from < whole->n; from += at_once) {
        Product part = *whole;
        part.n = whole->n - from < at_once ? whole->n - from : at_once;
        part.b = (const char *)whole->b + whole->ldb * from * (int64_t)activation_bytes(type);
        part.c = whole->c + whole->ldc * from;
        rows_of_thread(type, most, strip, params, &part);
    }
    return true;
}

#define PRODUCT(function, type, most, strip) \
    bool function(const Params *params, const Product *product) { return compute(type, most, strip, params, product); }
