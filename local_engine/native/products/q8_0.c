/* llama.cpp's products of Q8_0 matrices with several rows of activations, bit for bit the same and faster.

   ggml's own (llamafile_sgemm) reads four rows of a matrix at once, which to the processor are four short streams, and
   waits for memory at the beginning of each. Here the next four rows are fetched while these are computed, the
   activations are packed once in the order they are used, and no signs are moved between the factors: the weights get
   128 added, and sums start at what that is too much. Integers are exact, and floats are added in ggml's order.

   This library is loaded before ggml's and exports the name that ggml calls; what it does not compute it hands on. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define TYPE_F32 0  /* of enum ggml_type */
#define TYPE_Q8_0 8

/* The beginning of ggml_compute_params: thread number and number of threads. */
typedef struct {
    int thread, threads;
} Params;

typedef bool Product(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type);

static Product *ggmls;
static bool serves;

/* Calls computed here, for tests; without a lock, so that some may be missing. */
EXPORT int64_t updraft_products;

/* `others`: ggml's function. Before the first call of the one below. */
EXPORT void updraft_hand_on(Product *others) { ggmls = others; }

/* Whether to compute here; if not, everything is handed on. */
EXPORT void updraft_serve(int on) { serves = on; }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define ROWS 4          /* of the matrix, in a tile */
#define COLUMNS 6       /* at most: their sums fill the registers */
#define BLOCK_BYTES 34  /* sizeof(Block) */
#define PACKED_BYTES (1 << 18)

typedef struct {
    uint16_t scale; /* float16 */
    int8_t values[32];
} Block;

/* Bytes of one block of `columns` packed columns: values, where their sums start, scales. */
#define UNIT(columns) (64 * (columns) + 32)

static void pack(uint8_t *to, const Block *b, int64_t ldb, int64_t k, int columns) {
    const __m256i offset = _mm256_set1_epi8((char)0x80), zero = _mm256_setzero_si256();
    for (int64_t block = 0; block < k; block++, to += UNIT(columns))
        for (int j = 0; j < columns; j++) {
            const Block *from = b + ldb * j + block;
            __m256i values = _mm256_loadu_si256((const void *)from->values);
            __m256i start = _mm256_sub_epi32(zero, _mm256_dpbusd_epi32(zero, offset, values));
            _mm256_store_si256((void *)(to + 32 * j), values);
            _mm256_store_si256((void *)(to + 32 * (columns + j)), start);
            ((float *)(to + 64 * columns))[j] = _cvtsh_ss(from->scale);
        }
}

/* In the order of ggml's hsum. */
INLINE float sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE __m256i weights(const Block *block) {
    return _mm256_xor_si256(_mm256_set1_epi8((char)0x80), _mm256_loadu_si256((const void *)block->values));
}

INLINE __m256 add(__m256 total, __m256 scale, __m256i start, __m256i row, __m256i column) {
    return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(start, row, column)), total);
}

/* ROWS by `columns` outputs. `fetch`: whether the next ROWS rows are wanted soon. */
INLINE void tile(
    const Block *a, int64_t lda, const uint8_t *b, float *c, int64_t ldc, int64_t k, const int columns, bool fetch) {
    __m256 totals[COLUMNS][ROWS];
#pragma GCC unroll 6
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < ROWS; i++) totals[j][i] = _mm256_setzero_ps();
    const char *next = (const char *)(a + ROWS * lda);
    for (int64_t block = 0; block < k; block++, b += UNIT(columns), next += ROWS * BLOCK_BYTES) {
        if (fetch)
            for (int line = 0; line < 3; line++) _mm_prefetch(next + 64 * line, _MM_HINT_T0);
        const Block *r0 = a + block, *r1 = r0 + lda, *r2 = r1 + lda, *r3 = r2 + lda;
        uint64_t packed = (uint64_t)r3->scale << 48 | (uint64_t)r2->scale << 32 | (uint64_t)r1->scale << 16 | r0->scale;
        __m128 four = _mm_cvtph_ps(_mm_cvtsi64_si128((long long)packed));
        __m256 scales = _mm256_set_m128(four, four);
        __m256i w0 = weights(r0), w1 = weights(r1), w2 = weights(r2), w3 = weights(r3);
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
#pragma GCC unroll 6
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < ROWS; i++) c[ldc * j + i] = sum(totals[j][i]);
}

