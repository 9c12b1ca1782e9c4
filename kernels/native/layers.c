/* Operations between the matrix products of a layer, in one pass each: norms, gated activations, and the transform of
   heads before attention. */

#include <math.h>

#include "calls.h"
#include "vectors.h"

#define PARALLEL_FROM 8192  /* elements: with fewer, one thread is done before a second one has started */
#define MAX_DIM 256

INLINE void norm_row(const NormCall *call, int64_t row, const int is_bf16) {
    const int64_t from = row * call->stride, kept = row * call->residual_stride, to = row * call->size;
    vec squares = {0};
    for (int64_t i = 0; i < call->size; i += LANES) {
        vec values = load(call->hidden, from + i, is_bf16);
        if (call->residual) {
            values = rounded(values + load(call->residual, kept + i, is_bf16), is_bf16);
            store(call->residual, kept + i, values, is_bf16);
        }
        squares += values * values;
    }
    const vec scale = all(1.0f / sqrtf(sum_of(squares) / (float)call->size + (float)call->eps));
    for (int64_t i = 0; i < call->size; i += LANES) {
        vec values = call->residual ? load(call->residual, kept + i, is_bf16) : load(call->hidden, from + i, is_bf16);
        vec weight = load(call->weight, i, is_bf16);
        if (call->unit_offset) store(call->out, to + i, values * scale * (weight + all(1)), is_bf16);
        else store(call->out, to + i, rounded(values * scale, is_bf16) * weight, is_bf16);
    }
}

void rms_norm(const NormCall *call) {
#pragma omp parallel for num_threads(call->num_threads) if (call->rows * call->size > PARALLEL_FROM)
    for (int64_t row = 0; row < call->rows; row++)
        if (call->is_bf16) norm_row(call, row, 1);
        else norm_row(call, row, 0);
}

INLINE vec exp_of(vec x) { return exp2_of(x * all(1.44269504f)); }

INLINE vec silu(vec x) { return x / (all(1) + exp_of(-x)); }

/* GELU with the tanh approximation: x * sigmoid(2u) equals x / 2 * (1 + tanh(u)). */
INLINE vec gelu_tanh(vec x) {
    vec u = all(0.7978845608f) * (x + all(0.044715f) * x * x * x);
    return x / (all(1) + exp_of(all(-2) * u));
}

INLINE vec smaller(vec a, vec b) { return -larger(-a, -b); }

/* SwiGLU of gpt-oss: both parts are clamped, and 1 is added to the up part. */
INLINE vec clamped_swiglu(vec x, vec up, const int is_bf16) {
    x = smaller(x, all(7));
    up = rounded(smaller(larger(up, all(-7)), all(7)) + all(1), is_bf16);
    return rounded(x / (all(1) + exp_of(all(-1.702f) * x)), is_bf16) * up;
}

INLINE vec gate(vec x, vec up, int64_t activation, const int is_bf16) {
    if (activation == SWIGLUOAI) return clamped_swiglu(x, up, is_bf16);
    return rounded(activation == GELU_TANH ? gelu_tanh(x) : silu(x), is_bf16) * up;
}

INLINE void gate_row(const GateCall *call, int64_t row, const int is_bf16) {
    const int64_t from = row * call->stride, up = from + call->size, to = row * call->size;
    const int64_t whole = call->size / LANES * LANES, left = call->size - whole;
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec x = load(call->gate_up, from + i, is_bf16);
        store(call->out, to + i, gate(x, load(call->gate_up, up + i, is_bf16), call->activation, is_bf16), is_bf16);
    }
    if (left) {
        const vec x = load_some(call->gate_up, from + whole, left, is_bf16);
        const vec y = gate(x, load_some(call->gate_up, up + whole, left, is_bf16), call->activation, is_bf16);
        store_some(call->out, to + whole, y, left, is_bf16);
    }
}

void gated(const GateCall *call) {
#pragma omp parallel for num_threads(call->num_threads) if (call->rows * call->size > PARALLEL_FROM)
    for (int64_t row = 0; row < call->rows; row++)
        if (call->is_bf16) gate_row(call, row, 1);
        else gate_row(call, row, 0);
}

INLINE void norm_head(float *head, const void *weight, const HeadsCall *call, const int is_bf16) {
    const int64_t dim = call->head_dim;
    vec squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) squares += load(head, i, 0) * load(head, i, 0);
    const vec scale = all(1.0f / sqrtf(sum_of(squares) / (float)dim + (float)call->eps));
    for (int64_t i = 0; i < dim; i += LANES) {
        vec factor = load(weight, i, is_bf16) + all(call->unit_offset ? 1 : 0);
        store(head, i, load(head, i, 0) * scale * factor, 0);
    }
}

INLINE void rotate_head(float *head, const HeadsCall *call, int64_t row) {
    const float *cosine = call->cosine + row * call->pairs, *sine = call->sine + row * call->pairs;
    for (int64_t i = 0; i < call->pairs; i++) {
        float a = head[i], b = head[i + call->pairs];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + call->pairs] = b * cosine[i] + a * sine[i];
    }
}

/* Write one position of a head's keys or values; `block` is the start of the head's block. */
INLINE void write_position(char *block, const float *head, int64_t offset, int is_key, const int dim, const int is_bf16) {
    const int64_t size = size_of(is_bf16), step = per_word(is_bf16), position = offset % LANES;
    char *group = block + offset / LANES * LANES * dim * size;
    char narrow[MAX_DIM * 4];
    for (int i = 0; i < dim; i += LANES) store(narrow, i, load(head, i, 0), is_bf16);
    if (is_key)
        for (int word = 0; word < dim / step; word++) memcpy(group + (word * LANES + position) * 4, narrow + word * 4, 4);
    else
        for (int i = 0; i < dim; i++)
            memcpy(group + (position / step * dim + i) * 4 + position % step * size, narrow + i * size, size);
}

INLINE void write_row(const HeadsCall *call, int64_t row, const int is_bf16) {
    const int64_t dim = call->head_dim, slot = call->slots[row], block = slot / call->block_size;
    const int64_t rotated = call->heads + call->kv_heads;
    for (int64_t head = 0; head < rotated + call->kv_heads && slot >= 0; head++) {
        const int64_t from = row * call->stride + head * dim, part = head - call->heads;
        float wide[MAX_DIM];
        for (int64_t i = 0; i < dim; i += LANES) store(wide, i, load(call->projected, from + i, is_bf16), 0);
        if (head < rotated) {
            const void *norm = part < 0 ? call->query_norm : call->key_norm;
            if (norm) norm_head(wide, norm, call, is_bf16);
            rotate_head(wide, call, row);
        }
        if (part < 0) {
            for (int64_t i = 0; i < dim; i += LANES) store(call->projected, from + i, load(wide, i, 0), is_bf16);
        } else {
            const int64_t to = (block * 2 * call->kv_heads + part) * call->block_size * dim;
            write_position((char *)call->cache + to * size_of(is_bf16), wide, slot % call->block_size, head < rotated,
                           (int)dim, is_bf16);
        }
    }
}

void write_heads(const HeadsCall *call) {
    const int64_t elements = call->rows * call->stride;
#pragma omp parallel for num_threads(call->num_threads) if (elements > PARALLEL_FROM)
    for (int64_t row = 0; row < call->rows; row++)
        if (call->is_bf16) write_row(call, row, 1);
        else write_row(call, row, 0);
}
