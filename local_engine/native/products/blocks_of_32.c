/* Products of weights in Q8_0 and Q5_0, both blocks of 32, with activations in Q8_0: the bits of llama.cpp's own.

   ggml's (llamafile_sgemm) reads four rows of a matrix at once, which to the processor are four short streams, and waits
   for memory at the beginning of each. Here the next four rows are fetched while these are computed, the activations are
   packed once in the order they are used, and no signs are moved between the factors: the weights are taken without a
   sign, and sums start at what that is too much. Integers are exact, and floats are added in ggml's order. */

#include "products.h"

#ifdef HAS_VNNI
#define ROWS 4    /* of the matrix, in a tile */
#define COLUMNS 6 /* at most: their sums fill the registers */

typedef struct {
    uint16_t scale; /* float16 */
    int8_t values[32];
} Q8_0;

typedef struct {
    uint16_t scale;
    uint8_t high[4]; /* the fifth bit of each value */
    uint8_t low[16]; /* of values 0-15 and, in the upper halves, 16-31 */
} __attribute__((packed)) Q5_0;

/* Bytes of one block of `columns` packed columns: values, where their sums start, scales. */
#define UNIT(columns) (64 * (columns) + 32)

/* `too_much`: what is added to a weight to be without a sign. */
static void pack(uint8_t *to, const Q8_0 *b, int64_t ldb, int64_t k, int columns, int too_much) {
    const __m256i offset = _mm256_set1_epi8((char)too_much), zero = _mm256_setzero_si256();
    for (int64_t block = 0; block < k; block++, to += UNIT(columns))
        for (int j = 0; j < columns; j++) {
            const Q8_0 *from = b + ldb * j + block;
            __m256i values = _mm256_loadu_si256((const void *)from->values);
            __m256i start = _mm256_sub_epi32(zero, _mm256_dpbusd_epi32(zero, offset, values));
            _mm256_store_si256((void *)(to + 32 * j), values);
            _mm256_store_si256((void *)(to + 32 * (columns + j)), start);
            ((float *)(to + 64 * columns))[j] = from_half(from->scale);
        }
}

/* A block's weights without a sign. */
INLINE __m256i weights(const int type, const char *row, int64_t index) {
    if (type == TYPE_Q8_0) {
        const Q8_0 *block = (const Q8_0 *)row + index;
        return _mm256_xor_si256(_mm256_set1_epi8((char)0x80), _mm256_loadu_si256((const void *)block->values));
    }
    const Q5_0 *block = (const Q5_0 *)row + index;
    __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)block->low));
    low = _mm256_and_si256(_mm256_srlv_epi64(low, _mm256_set_epi64x(4, 4, 0, 0)), _mm256_set1_epi8(15));
    uint32_t high;
    __builtin_memcpy(&high, block->high, sizeof(high));
    return _mm256_mask_add_epi8(low, high, low, _mm256_set1_epi8(16));
}

INLINE uint64_t scale(const int type, const char *row, int64_t index) {
    return type == TYPE_Q8_0 ? ((const Q8_0 *)row)[index].scale : ((const Q5_0 *)row)[index].scale;
}

INLINE __m256 add(__m256 total, __m256 scales, __m256i start, __m256i row, __m256i column) {
    return _mm256_fmadd_ps(scales, _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(start, row, column)), total);
}

/* `rows` (at most ROWS) by `columns` outputs. `fetch`: whether the next ROWS rows are wanted soon. */
INLINE void tile(
    const int type, const int columns, const char *a, int64_t row_bytes, int rows, const uint8_t *b, float *c,
    int64_t ldc, int64_t k, bool fetch) {
    const int block_bytes = type == TYPE_Q8_0 ? sizeof(Q8_0) : sizeof(Q5_0);
    const char *r0 = a, *r1 = rows > 1 ? r0 + row_bytes : r0, *r2 = rows > 2 ? r1 + row_bytes : r1;
    const char *r3 = rows > 3 ? r2 + row_bytes : r2, *next = a + ROWS * row_bytes;
    __m256 totals[COLUMNS][ROWS];
#pragma GCC unroll 6
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < ROWS; i++) totals[j][i] = _mm256_setzero_ps();
    for (int64_t block = 0; block < k; block++, b += UNIT(columns), next += ROWS * block_bytes) {
        if (fetch)
            for (int line = 0; 64 * line < ROWS * block_bytes; line++) _mm_prefetch(next + 64 * line, _MM_HINT_T0);
        uint64_t packed = scale(type, r3, block) << 48 | scale(type, r2, block) << 32 | scale(type, r1, block) << 16 |
                          scale(type, r0, block);
        __m128 four = _mm_cvtph_ps(_mm_cvtsi64_si128((long long)packed));
        __m256 scales = _mm256_set_m128(four, four);
        __m256i w0 = weights(type, r0, block), w1 = weights(type, r1, block);
        __m256i w2 = weights(type, r2, block), w3 = weights(type, r3, block);
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) {
            __m256i values = _mm256_load_si256((const void *)(b + 32 * j));
            __m256i start = _mm256_load_si256((const void *)(b + 32 * (columns + j)));
            __m256 both = _mm256_mul_ps(scales, _mm256_set1_ps(((const float *)(b + 64 * columns))[j]));
            totals[j][0] = add(totals[j][0], _mm256_shuffle_ps(both, both, 0x00), start, w0, values);
            totals[j][1] = add(totals[j][1], _mm256_shuffle_ps(both, both, 0x55), start, w1, values);
            totals[j][2] = add(totals[j][2], _mm256_shuffle_ps(both, both, 0xaa), start, w2, values);
            totals[j][3] = add(totals[j][3], _mm256_shuffle_ps(both, both, 0xff), start, w3, values);
        }
    }
    const __mmask8 wanted = (__mmask8)((1 << rows) - 1);