/* The same for one row of the matrix: what is left below the last tile. */
static void row(const Block *a, const uint8_t *b, float *c, int64_t ldc, int64_t k, int columns) {
    for (int j = 0; j < columns; j++) {
        const uint8_t *from = b;
        __m256 total = _mm256_setzero_ps();
        for (int64_t block = 0; block < k; block++, from += UNIT(columns)) {
            __m256i values = _mm256_load_si256((const void *)(from + 32 * j));
            __m256i start = _mm256_load_si256((const void *)(from + 32 * (columns + j)));
            float scale = _cvtsh_ss(a[block].scale) * ((const float *)(from + 64 * columns))[j];
            total = add(total, _mm256_set1_ps(scale), start, weights(a + block), values);
        }
        c[ldc * j] = sum(total);
    }
}

typedef void Tile(
    const Block *a, int64_t lda, const uint8_t *b, float *c, int64_t ldc, int64_t k, bool fetch);

#define TILE(columns)                                                                                               \
    static void tile_##columns(                                                                                     \
        const Block *a, int64_t lda, const uint8_t *b, float *c, int64_t ldc, int64_t k, bool fetch) {              \
        tile(a, lda, b, c, ldc, k, columns, fetch);                                                                 \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static Tile *const TILES[] = {NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

/* This thread's rows of the matrix times `n` columns, which fit the buffer when packed. */
static void product(
    const Params *params, int64_t m, int64_t n, int64_t k, const Block *a, int64_t lda, const Block *b, int64_t ldb,
    float *c, int64_t ldc) {
    uint8_t packed[PACKED_BYTES] __attribute__((aligned(64)));
    int64_t panels = (m + ROWS - 1) / ROWS, tiles = (n + COLUMNS - 1) / COLUMNS;
    int64_t first = panels * params->thread / params->threads * ROWS;
    int64_t end = panels * (params->thread + 1) / params->threads * ROWS;
    end = end < m ? end : m;
    for (int64_t t = 0; t < tiles; t++) { /* of all but equal width */
        int64_t from = n * t / tiles, to = n * (t + 1) / tiles;
        pack(packed + k * (64 * from + 32 * t), b + ldb * from, ldb, k, (int)(to - from));
    }
    for (int64_t i = first; i < end; i += ROWS)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = n * t / tiles, to = n * (t + 1) / tiles;
            const uint8_t *columns = packed + k * (64 * from + 32 * t);
            float *out = c + ldc * from + i;
            if (i + ROWS <= end)
                TILES[to - from](a + lda * i, lda, columns, out, ldc, k, t == 0);
            else
                for (int64_t last = i; last < end; last++)
                    row(a + lda * last, columns, out + (last - i), ldc, k, (int)(to - from));
        }
}

/* False if it is not for us: one row of activations ggml computes well itself. */
static bool computed(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc) {
    int64_t most = PACKED_BYTES / (k * UNIT(1)); /* columns at once; wider tiles take less for each */
    if (n < 2 || most < COLUMNS) return false;
    most -= most % COLUMNS;
    for (int64_t from = 0; from < n; from += most)
        product(
            params, m, n - from < most ? n - from : most, k, a, lda, (const Block *)b + ldb * from, ldb,
            (float *)c + ldc * from, ldc);
    if (params->thread == 0) updraft_products++;
    return true;
}
#else
static bool computed(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc) {
    (void)params, (void)m, (void)n, (void)k, (void)a, (void)lda, (void)b, (void)ldb, (void)c, (void)ldc;
    return false;
}
#endif

/* C (n, m) = B (n, k blocks) times the transpose of A (m, k blocks); `ld*`: distances of rows, in blocks or floats. */
EXPORT bool llamafile_sgemm(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    if (serves && a_type == TYPE_Q8_0 && b_type == TYPE_Q8_0 && c_type == TYPE_F32 &&
        computed(params, m, n, k, a, lda, b, ldb, c, ldc))
        return true;
    return ggmls(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}
