/* Parameters of the kernels in this folder: one structure per kernel. Python fills mirrors with the same fields. */

#pragma once

#include <stdint.h>

/* Formats of weights: the type of inputs and outputs, or quantized. */
enum { PLAIN, INT8, INT4, FP8 };

/* `packed`: panels of outputs (linear.c, quantized.c), (ceil(outputs / PANEL), inputs, PANEL). `bias`: null or one per
   output. Only for quantized weights: `scale`, `zero` and `minimum`, (panels, groups, PANEL); the latter two may be
   null. Scales and minima are floats; float16 if `has_halves`; or bytes that are multiplied by factors in float16,
   (panels, groups / factor_groups, PANEL), if `scale_factor` is not null. `format`: of the weights; `is_bf16`: inputs,
   outputs, bias and plain weights are bfloat16, else float. */
typedef struct {
    const void *packed, *bias, *scale;
    const int8_t *zero;
    const void *minimum;
    const uint16_t *scale_factor, *minimum_factor;
    int64_t outputs, inputs, is_bf16, format, groups, has_halves, factor_groups;
} Weights;

/* `inputs`: rows with a distance of `stride` elements. `outputs`: contiguous rows. */
typedef struct {
    const Weights *weights;
    const void *inputs;
    void *outputs;
    int64_t rows, stride, num_threads;
} LinearCall;

void linear(const LinearCall *call);

/* `inputs` and `outputs`: rows sorted by expert, rows of inputs `stride` elements apart. `experts`: the weights of each
   expert, all of one shape and format. `starts`: (num_experts + 1), first row of each expert. */
typedef struct {
    const Weights *const *experts;
    const int64_t *starts;
    const void *inputs;
    void *outputs;
    int64_t num_experts, stride, num_threads;
} ExpertsCall;

void expert_linear(const ExpertsCall *call);
void quantized_linear(const LinearCall *call);
int linear_rows(const Weights *weights, const int64_t *outputs, int64_t rows, void *plain);
void quantized_row(const Weights *weights, int64_t output, void *plain);

/* Rows of `hidden` and `residual` are `stride` and `residual_stride` elements apart; rows of `out` are contiguous. If
   `residual` is not null, it becomes the sum with `hidden`, and the sum is normed. */
typedef struct {
    const void *hidden;
    void *residual;
    const void *weight;
    void *out;
    int64_t rows, size, stride, residual_stride, unit_offset, num_threads, is_bf16;
    double eps;
} NormCall;

void rms_norm(const NormCall *call);

/* As in activation/types.py. */
enum { SILU, GELU_TANH, SWIGLUOAI };

/* `gate_up`: rows `stride` elements apart, `size` of the gate, then `size` of the up part. `out`: contiguous rows. */
typedef struct {
    const void *gate_up;
    void *out;
    int64_t rows, size, stride, activation, num_threads, is_bf16;
} GateCall;

void gated(const GateCall *call);

/* `projected`: rows `stride` elements apart, each with the heads of queries, keys and values. Queries are normed and
   rotated in place; keys are, too, on their way to the cache (AttentionCall gives its layout). `slots`: block *
   block_size + offset, negative for padding. `cosine`, `sine`: (rows, pairs) float. Norm weights may be null. */
typedef struct {
    void *projected;
    void *cache;
    const int64_t *slots;
    const float *cosine;
    const float *sine;
    const void *query_norm;
    const void *key_norm;
    int64_t rows, stride, heads, kv_heads, block_size, head_dim, pairs, unit_offset, num_threads, is_bf16;
    double eps;
} HeadsCall;

void write_heads(const HeadsCall *call);

/* `query` and `out`: (rows, heads, head_dim); rows of `query` are `query_stride` elements apart. `cache`: (blocks, 2 *
   kv_heads, block_size, head_dim), keys before values. Sixteen positions are stored together, keys as (words of a head,
   positions), values as (words of positions, head_dim), so that one vector holds the same word of sixteen keys, or of
   sixteen elements of a value. `sequences`: (n, 4): first row, position of the first query, number of queries, start of
   the block table in `tables`. `max_queries`: maximum per sequence. `window`: visible tokens, the query's own included;
   0 for all. `sinks`: null, or a logit per head that joins the softmax without a value. */
typedef struct {
    const void *query;
    void *out;
    const void *cache;
    const int64_t *sequences;
    const int32_t *tables;
    const float *sinks;
    int64_t query_stride;
    int64_t num_sequences;
    int64_t max_queries;
    int64_t heads;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t window;
    int64_t num_threads;
    int64_t is_bf16;
    double scale;
} AttentionCall;

/* 0, or -1 if head_dim is too large or head_dim or block_size is not a multiple of sixteen. */
int paged_attention(const AttentionCall *call);

/* `chosen`: a token per row, or -1 if rounding decides. `temperatures`, `top_p` and `min_p` (double), noise `keys` and
   `top_k` (int32): columns with one element per row; truncation columns are null if off for all rows. `mask`: a bit per
   token, rows `mask_stride` words apart; null for no mask. Rows of logits are `stride` elements apart. */
typedef struct {
    const void *logits;
    const uint32_t *mask;
    const double *temperatures;
    const uint64_t *keys;
    const int32_t *top_k;
    const double *top_p, *min_p;
    int64_t *chosen;
    int64_t rows, size, stride, mask_stride, num_threads, is_bf16;
    double min_temperature;
} SampleCall;

void sample_rows(const SampleCall *call);

/* Norms are null if the model has none. `rotation`: index into the pass's two. `window`: as in AttentionCall. */
typedef struct {
    const Weights *qkv, *output, *gate_up, *down;
    const void *input_norm, *query_norm, *key_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
    int64_t window, rotation;
    double scale;
} Layer;

typedef struct {
    const float *cosine, *sine;
    int64_t pairs;
} Angles;

/* `residual`: (rows, size) contiguous, the embeddings; overwritten. `out`: the same shape, after the final norm.
   `logits`: (rows, outputs of `head`), unless `head` is null. `heads` and `attention`: parameters common to all layers,
   with the cache of the first layer; the caches of other layers are `layer_bytes` apart. The last `padding` rows belong
   to no sequence. `scratch`: `decoder_scratch` bytes. */
typedef struct {
    const Layer *layers;
    const void *final_norm;
    const Weights *head;
    void *residual, *out, *logits, *scratch;
    const HeadsCall *heads;
    const AttentionCall *attention;
    Angles angles[2];
    int64_t num_layers, rows, padding, size, layer_bytes, unit_offset, activation, num_threads, is_bf16;
    double eps;
} DecoderCall;

/* Bytes of scratch memory, enough for all calls with at most the rows of `call`. */
int64_t decoder_scratch(const DecoderCall *call);

/* 0, or -1 for a shape that attention does not support. */
int decoder(const DecoderCall *call);
