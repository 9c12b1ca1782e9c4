/* Products of weights in blocks of 256: Q4_K, Q5_K and Q6_K.

   Within a block, all sums are integers: the products of values, times the factors of their groups, and the factors of
   minima times the sums of a column's groups. A block takes two conversions and additions on every code path: a single
   column is processed row by row (`single.h`), several columns with one row per vector lane. */

#include "product.h"
#include "single.h"

#define COLUMNS 8 /* maximum per tile: two sums each and a quad of weights leave registers free */

/* Add a block to `total`. `minima`: sum to subtract, if the type has minima. */
INLINE __m512 plus(const int type, __m512 total, const Block256 *block, float scale, __m512i sums, __m512i minima) {
    const __m512 of_column = _mm512_set1_ps(scale);
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(block->scale, of_column), total);
    if (!has_minimum(type)) return total;
    return _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minima), _mm512_mul_ps(block->minimum, of_column), total);
}

/* Add a block to a tile; the first block initializes the tile. */
INLINE void from_block(const int type, const int columns, Tile tile, const Block256 *block, bool begins) {
    const int count = group_values(type);
    const int64_t group = columns * (count + 4);
    __m512i sums[COLUMNS], minima[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) sums[j] = minima[j] = _mm512_setzero_si512();
    for (int g = 0; g < groups_of(type); g++) {
        const uint8_t *b = tile.b + g * group;
        __m512i products[COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            products[j] = has_minimum(type) ? _mm512_setzero_si512() : four_bytes(b + count * columns + 4 * j);
        for (int q = 0; q < count / 4; q++)
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++)
                products[j] =
                    _mm512_dpbusd_epi32(products[j], block->groups[g].quads[q], four_bytes(b + count * j + 4 * q));
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            sums[j] = _mm512_add_epi32(sums[j], _mm512_mullo_epi32(products[j], block->groups[g].factor));
    }
    for (int pair = 0; pair < 4 && has_minimum(type); pair++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            __m512i of_column = four_bytes(tile.b + 2 * pair * group + count * columns + 4 * j);
            minima[j] = _mm512_dpwssd_epi32(minima[j], block->minima[pair], of_column);
        }
    const float *scales = (const float *)(tile.b + groups_of(type) * group);
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        float *c = tile.c + tile.ldc * j;
        __m512 total = begins ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(tile.rows, c);
        _mm512_mask_storeu_ps(c, tile.rows, plus(type, total, block, scales[j], sums[j], minima[j]));
    }
}

typedef void FromBlock(Tile tile, const Block256 *block, bool begins);

/* Compute the product of a single column, which needs no packed form. */
INLINE void single(const int type, const Product *p, const char *at, float *c, __mmask16 rows) {
    const int64_t stride = p->lda * block_bytes(type);
    const block_q8_K *b = p->b;
    const char *next = at + ROWS * stride;
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < p->k; i++, at += block_bytes(type), next += ROWS * block_bytes(type)) {
        Block256 head;
        Column column = column_of(type, b + i);
        __m512i sums = single_block(type, &head, at, stride, &column, next), minima = _mm512_setzero_si512();
        int32_t pairs[4];
        _mm_storeu_si128((void *)pairs, sums_of_32(b + i));
        for (int pair = 0; pair < 4 && has_minimum(type); pair++)
            minima = _mm512_dpwssd_epi32(minima, head.minima[pair], _mm512_set1_epi32(pairs[pair]));
        total = plus(type, total, &head, b[i].d, sums, minima);
    }
    _mm512_mask_storeu_ps(c, rows, total);
}

INLINE void strip(
    const int type, FromBlock *const *from_blocks, const Product *p, const char *at, float *c, __mmask16 rows) {
    const int64_t stride = p->lda * block_bytes(type), tiles = tiles_of(p, COLUMNS);
    const char *next = at + ROWS * stride;
    for (int64_t i = 0; i < p->k; i++) {
        Block256 block;
        unpack_256(type, &block, rows_at(at + i * block_bytes(type), stride));
        fetch_blocks(type, next + ROWS * i * block_bytes(type));
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = first_of(p, tiles, t), columns = first_of(p, tiles, t + 1) - from;
            const uint8_t *packed = updraft_packed + p->k * unit(type, from) + i * unit(type, columns);
            from_blocks[columns]((Tile){packed, c + p->ldc * from, p->ldc, rows}, &block, i == 0);
        }
    }
}

#define FROM_BLOCK(type, columns)                                                               \
    static void type##_from_block_##columns(Tile tile, const Block256 *block, bool begins) {    \
        from_block(GGML_TYPE_##type, columns, tile, block, begins);                             \
    }
#define FROM_BLOCKS(type)                                                                                   \
    FROM_BLOCK(type, 1) FROM_BLOCK(type, 2) FROM_BLOCK(type, 3) FROM_BLOCK(type, 4) FROM_BLOCK(type, 5)     \
    FROM_BLOCK(type, 6) FROM_BLOCK(type, 7) FROM_BLOCK(type, 8)                                             \
    static FromBlock *const type##_from_block[] = {                                                         \
        NULL, type##_from_block_1, type##_from_block_2, type##_from_block_3, type##_from_block_4,           \
        type##_from_block_5, type##_from_block_6, type##_from_block_7, type##_from_block_8};
#define STRIP(type, alike)                                                                      \
    static void type##_strip(const Product *p, const char *at, float *c, __mmask16 rows) {      \
        if (p->n == 1)                                                                          \
            single(GGML_TYPE_##type, p, at, c, rows);                                           \
        else                                                                                    \
            strip(GGML_TYPE_##type, alike##_from_block, p, at, c, rows);                        \
    }
FROM_BLOCKS(Q4_K)
FROM_BLOCKS(Q6_K)
STRIP(Q4_K, Q4_K)
STRIP(Q5_K, Q4_K)
STRIP(Q6_K, Q6_K)

PRODUCT(updraft_q4_k, GGML_TYPE_Q4_K, COLUMNS, Q4_K_strip)
PRODUCT(updraft_q5_k, GGML_TYPE_Q5_K, COLUMNS, Q5_K_strip)
PRODUCT(updraft_q6_k, GGML_TYPE_Q6_K, COLUMNS, Q6_K_strip)
