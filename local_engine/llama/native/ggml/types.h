/* Common types of these files: ggml's own types, and checks of the kernels' assumptions about them. */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-cpu-impl.h"
#include "ggml.h"
#include "quants.h"

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef struct ggml_compute_params Params;
typedef struct ggml_tensor Tensor;

_Static_assert(GGML_MAX_DIMS == 4 && GGML_MAX_SRC >= 5, "tensors have other dimensions or fewer sources");
_Static_assert(sizeof(((Tensor *)0)->op_params) >= 4 * sizeof(float), "attention has other parameters");
_Static_assert(sizeof(((Tensor *)0)->nb[0]) == sizeof(int64_t), "strides are of another size");
_Static_assert(
    GGML_TYPE_Q4_0 < GGML_TYPE_Q5_0 && GGML_TYPE_Q5_0 < GGML_TYPE_Q8_0 && GGML_TYPE_Q8_0 < GGML_TYPE_Q4_K &&
        GGML_TYPE_Q4_K < GGML_TYPE_Q5_K && GGML_TYPE_Q5_K < GGML_TYPE_Q6_K,
    "types come in another order");

#define AT(type, field, place) _Static_assert(offsetof(type, field) == (place), "blocks have another layout")
AT(block_q4_0, d, 0);
AT(block_q4_0, qs, 2);
AT(block_q5_0, d, 0);
AT(block_q5_0, qh, 2);
AT(block_q5_0, qs, 6);
AT(block_q8_0, d, 0);
AT(block_q8_0, qs, 2);
AT(block_q4_K, scales, 4);
AT(block_q4_K, qs, 16);
AT(block_q5_K, scales, 4);
AT(block_q5_K, qh, 16);
AT(block_q5_K, qs, 48);
AT(block_q6_K, ql, 0);
AT(block_q6_K, qh, 128);
AT(block_q6_K, scales, 192);
AT(block_q6_K, d, 208);
#undef AT
_Static_assert(QK4_0 == 32 && QK5_0 == 32 && QK8_0 == 32 && QK_K == 256, "blocks have other numbers of values");
_Static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q5_0) == 22 && sizeof(block_q8_0) == 34, "blocks are larger");
_Static_assert(sizeof(block_q4_K) == 144 && sizeof(block_q5_K) == 176, "blocks are larger");
_Static_assert(sizeof(block_q6_K) == 210, "blocks are larger");
_Static_assert(sizeof(((block_q8_K *)0)->bsums) == 16 * sizeof(int16_t), "activations have other sums");

/* C (n, m) = B (n, k blocks) times the transpose of A (m, k blocks); `ld*`: row distances, in blocks or floats. */
typedef struct {
    int64_t m, n, k;
    const void *a;
    int64_t lda;
    const void *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
} Product;

/* Compute this thread's part of a product. Returns false for unsupported matrices: few rows, or rows that are short or
   longer than those of any model. */
typedef bool Compute(const Params *params, const Product *product);
Compute updraft_q4_0, updraft_q5_0, updraft_q8_0, updraft_q4_k, updraft_q5_k, updraft_q6_k;

/* Functions that the library exports. Python calls them; the checks of `updraft doctor` call the last two. */

/* Names of the kernels in use in this process, separated by spaces; empty if ggml's own are in use. */
EXPORT const char *updraft_ggml_kernels(void);

/* Number of calls computed here; approximate, because threads count without a lock. */
EXPORT extern int64_t updraft_products, updraft_attentions;

/* Compute this thread's part of a product, with the arguments of `llamafile_sgemm`. Returns false if unsupported. */
EXPORT bool updraft_product(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type);

/* Compute this thread's part of `result`, a GGML_OP_FLASH_ATTN_EXT. Returns false if unsupported. */
EXPORT bool updraft_attention(const Params *params, Tensor *result);
