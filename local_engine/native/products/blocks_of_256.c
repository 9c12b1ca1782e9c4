/* Products of weights in Q4_K and Q6_K, both blocks of 256, with activations in Q8_K: the bits of llama.cpp's own dot
   products.

   ggml takes one row of each at a time and unpacks the weights again for every row of activations. Here two rows of the
   matrix are unpacked once for up to eight columns, and 64 values are multiplied at a time. Integers are exact; of each
   block ggml has eight sums (and four more of Q4_K's minima), which it adds to as many floats, and so does this. */

#include "products.h"

#ifdef HAS_VNNI
#define ROWS 2
#define COLUMNS 8
#define QUARTERS 4 /* of a block: 64 values, one vector */

typedef struct {
    uint16_t scale, minimum; /* float16 */
    uint8_t scales[12];      /* eight of six bits, of 32 values each, and eight minima */
    uint8_t values[128];     /* 32 in the lower halves, and the next 32 in the upper ones */
} Q4_K;

typedef struct {
    uint8_t low[128]; /* four bits of each value */
    uint8_t high[64]; /* and two more */
    int8_t scales[16];
    uint16_t scale; /* float16 */
} Q6_K;

typedef struct {
    float scale;
    int8_t values[256];
    int16_t sums[16]; /* of sixteen values each */
} Q8_K;

/* The same in the order of use. For Q4_K, sums are of 32 values each. */
typedef struct {
    int8_t values[256];
    int16_t sums[16];
    float scale;
} __attribute__((aligned(64))) Packed;

/* One block of a row of the matrix: values without a sign, the scale of each pair of them, and what goes with the sums
   of activations: Q4_K's minima, or for Q6_K, whose values are 32 too much, -32 times the scales. */
typedef struct {
    __m512i values[QUARTERS], scales[QUARTERS];
    __m256i beside_sums;
    float scale, minimum;
} Unpacked;

static void pack(const int type, Packed *to, const Q8_K *b, int64_t ldb, int64_t k, int64_t columns) {
    static const int ORDER[] = {0, 2, 1, 3, 4, 6, 5, 7}; /* in which Q4_K's 32s come out of their bytes */
    for (int64_t block = 0; block < k; block++)
        for (int64_t j = 0; j < columns; j++, to++) {
            const Q8_K *from = b + ldb * j + block;
            for (int i = 0; i < 8; i++)
                __builtin_memcpy(to->values + 32 * i, from->values + 32 * (type == TYPE_Q4_K ? ORDER[i] : i), 32);
            for (int i = 0; i < 16; i++) to->sums[i] = type == TYPE_Q4_K ? 0 : from->sums[i];
            for (int i = 0; type == TYPE_Q4_K && i < 8; i++)
                to->sums[i] = (int16_t)(from->sums[2 * i] + from->sums[2 * i + 1]);
            to->scale = from->scale;
        }
}

/* Of the `scales`, of 16 bits each, these four, each throughout 128 bits. */
INLINE __m512i spread(__m256i scales, int a, int b, int c, int d) {
    const __m512i lane = _mm512_set_epi64(d, d, c, c, b, b, a, a);
    const __m512i places = _mm512_mullo_epi64(lane, _mm512_set1_epi64(0x0001000100010001));
    return _mm512_permutexvar_epi16(places, _mm512_castsi256_si512(scales));
}

INLINE Unpacked of_q4_k(const Q4_K *block) {
    const __m512i fifteen = _mm512_set1_epi8(15);
    Unpacked found;
    uint32_t packed[3];
    __builtin_memcpy(packed, block->scales, sizeof(packed));
    uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    __m128i bytes = _mm_set_epi32(
        (int)((packed[2] >> 4 & four) | (packed[1] >> 2 & two)), (int)(packed[1] & six),
        (int)((packed[2] & four) | (packed[0] >> 2 & two)), (int)(packed[0] & six));
    __m256i both = _mm256_cvtepu8_epi16(bytes); /* eight scales, eight minima */
    for (int half = 0; half < 2; half++) {
        __m512i values = _mm512_loadu_si512(block->values + 64 * half);
        found.values[2 * half] = _mm512_and_si512(values, fifteen);
        found.values[2 * half + 1] = _mm512_and_si512(_mm512_srli_epi64(values, 4), fifteen);
        found.scales[2 * half] = spread(both, 4 * half, 4 * half, 4 * half + 2, 4 * half + 2);
        found.scales[2 * half + 1] = spread(both, 4 * half + 1, 4 * half + 1, 4 * half + 3, 4 * half + 3);
    }
    found.beside_sums = _mm256_castsi128_si256(_mm256_extracti128_si256(both, 1));
    found.scale = from_half(block->scale);
    found.minimum = from_half(block->minimum);
    return found;
}

