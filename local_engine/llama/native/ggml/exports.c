/* The functions of ggml's that are computed here: products of quantised weights, and attention.

   ggml comes here where it calls its own (`in_place.c`); what is not computed here is handed on to them. */

#include "product.h"

#ifdef PACKED_BYTES
_Thread_local uint8_t updraft_packed[PACKED_BYTES];
#endif

/* ggml's functions. `Tiled`: its way to compute K-quants with eight rows and more. */
typedef bool Sgemm(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type);
typedef bool Tiled(const Params *params, Tensor *result);
typedef void Attend(const Params *params, Tensor *result);

static Sgemm *ggmls;
static Tiled *ggmls_tiled;
static Attend *ggmls_attention;
static _Atomic uint32_t served; /* a bit for each type of weights */
static _Atomic bool attends;

/* Calls computed here, for tests; without a lock, so that some may be missing. */
EXPORT int64_t updraft_products, updraft_attentions;

/* The type of the weights that `result` is made of. */
EXPORT int updraft_weights_type(const Tensor *result) { return result->sources[0]->type; }

/* Before any of ours is in their place. */
EXPORT void updraft_hand_on(Sgemm *sgemm, Tiled *tiled, Attend *attention) {
    ggmls = sgemm;
    ggmls_tiled = tiled;
    ggmls_attention = attention;
}

/* Whether ours may be in their place. */
EXPORT bool updraft_is_known(void) { return ggmls; }

/* Which types of weights to compute here, a bit for each, and whether attention; the others are handed on. Between two
   products: the threads of one divide it as the first of them does. */
EXPORT void updraft_serve(uint32_t types, bool attention) {
    served = types;
    attends = attention;
}

static bool serves(int type) { return type >= 0 && type < 32 && served >> type & 1; }

static Compute *const computes[] = {
    [TYPE_Q4_0] = updraft_q4_0, [TYPE_Q5_0] = updraft_q5_0, [TYPE_Q8_0] = updraft_q8_0,
    [TYPE_Q4_K] = updraft_q4_k, [TYPE_Q5_K] = updraft_q5_k, [TYPE_Q6_K] = updraft_q6_k};
#define TYPES ((int)(sizeof(computes) / sizeof(*computes)))

static bool computed(const Params *params, const Product *product, int a_type, int b_type) {
    if (a_type < 0 || a_type >= TYPES || !computes[a_type]) return false;
    return b_type == (a_type >= TYPE_Q4_K ? TYPE_Q8_K : TYPE_Q8_0) && computes[a_type](params, product);
}

/* The product whether its type is served or not, to be compared with ggml's. False: not computed here. */
EXPORT bool updraft_product(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    Product product = {m, n, k, a, lda, b, ldb, c, ldc};
    return c_type == TYPE_F32 && computed(params, &product, a_type, b_type);
}

EXPORT bool updraft_sgemm(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    if (serves(a_type) && updraft_product(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type)) {
        if (params->thread == 0) updraft_products++;
        return true;
    }
    return ggmls(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}

/* False: to be computed as fewer rows are, by `updraft_sgemm`. */
EXPORT bool updraft_mul_mat_tiled(const Params *params, Tensor *result) {
    return !serves(updraft_weights_type(result)) && ggmls_tiled(params, result);
}

EXPORT void updraft_flash_attention(const Params *params, Tensor *result) {
    if (!attends || !updraft_attention(params, result))
        ggmls_attention(params, result);
    else if (params->thread == 0)
        updraft_attentions++;
}