#pragma GCC unroll 6
    for (int j = 0; j < columns; j++) _mm_mask_storeu_ps(c + ldc * j, wanted, sums(totals[j]));
}

typedef void Tile(
    const char *a, int64_t row_bytes, int rows, const uint8_t *b, float *c, int64_t ldc, int64_t k, bool fetch);

#define TILE(type, columns)                                                                                          \
    static void type##_##columns(                                                                                    \
        const char *a, int64_t row_bytes, int rows, const uint8_t *b, float *c, int64_t ldc, int64_t k, bool fetch) { \
        tile(TYPE_##type, columns, a, row_bytes, rows, b, c, ldc, k, fetch);                                         \
    }
#define TILES(type)                                                                                                  \
    TILE(type, 1) TILE(type, 2) TILE(type, 3) TILE(type, 4) TILE(type, 5) TILE(type, 6)                              \
    static Tile *const type##_tiles[] = {NULL, type##_1, type##_2, type##_3, type##_4, type##_5, type##_6};
TILES(Q8_0)
TILES(Q5_0)

/* This thread's rows of the matrix times columns that fit the buffer when packed. */
static void computed(const Params *params, const Product *p, int type) {
    uint8_t *packed = updraft_packed;
    Tile *const *kinds = type == TYPE_Q8_0 ? Q8_0_tiles : Q5_0_tiles;
    int64_t row_bytes = p->lda * (int64_t)(type == TYPE_Q8_0 ? sizeof(Q8_0) : sizeof(Q5_0));
    int64_t panels = (p->m + ROWS - 1) / ROWS, tiles = (p->n + COLUMNS - 1) / COLUMNS;
    int64_t first = panels * params->thread / params->threads * ROWS;
    int64_t end = panels * (params->thread + 1) / params->threads * ROWS;
    end = end < p->m ? end : p->m;
    for (int64_t t = 0; t < tiles; t++) { /* of all but equal width */
        int64_t from = p->n * t / tiles, to = p->n * (t + 1) / tiles;
        pack(packed + p->k * UNIT(COLUMNS) * t, (const Q8_0 *)p->b + p->ldb * from, p->ldb, p->k, (int)(to - from),
             type == TYPE_Q8_0 ? 128 : 16);
    }
    for (int64_t i = first; i < end; i += ROWS)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = p->n * t / tiles, to = p->n * (t + 1) / tiles;
            kinds[to - from](
                (const char *)p->a + row_bytes * i, row_bytes, (int)(end - i < ROWS ? end - i : ROWS),
                packed + p->k * UNIT(COLUMNS) * t, p->c + p->ldc * from + i, p->ldc, p->k, t == 0);
        }
}

/* One row of activations ggml computes well itself, but not of Q5_0, which it takes long to unpack. */
bool updraft_blocks_of_32(const Params *params, const Product *product, int type) {
    int64_t fewest = type == TYPE_Q5_0 ? 1 : 2;
    int64_t most = PACKED_BYTES / (product->k * UNIT(COLUMNS)) * COLUMNS; /* columns at once */
    if (product->n < fewest || most < COLUMNS) return false;
    for (int64_t from = 0; from < product->n; from += most) {
        Product some = part(product, sizeof(Q8_0), from, product->n - from < most ? product->n - from : most);
        computed(params, &some, type);
    }
    return true;
}
#else
bool updraft_blocks_of_32(const Params *params, const Product *product, int type) {
    (void)params, (void)product, (void)type;
    return false;
}
#endif