INLINE Unpacked of_q6_k(const Q6_K *block) {
    const __m512i fifteen = _mm512_set1_epi8(15), top = _mm512_set1_epi8(0x30);
    Unpacked found;
    __m256i scales = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)block->scales));
    for (int half = 0; half < 2; half++) {
        __m512i low = _mm512_loadu_si512(block->low + 64 * half);
        __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(block->high + 32 * half)));
        __m512i first = _mm512_sllv_epi64(high, _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4));
        __m512i second = _mm512_srlv_epi64(high, _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0));
        __m512i upper = _mm512_and_si512(_mm512_srli_epi64(low, 4), fifteen);
        found.values[2 * half] = _mm512_or_si512(_mm512_and_si512(low, fifteen), _mm512_and_si512(first, top));
        found.values[2 * half + 1] = _mm512_or_si512(upper, _mm512_and_si512(second, top));
        for (int z = 2 * half; z < 2 * half + 2; z++)
            found.scales[z] = spread(scales, 4 * z, 4 * z + 1, 4 * z + 2, 4 * z + 3);
    }
    found.beside_sums = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scales, 5));
    found.scale = from_half(block->scale);
    found.minimum = 0;
    return found;
}

INLINE Unpacked unpacked(const int type, const char *row, int64_t index) {
    return type == TYPE_Q4_K ? of_q4_k((const Q4_K *)row + index) : of_q6_k((const Q6_K *)row + index);
}

/* Eight floats, and for Q4_K after them four of its minima. */
INLINE __m512 add(const int type, __m512 total, const Unpacked *row, const Packed *column) {
    __m256i beside = _mm256_dpwssd_epi32(
        _mm256_setzero_si256(), _mm256_load_si256((const void *)column->sums), row->beside_sums);
    __m512i sums = type == TYPE_Q4_K ? _mm512_setzero_si512() : _mm512_zextsi256_si512(beside);
    for (int z = 0; z < QUARTERS; z++) {
        __m512i pairs = _mm512_maddubs_epi16(row->values[z], _mm512_load_si512(column->values + 64 * z));
        sums = _mm512_dpwssd_epi32(sums, pairs, row->scales[z]);
    }
    __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    __m256 scale = _mm256_set1_ps(column->scale * row->scale);
    if (type == TYPE_Q6_K) {
        __m256 half = _mm512_castps512_ps256(total);
        return _mm512_zextps256_ps512(_mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(eight), half));
    }
    __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(eight), beside, 1);
    __m256 minimum = _mm256_set1_ps(-column->scale * row->minimum);
    __m512 scales = _mm512_insertf32x8(_mm512_castps256_ps512(scale), minimum, 1);
    return _mm512_fmadd_ps(scales, _mm512_cvtepi32_ps(all), total);
}

