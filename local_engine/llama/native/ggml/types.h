/* What the files here share: ggml's types and tensors, and the arguments of its products. */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { /* of enum ggml_type */
    TYPE_F32 = 0,
    TYPE_F16 = 1,
    TYPE_Q4_0 = 2,
    TYPE_Q5_0 = 6,
    TYPE_Q8_0 = 8,
    TYPE_Q4_K = 12,
    TYPE_Q5_K = 13,
    TYPE_Q6_K = 14,
    TYPE_Q8_K = 15
};

/* The beginning of ggml_compute_params: thread number and number of threads. */
typedef struct {
    int thread, threads;
} Params;

/* The beginning of ggml_tensor, up to its data. `strides`: bytes. */
typedef struct Tensor {
    int32_t type;
    void *buffer;
    int64_t sizes[4];
    size_t strides[4];
    int32_t operation, parameters[16], flags;
    const struct Tensor *sources[10];
    const struct Tensor *viewed;
    size_t offset;
    void *data;
} Tensor;

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

/* This thread's part of a product. False if it is not for us: a matrix of few rows, or rows that are short or longer
   than any that a model has. */
typedef bool Compute(const Params *params, const Product *product);
Compute updraft_q4_0, updraft_q5_0, updraft_q8_0, updraft_q4_k, updraft_q5_k, updraft_q6_k;

/* This thread's part of `result`, a GGML_OP_FLASH_ATTN_EXT. False if it is not for us. */
bool updraft_attention(const Params *params, Tensor *result);
