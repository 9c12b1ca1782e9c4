/* Product of one type of weights with quantized activations, sixteen rows of the matrix at a time.

   Integer sums are exact; floats are added block by block, in the same order for any number of columns and threads, so
   a column has the same bits alone and with others. Each including file defines its weight types, and the
   multiplication of sixteen rows of each. */

#pragma once

#include <immintrin.h>

#include "activations.h"
#include "types.h"
#include "weights.h"

#define SHORT 256 /* values per row: shorter rows, of tiny models, gain little and keep ggml's own bits */

/* Maximum bytes of packed activations of one product: they stay in the second-level cache. Not on the stack, which may
   be smaller: the C library allocates thread-local memory at a thread's first product, and frees it with the thread. */
#define PACKED_BYTES (1 << 19)
extern _Thread_local uint8_t updraft_packed[PACKED_BYTES] __attribute__((aligned(64), visibility("hidden")));

INLINE __m512i four_bytes(const uint8_t *at) { return _mm512_set1_epi32(*(const int32_t *)at); }

/* A tile of the result: several columns of `c`, in those of its sixteen rows that `rows` selects. */
typedef struct {
    const uint8_t *b; /* packed activations */
    float *c;
    int64_t ldc;
    __mmask16 rows;
} Tile;

/* Columns are packed tile by tile, with almost equal widths of at most `most`. */
INLINE int64_t tiles_of(const Product *p, int64_t most) { return (p->n + most - 1) / most; }
INLINE int64_t first_of(const Product *p, int64_t tiles, int64_t tile) { return p->n * tile / tiles; }

INLINE const char *line_of(const char *at) { return (const char *)((intptr_t)at & -64); }

/* Prefetch sixteenth number `part` of the memory of sixteen blocks from `next` on. Prefetching all at once would stall,
   and so would skipped lines, which occur if lines are not counted from the start of a line. */
INLINE void fetch_part(const int type, const char *next, const int part) {
    const char *end = line_of(next + block_bytes(type) * (part + 1));
    for (const char *line = line_of(next + block_bytes(type) * part); line < end; line += 64)
        _mm_prefetch(line, _MM_HINT_T1);
}

INLINE void fetch_blocks(const int type, const char *next) {
    const char *end = line_of(next + ROWS * block_bytes(type));
    for (const char *line = line_of(next); line < end; line += 64) _mm_prefetch(line, _MM_HINT_T1);
}

/* Multiply sixteen rows of the matrix, from `at` on, with all columns, for the rows of `c` that `rows` selects. */
typedef void Strip(const Product *p, const char *at, float *c, __mmask16 rows);

/* Multiply this thread's rows of the matrix with as many columns as fit the buffer when packed. */
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
        int64_t row = ROWS * s <= p->m - ROWS ? ROWS * s : p->m - ROWS; /* the last strip may overlap the one before */
        strip(p, (const char *)p->a + stride * row, p->c + row, (__mmask16)(0xffff << (ROWS * s - row)));
    }
}

/* `most`: columns per tile. */
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