/* ROWS by `columns` outputs; the second row may be the first again. `row_bytes`: of ROWS rows to the next. */
INLINE void tile(
    const int type, const int columns, const char *first, const char *second, int64_t row_bytes, const Packed *b,
    float *c, float *d, int64_t ldc, int64_t k) {
    const int64_t block_bytes = type == TYPE_Q4_K ? sizeof(Q4_K) : sizeof(Q6_K);
    const char *next = first + row_bytes;
    __m512 totals[COLUMNS][ROWS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) totals[j][0] = totals[j][1] = _mm512_setzero_ps();
    for (int64_t block = 0; block < k; block++, b += columns, next += ROWS * block_bytes) {
        Unpacked one = unpacked(type, first, block), other = unpacked(type, second, block);
        for (int line = 0; 64 * line < ROWS * block_bytes; line++) _mm_prefetch(next + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            totals[j][0] = add(type, totals[j][0], &one, b + j);
            totals[j][1] = add(type, totals[j][1], &other, b + j);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        __m512 both[] = {totals[j][0], totals[j][1]};
        __m256 minima[] = {_mm512_extractf32x8_ps(both[0], 1), _mm512_extractf32x8_ps(both[1], 1)};
        __m128 found = sums((__m256[]){_mm512_castps512_ps256(both[0]), _mm512_castps512_ps256(both[1]), minima[0], minima[1]});
        float four[4];
        _mm_storeu_ps(four, found);
        c[ldc * j] = type == TYPE_Q4_K ? four[0] + four[2] : four[0];
        d[ldc * j] = type == TYPE_Q4_K ? four[1] + four[3] : four[1];
    }
}

typedef void Tile(
    const char *first, const char *second, int64_t row_bytes, const Packed *b, float *c, float *d, int64_t ldc,
    int64_t k);

#define TILE(type, columns)                                                                                         \
    static void type##_##columns(                                                                                   \
        const char *first, const char *second, int64_t row_bytes, const Packed *b, float *c, float *d, int64_t ldc, \
        int64_t k) {                                                                                                \
        tile(TYPE_##type, columns, first, second, row_bytes, b, c, d, ldc, k);                                      \
    }
#define TILES(type)                                                                                                 \
    TILE(type, 1) TILE(type, 2) TILE(type, 3) TILE(type, 4) TILE(type, 5) TILE(type, 6) TILE(type, 7) TILE(type, 8) \
    static Tile *const type##_tiles[] = {                                                                           \
        NULL, type##_1, type##_2, type##_3, type##_4, type##_5, type##_6, type##_7, type##_8};
TILES(Q4_K)
TILES(Q6_K)

/* This thread's rows of the matrix times columns that fit the buffer when packed. */
static void computed(const Params *params, const Product *p, int type) {
    Packed *packed = (Packed *)updraft_packed;
    Tile *const *kinds = type == TYPE_Q4_K ? Q4_K_tiles : Q6_K_tiles;
    int64_t row_bytes = p->lda * (int64_t)(type == TYPE_Q4_K ? sizeof(Q4_K) : sizeof(Q6_K));
    int64_t tiles = (p->n + COLUMNS - 1) / COLUMNS;
    int64_t start = p->m * params->thread / params->threads, end = p->m * (params->thread + 1) / params->threads;
    for (int64_t t = 0; t < tiles; t++) { /* of all but equal width */
        int64_t from = p->n * t / tiles, to = p->n * (t + 1) / tiles;
        pack(type, packed + p->k * from, (const Q8_K *)p->b + p->ldb * from, p->ldb, p->k, to - from);
    }
    for (int64_t i = start; i < end; i += ROWS) {
        int64_t next = i + 1 < end ? i + 1 : i;
        const char *first = (const char *)p->a + row_bytes * i, *second = (const char *)p->a + row_bytes * next;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = p->n * t / tiles, to = p->n * (t + 1) / tiles;
            float *out = p->c + p->ldc * from;
            kinds[to - from](
                first, second, ROWS * row_bytes, packed + p->k * from, out + i, out + next, p->ldc, p->k);
        }
    }
}

/* One row of activations ggml computes well itself. */
bool updraft_blocks_of_256(const Params *params, const Product *product, int type) {
    int64_t most = PACKED_BYTES / (product->k * (int64_t)sizeof(Packed)); /* columns at once */
    if (product->n < 2 || most < 2) return false;
    if (most > COLUMNS) most -= most % COLUMNS;
    for (int64_t from = 0; from < product->n; from += most) {
        Product some = part(product, sizeof(Q8_K), from, product->n - from < most ? product->n - from : most);
        computed(params, &some, type);
    }
    return true;
}
#else
bool updraft_blocks_of_256(const Params *params, const Product *product, int type) {
    (void)params, (void)product, (void)type;
    return false;
}
#endif
