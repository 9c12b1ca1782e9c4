/* What the files here share: the arguments of ggml's product, and who computes which types. */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { TYPE_F32 = 0, TYPE_Q5_0 = 6, TYPE_Q8_0 = 8, TYPE_Q4_K = 12, TYPE_Q6_K = 14, TYPE_Q8_K = 15 }; /* of enum ggml_type */

/* The beginning of ggml_compute_params: thread number and number of threads. */
typedef struct {
    int thread, threads;
} Params;

/* C (n, m) = B (n, k blocks) times the transpose of A (m, k blocks); `ld*`: distances of rows, in blocks or floats. */
typedef struct {
    int64_t m, n, k;
    const void *a;
    int64_t lda;
    const void *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
} Product;

/* Packed activations of one product at most: they stay in the second-level cache. Not on the stack, of which a thread
   may have no more than this: the C library takes it from the heap at a thread's first product, and frees it with it. */
#define PACKED_BYTES (1 << 18)
extern _Thread_local uint8_t updraft_packed[PACKED_BYTES] __attribute__((aligned(64), visibility("hidden")));

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_VNNI 1
#include <immintrin.h>

/* `columns` of the product from `from` on. */
INLINE Product part(const Product *whole, size_t block_bytes, int64_t from, int64_t columns) {
    Product found = *whole;
    found.n = columns;
    found.b = (const char *)whole->b + whole->ldb * from * (int64_t)block_bytes;
    found.c = whole->c + whole->ldc * from;
    return found;
}

/* The sums of four vectors, each in the order of ggml's hsum: halves, then quarters, then two. */
INLINE __m128 sums(const __m256 v[4]) {
    __m128 half[4];
    for (int i = 0; i < 4; i++) half[i] = _mm_add_ps(_mm256_extractf128_ps(v[i], 1), _mm256_castps256_ps128(v[i]));
    __m128 ab = _mm_add_ps(_mm_movelh_ps(half[0], half[1]), _mm_movehl_ps(half[1], half[0]));
    __m128 cd = _mm_add_ps(_mm_movelh_ps(half[2], half[3]), _mm_movehl_ps(half[3], half[2]));
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

INLINE float from_half(uint16_t half) { return _cvtsh_ss(half); }
#endif

/* False if it is not for us. */
bool updraft_blocks_of_32(const Params *params, const Product *product, int type);
bool updraft_blocks_of_256(const Params *params, const Product *product, int type);
