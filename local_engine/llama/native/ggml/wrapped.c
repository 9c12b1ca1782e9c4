/* Replacements of ggml's functions: products of quantized weights, and flash attention.

   The linker's --wrap redirects ggml's calls here and renames its functions to `__real_...` (`kernels.cmake`), which
   get unsupported calls. This file alone runs on every processor, so it is compiled without AVX-512. */

#include "types.h"

#include <stdlib.h>
#include <string.h>

#include "llamafile/sgemm.h"
#include "ops.h"
#include "tiled/tiled.h"

/* Declared with ggml's own signatures, so that a llama.cpp with other signatures does not compile. */
__typeof__(llamafile_sgemm) __real_llamafile_sgemm, __wrap_llamafile_sgemm;
__typeof__(ggml_compute_forward_mul_mat_tiled) __real_ggml_compute_forward_mul_mat_tiled,
    __wrap_ggml_compute_forward_mul_mat_tiled;
__typeof__(ggml_compute_forward_flash_attn_ext) __real_ggml_compute_forward_flash_attn_ext,
    __wrap_ggml_compute_forward_flash_attn_ext;

static bool active;

int64_t updraft_products, updraft_attentions;

/* Decided once, when the library is loaded, because the threads of a product must agree on the implementation. */
__attribute__((constructor)) static void choose(void) {
    const char *setting = getenv("UPDRAFT_LLAMA_KERNELS");
    __builtin_cpu_init();
    active = !(setting && !strcmp(setting, "off")) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("fma");
}

const char *updraft_ggml_kernels(void) { return active ? "Q4_0 Q5_0 Q8_0 Q4_K Q5_K Q6_K attention" : ""; }

static Compute *const computes[] = {
    [GGML_TYPE_Q4_0] = updraft_q4_0, [GGML_TYPE_Q5_0] = updraft_q5_0, [GGML_TYPE_Q8_0] = updraft_q8_0,
    [GGML_TYPE_Q4_K] = updraft_q4_k, [GGML_TYPE_Q5_K] = updraft_q5_k, [GGML_TYPE_Q6_K] = updraft_q6_k};

static Compute *compute_of(int type) {
    const int types = sizeof(computes) / sizeof(*computes);
    return active && type >= 0 && type < types ? computes[type] : NULL;
}

bool updraft_product(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    Compute *compute = compute_of(a_type);
    if (!compute || c_type != GGML_TYPE_F32) return false;
    if (b_type != (a_type >= GGML_TYPE_Q4_K ? GGML_TYPE_Q8_K : GGML_TYPE_Q8_0)) return false;
    Product product = {m, n, k, a, lda, b, ldb, c, ldc};
    return compute(params, &product);
}

bool __wrap_llamafile_sgemm(
    const Params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
    void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    if (!params->use_ref && updraft_product(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type)) {
        if (params->ith == 0) updraft_products++;
        return true;
    }
    return __real_llamafile_sgemm(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}

/* K-quants with eight rows or more. Returns false so that `llamafile_sgemm` computes them, as it does fewer rows. */
bool __wrap_ggml_compute_forward_mul_mat_tiled(const Params *params, Tensor *result) {
    const bool ours = !params->use_ref && compute_of(result->src[0]->type);
    return !ours && __real_ggml_compute_forward_mul_mat_tiled(params, result);
}

void __wrap_ggml_compute_forward_flash_attn_ext(const Params *params, Tensor *result) {
    if (!active || params->use_ref || !updraft_attention(params, result))
        __real_ggml_compute_forward_flash_attn_ext(params, result);
    else if (params->ith == 0)
        updraft_attentions++;
}
