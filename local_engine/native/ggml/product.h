/* The product of one type of weights with quantised activations: sixteen rows of the matrix at a time.

   Each lane of a vector is a row, so that 32 values of sixteen rows and a column take eight instructions, one
   conversion, one product of scales and one addition. ggml has eight sums for each row and column instead of one, and
   converts all of them. Integers are exact; floats are added group by group, in the same order however many columns
   and threads there are: a column has the same bits alone and in company.

   A file that includes this says which type it is for, and gets its `Compute`. */

#pragma once

#include "types.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#include "activations.h"
#include "weights.h"

#define COLUMNS 16 /* of a tile at most: their sums, a group of weights and what is computed fill the registers */
#define SHORT 256  /* values of a row: with shorter ones, of tiny models, little is won, and they keep ggml's own bits */
#define PANEL 16   /* groups that are unpacked at once for several tiles: they stay in the first-level cache */

/* Packed activations of one product at most: they stay in the second-level cache. Not on the stack, of which a thread
   may have no more than this: the C library takes it from the heap at a thread's first product, and frees it with it. */
#define PACKED_BYTES (1 << 19)
extern _Thread_local uint8_t updraft_packed[PACKED_BYTES] __attribute__((aligned(64), visibility("hidden")));

INLINE __m512i four_bytes(const uint8_t *at) { return _mm512_set1_epi32(*(const int32_t *)at); }

/* Sixteen rows' sums for a column, with one more group of its values. */
INLINE __m512 plus(const int type, __m512 total, const Group *group, const uint8_t *b, const int columns, const int j) {
    const int count = group_values(type);
    const uint8_t *values = b + count * j, *start = b + count * columns + 4 * j;
    __m512i sum = has_minimum(type) ? _mm512_setzero_si512() : four_bytes(start);
    for (int q = 0; q < count / 4; q++) sum = _mm512_dpbusd_epi32(sum, group->quads[q], four_bytes(values + 4 * q));
    __m512 scale = _mm512_mul_ps(group->scale, _mm512_castsi512_ps(four_bytes(start + 4 * columns)));
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total);
    return has_minimum(type) ? _mm512_fnmadd_ps(group->minimum, _mm512_castsi512_ps(four_bytes(start)), total) : total;
}

/* A tile: so many columns of `c`, of those sixteen rows of it that `rows` names. */
typedef struct {
    const uint8_t *b; /* packed */
    float *c;
    int64_t ldc;
    __mmask16 rows;
} Tile;

/* The whole of the tile from the matrix itself, whose next sixteen rows are fetched meanwhile. */
INLINE void from_matrix(
    const int type, const int columns, Tile tile, const char *at, int64_t stride, int64_t blocks) {
    const char *next = at + ROWS * stride;
    __m512 totals[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) totals[j] = _mm512_setzero_ps();
    for (; blocks; blocks--, at += block_bytes(type), next += ROWS * block_bytes(type)) {
        Group groups[16];
        unpack(type, groups, rows_at(at, stride));
        for (int line = 0; 64 * line < ROWS * block_bytes(type); line++) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
        for (int g = 0; g < groups_of(type); g++, tile.b += unit(type, columns))
#pragma GCC unroll 16
            for (int j = 0; j < columns; j++) totals[j] = plus(type, totals[j], &groups[g], tile.b, columns, j);
    }
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) _mm512_mask_storeu_ps(tile.c + tile.ldc * j, tile.rows, totals[j]);
}

/* What unpacked groups add to the tile, or begin it with. */
INLINE void from_panel(const int type, const int columns, Tile tile, const Group *panel, int groups, bool begins) {
    __m512 totals[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++)
        totals[j] = begins ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(tile.rows, tile.c + tile.ldc * j);
    for (int g = 0; g < groups; g++, tile.b += unit(type, columns)) {
        Group group = panel[g];
#pragma GCC unroll 16
        for (int j = 0; j < columns; j++) totals[j] = plus(type, totals[j], &group, tile.b, columns, j);
    }
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) _mm512_mask_storeu_ps(tile.c + tile.ldc * j, tile.rows, totals[j]);
}

typedef void FromMatrix(Tile tile, const char *at, int64_t stride, int64_t blocks);
typedef void FromPanel(Tile tile, const Group *panel, int groups, bool begins);

#define FROM_MATRIX(type, columns)                                                                     \
    static void type##_from_matrix_##columns(Tile tile, const char *at, int64_t stride, int64_t blocks) { \
        from_matrix(TYPE_##type, columns, tile, at, stride, blocks);                                   \
    }
#define FROM_PANEL(type, columns)                                                                    \
    static void type##_from_panel_##columns(Tile tile, const Group *panel, int groups, bool begins) { \
        from_panel(TYPE_##type, columns, tile, panel, groups, begins);                               \
    }
/* Several tiles are of all but equal width: none has fewer than eight columns. */
#define NARROW(F, type) F(type, 1) F(type, 2) F(type, 3) F(type, 4) F(type, 5) F(type, 6) F(type, 7)
#define WIDE(F, type)                                                                                    \
    F(type, 8) F(type, 9) F(type, 10) F(type, 11) F(type, 12) F(type, 13) F(type, 14) F(type, 15) F(type, 16)
