/* Products of weights in blocks of 32: Q4_0, Q5_0 and Q8_0.

   Each lane of a vector is a row, so that 32 values of sixteen rows and a column take eight instructions, one
   conversion, one product of scales and one addition. ggml keeps eight sums per row and column instead of one, and
   converts all of them. */

#include "product.h"

_Thread_local uint8_t updraft_packed[PACKED_BYTES];

#define COLUMNS 16 /* maximum per tile: their sums, a block of weights and temporaries fill the registers */
#define PANEL 16   /* blocks that are unpacked together for several tiles; they stay in the first-level cache */

/* Add one more block of a column's values to the sums of sixteen rows. */
INLINE __m512 plus(__m512 total, const Block32 *block, const uint8_t *b, const int columns, const int j) {
    const uint8_t *start = b + 32 * columns + 4 * j;
    __m512i sum = four_bytes(start);
    for (int q = 0; q < 8; q++) sum = _mm512_dpbusd_epi32(sum, block->quads[q], four_bytes(b + 32 * j + 4 * q));
    __m512 scale = _mm512_mul_ps(block->scale, _mm512_castsi512_ps(four_bytes(start + 4 * columns)));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total);
}

/* Compute a whole tile directly from the matrix, and prefetch its next sixteen rows. */
INLINE void from_matrix(const int type, const int columns, Tile tile, const char *at, int64_t stride, int64_t blocks) {
    const char *next = at + ROWS * stride;
    __m512 totals[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) totals[j] = _mm512_setzero_ps();
    for (; blocks; blocks--, at += block_bytes(type), next += ROWS * block_bytes(type), tile.b += unit(type, columns)) {
        Block32 block;
        unpack_32(type, &block, rows_at(at, stride));
        fetch_blocks(type, next);
#pragma GCC unroll 16
        for (int j = 0; j < columns; j++) totals[j] = plus(totals[j], &block, tile.b, columns, j);
    }
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) _mm512_mask_storeu_ps(tile.c + tile.ldc * j, tile.rows, totals[j]);
}

/* Add unpacked blocks to the tile; the first blocks initialize the tile. */
INLINE void from_panel(const int columns, Tile tile, const Block32 *panel, int blocks, bool begins) {
    __m512 totals[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++)
        totals[j] = begins ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(tile.rows, tile.c + tile.ldc * j);
    for (int i = 0; i < blocks; i++, tile.b += unit(GGML_TYPE_Q8_0, columns)) {
        Block32 block = panel[i];
#pragma GCC unroll 16
        for (int j = 0; j < columns; j++) totals[j] = plus(totals[j], &block, tile.b, columns, j);
    }
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) _mm512_mask_storeu_ps(tile.c + tile.ldc * j, tile.rows, totals[j]);
}

typedef void FromMatrix(Tile tile, const char *at, int64_t stride, int64_t blocks);
typedef void FromPanel(Tile tile, const Block32 *panel, int blocks, bool begins);

#define FROM_MATRIX(type, columns)                                                                        \
    static void type##_from_matrix_##columns(Tile tile, const char *at, int64_t stride, int64_t blocks) { \
        from_matrix(GGML_TYPE_##type, columns, tile, at, stride, blocks);                                 \
    }
#define FROM_PANEL(_, columns)                                                                        \
    static void from_panel_##columns(Tile tile, const Block32 *panel, int blocks, bool begins) { \
        from_panel(columns, tile, panel, blocks, begins);                                        \
    }
/* Several tiles have almost equal widths, so none has fewer than eight columns. */
#define NARROW(F, type) F(type, 1) F(type, 2) F(type, 3) F(type, 4) F(type, 5) F(type, 6) F(type, 7)
#define WIDE(F, type)                                                                                    \
    F(type, 8) F(type, 9) F(type, 10) F(type, 11) F(type, 12) F(type, 13) F(type, 14) F(type, 15) F(type, 16)
#define NARROW_NAMES(name) name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7
#define WIDE_NAMES(name) \
    name##_8, name##_9, name##_10, name##_11, name##_12, name##_13, name##_14, name##_15, name##_16

WIDE(FROM_PANEL, any)
static FromPanel *const from_panels[] = {[8] = WIDE_NAMES(from_panel)};

INLINE void strip(
    const int type, FromMatrix *const *from_matrices, const Product *p, const char *at, float *c, __mmask16 rows) {
    const int64_t stride = p->lda * block_bytes(type), tiles = tiles_of(p, COLUMNS);
    if (tiles == 1) {
        from_matrices[p->n]((Tile){updraft_packed, c, p->ldc, rows}, at, stride, p->k);
        return;
    }
    const char *next = at + ROWS * stride;
    for (int64_t first = 0; first < p->k; first += PANEL) {
        Block32 panel[PANEL];
        int blocks = p->k - first < PANEL ? (int)(p->k - first) : PANEL;
        for (int i = 0; i < blocks; i++) {
            unpack_32(type, panel + i, rows_at(at + (first + i) * block_bytes(type), stride));
            fetch_blocks(type, next + ROWS * (first + i) * block_bytes(type));
        }
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = first_of(p, tiles, t), columns = first_of(p, tiles, t + 1) - from;
            const uint8_t *b = updraft_packed + p->k * unit(type, from) + first * unit(type, columns);
            from_panels[columns]((Tile){b, c + p->ldc * from, p->ldc, rows}, panel, blocks, first == 0);
        }
    }
}

#define STRIP(type)                                                                                 \
    NARROW(FROM_MATRIX, type)                                                                       \
    WIDE(FROM_MATRIX, type)                                                                         \
    static FromMatrix *const type##_from_matrix[] = {                                               \
        [1] = NARROW_NAMES(type##_from_matrix), WIDE_NAMES(type##_from_matrix)};                    \
    static void type##_strip(const Product *p, const char *at, float *c, __mmask16 rows) {          \
        strip(GGML_TYPE_##type, type##_from_matrix, p, at, c, rows);                                \
    }
STRIP(Q4_0)
STRIP(Q5_0)
STRIP(Q8_0)

PRODUCT(updraft_q4_0, GGML_TYPE_Q4_0, COLUMNS, Q4_0_strip)
PRODUCT(updraft_q5_0, GGML_TYPE_Q5_0, COLUMNS, Q5_0_strip)
PRODUCT(updraft_q8_0, GGML_TYPE_Q8_0, COLUMNS, Q8_0_strip)
