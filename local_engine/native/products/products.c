/* llama.cpp's products with several rows of activations, computed here: the same bits, and faster.

   This library is loaded before ggml's and exports names that ggml calls; what it does not compute it hands on. */

#include "products.h"

_Thread_local uint8_t updraft_packed[PACKED_BYTES];

typedef bool Sgemm(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type);

static Sgemm *ggmls;
static _Atomic uint32_t served; /* a bit for each type of weights */

/* Calls computed here, for tests; without a lock, so that some may be missing. */
EXPORT int64_t updraft_products;

/* `others`: ggml's function. Until it is known, nothing is computed here, and ggml multiplies row by row. */
EXPORT void updraft_hand_on(Sgemm *others) { ggmls = others; }

/* The beginning of ggml_tensor. */
typedef struct Tensor {
    int32_t type;
    void *buffer;
    int64_t sizes[4];
    size_t strides[4];
    int32_t operation, parameters[16], flags;
    const struct Tensor *sources[10];
} Tensor;

typedef bool Tiled(const Params *params, Tensor *result);

static Tiled *ggmls_tiled;

/* ggml's way to compute K-quants with eight rows and more; until it is known, they are computed as fewer are. */
EXPORT void updraft_hand_on_tiled(Tiled *others) { ggmls_tiled = others; }

/* The type of the weights that `result` is made of. */
EXPORT int updraft_weights_type(const Tensor *result) { return result->sources[0]->type; }

/* Which types of weights to compute here, a bit for each; the others are handed on. Between two products: the threads
   of one divide it as the first of them does. */
EXPORT void updraft_serve(uint32_t types) { served = types; }

static bool serves(int type) { return type >= 0 && type < 32 && served >> type & 1; }

static bool computed(const Params *params, const Product *product, int a_type, int b_type) {
    if ((a_type == TYPE_Q8_0 || a_type == TYPE_Q5_0) && b_type == TYPE_Q8_0)
        return updraft_blocks_of_32(params, product, a_type);
    if ((a_type == TYPE_Q4_K || a_type == TYPE_Q6_K) && b_type == TYPE_Q8_K)
        return updraft_blocks_of_256(params, product, a_type);
    return false;
}

/* The product whether its type is served or not, to be compared with ggml's. False: not computed here. */
EXPORT bool updraft_product(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    Product product = {m, n, k, a, lda, b, ldb, c, ldc};
    return c_type == TYPE_F32 && computed(params, &product, a_type, b_type);
}

EXPORT bool llamafile_sgemm(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    if (serves(a_type) && updraft_product(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type)) {
        if (params->thread == 0) updraft_products++;
        return true;
    }
    return ggmls && ggmls(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}

/* False: to be computed as fewer rows are, by `llamafile_sgemm`. */
EXPORT bool ggml_compute_forward_mul_mat_tiled(const Params *params, Tensor *result) {
    return ggmls_tiled && !serves(updraft_weights_type(result)) && ggmls_tiled(params, result);
}