#define NARROW_NAMES(name) name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7
#define WIDE_NAMES(name) \
    name##_8, name##_9, name##_10, name##_11, name##_12, name##_13, name##_14, name##_15, name##_16

/* Sixteen rows of the matrix and what they are multiplied with. */
INLINE void strip(
    const int type, FromMatrix *const *from_matrix, FromPanel *const *from_panel, const Product *p, const char *at,
    float *c, __mmask16 rows) {
    const int64_t stride = p->lda * block_bytes(type), tiles = (p->n + COLUMNS - 1) / COLUMNS;
    if (tiles == 1) {
        from_matrix[p->n]((Tile){updraft_packed, c, p->ldc, rows}, at, stride, p->k);
        return;
    }
    const char *next = at + ROWS * stride;
    for (int64_t block = 0; block < p->k;) {
        Group panel[PANEL];
        int64_t first = block;
        int groups = 0;
        for (; block < p->k && groups + groups_of(type) <= PANEL; block++, groups += groups_of(type)) {
            unpack(type, panel + groups, rows_at(at + block * block_bytes(type), stride));
            const char *wanted = next + ROWS * block * block_bytes(type);
            for (int line = 0; 64 * line < ROWS * block_bytes(type); line++)
                _mm_prefetch(wanted + 64 * line, _MM_HINT_T1);
        }
        for (int64_t t = 0; t < tiles; t++) { /* of all but equal width */
            int64_t from = p->n * t / tiles, columns = p->n * (t + 1) / tiles - from;
            const uint8_t *b = updraft_packed + groups_of(type) * (p->k * unit(type, from) + first * unit(type, columns));
            from_panel[columns]((Tile){b, c + p->ldc * from, p->ldc, rows}, panel, groups, first == 0);
        }
    }
}

/* This thread's rows of the matrix times columns that fit the buffer when packed. */
INLINE void rows_of_thread(
    const int type, FromMatrix *const *from_matrix, FromPanel *const *from_panel, const Params *params,
    const Product *p) {
    const int64_t stride = p->lda * block_bytes(type), tiles = (p->n + COLUMNS - 1) / COLUMNS;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = p->n * t / tiles, to = p->n * (t + 1) / tiles;
        const char *b = (const char *)p->b + p->ldb * from * (int64_t)activation_bytes(type);
        pack(type, updraft_packed + groups_of(type) * p->k * unit(type, from), b, p->ldb, p->k, (int)(to - from));
    }
    int64_t strips = (p->m + ROWS - 1) / ROWS;
    int64_t first = strips * params->thread / params->threads, end = strips * (params->thread + 1) / params->threads;
    for (int64_t s = first; s < end; s++) {
        int64_t row = ROWS * s <= p->m - ROWS ? ROWS * s : p->m - ROWS; /* the last strip may begin in the one before */
        __mmask16 rows = (__mmask16)(0xffff << (ROWS * s - row));
        strip(type, from_matrix, from_panel, p, (const char *)p->a + stride * row, p->c + row, rows);
    }
}

INLINE bool compute(
    const int type, FromMatrix *const *from_matrix, FromPanel *const *from_panel, const Params *params,
    const Product *whole) {
    int64_t most = PACKED_BYTES / (groups_of(type) * whole->k * unit(type, 1)); /* columns at once */
    if (whole->m < ROWS || whole->k * block_values(type) < SHORT || most < 1) return false;
    if (most > COLUMNS) most -= most % COLUMNS;
    for (int64_t from = 0; from < whole->n; from += most) {
        Product part = *whole;
        part.n = whole->n - from < most ? whole->n - from : most;
        part.b = (const char *)whole->b + whole->ldb * from * (int64_t)activation_bytes(type);
        part.c = whole->c + whole->ldc * from;
        rows_of_thread(type, from_matrix, from_panel, params, &part);
    }
    return true;
}

/* `alike`: a type whose groups have as many values and minima or none. */
#define PANELS(alike)       \
    WIDE(FROM_PANEL, alike) \
    static FromPanel *const alike##_from_panel[] = {[8] = WIDE_NAMES(alike##_from_panel)};
#define PRODUCT(function, type, alike)                                                                        \
    NARROW(FROM_MATRIX, type)                                                                                 \
    WIDE(FROM_MATRIX, type)                                                                                   \
    static FromMatrix *const type##_from_matrix[] = {                                                         \
        [1] = NARROW_NAMES(type##_from_matrix), WIDE_NAMES(type##_from_matrix)};                              \
    bool function(const Params *params, const Product *product) {                                             \
        return compute(TYPE_##type, type##_from_matrix, alike##_from_panel, params, product);                 \
    }
#else
#define PANELS(alike)
#define PRODUCT(function, type, alike)                            \
    bool function(const Params *params, const Product *product) { \
        (void)params, (void)product;                              \
        return false;                                             \
    }
#endif
