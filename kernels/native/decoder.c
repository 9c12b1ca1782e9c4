/* All layers of a decoder in one call: the same kernels as layer by layer, without Python in between.

   A step of one row streams the weights through the caches, which evicts Python's memory between every two kernels. */

#include <string.h>

#include "calls.h"

#define LINE 64
#define CROWDED 2048 /* bytes: rows at a multiple of this stride share few lines of the level-1 cache */
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

/* Buffers for the results that one kernel passes to the next. */
typedef struct {
    char *normed, *update, *padded, *wide, *narrow;
    int64_t bytes;
} Places;

static int64_t whole_lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* `wide` holds projected heads, then gate and up; `narrow` holds the results of attention, then of the gate. */
static Places places_of(const DecoderCall *call) {
    const int64_t element = call->is_bf16 ? 2 : 4;
    int64_t wide = 0, narrow = 0;
    for (int64_t i = 0; i < call->num_layers; i++) {
        const Layer *layer = call->layers + i;
        wide = LARGER(wide, LARGER(layer->qkv->outputs, layer->gate_up->outputs));
        narrow = LARGER(narrow, LARGER(layer->output->inputs, layer->down->inputs));
    }
    const int64_t size = whole_lines(call->rows * call->size * element);
    const int64_t narrow_size = whole_lines(call->rows * narrow * element);
    const int64_t padded_size = whole_lines(call->rows * (LARGER(call->size, narrow) * element + LINE));
    Places places;
    places.normed = (char *)(((uintptr_t)call->scratch + LINE - 1) & -(uintptr_t)LINE);
    places.update = places.normed + size;
    places.narrow = places.update + size;
    places.padded = places.narrow + narrow_size;
    places.wide = places.padded + padded_size;
    places.bytes = 2 * size + narrow_size + padded_size + whole_lines(call->rows * wide * element) + LINE;
    return places;
}

int64_t decoder_scratch(const DecoderCall *call) { return places_of(call).bytes; }

/* Norm the sum of `update` and the residual, or the residual itself if there is no update yet. */
static void norm(const DecoderCall *call, const void *weight, const void *update, void *out) {
    rms_norm(&(NormCall){.hidden = update ? update : call->residual, .residual = update ? call->residual : NULL,
                         .weight = weight, .out = out, .rows = call->rows, .size = call->size, .stride = call->size,
                         .residual_stride = call->size, .unit_offset = call->unit_offset,
                         .num_threads = call->num_threads, .is_bf16 = call->is_bf16, .eps = call->eps});
}

/* Norm a layer's update in place; `weight` may be null. */
static void norm_update(const DecoderCall *call, const void *weight, void *update) {
    if (weight)
        rms_norm(&(NormCall){.hidden = update, .weight = weight, .out = update, .rows = call->rows, .size = call->size,
                             .stride = call->size, .unit_offset = call->unit_offset, .num_threads = call->num_threads,
                             .is_bf16 = call->is_bf16, .eps = call->eps});
}

/* `inputs`: contiguous rows, copied to longer rows in `padded` if their stride is a multiple of CROWDED. */
static void product(const DecoderCall *call, const Weights *weights, const char *inputs, char *outputs, char *padded) {
    const int64_t element = call->is_bf16 ? 2 : 4, bytes = weights->inputs * element;
    int64_t stride = weights->inputs;
    if (call->rows > 1 && bytes % CROWDED == 0) {
        stride += LINE / element;
        for (int64_t row = 0; row < call->rows; row++) memcpy(padded + row * (bytes + LINE), inputs + row * bytes, bytes);
        inputs = padded;
    }
    linear(&(LinearCall){.weights = weights, .inputs = inputs, .outputs = outputs, .rows = call->rows,
                         .stride = stride, .num_threads = call->num_threads});
}

static int mix(const DecoderCall *call, int64_t index, const Places *places) {
    const Layer *layer = call->layers + index;
    const Angles *angles = call->angles + layer->rotation;
    HeadsCall heads = *call->heads;
    heads.cache = (char *)heads.cache + index * call->layer_bytes;
    heads.projected = places->wide;
    heads.stride = layer->qkv->outputs;
    heads.cosine = angles->cosine;
    heads.sine = angles->sine;
    heads.pairs = angles->pairs;
    heads.query_norm = layer->query_norm;
    heads.key_norm = layer->key_norm;
    heads.eps = call->eps;
    heads.unit_offset = call->unit_offset;
    write_heads(&heads);
    AttentionCall attention = *call->attention;
    attention.cache = heads.cache;
    attention.query = places->wide;
    attention.query_stride = heads.stride;
    attention.out = places->narrow;
    attention.window = layer->window;
    attention.scale = layer->scale;
    const int64_t row_bytes = layer->output->inputs * (call->is_bf16 ? 2 : 4);
    memset(places->narrow + (call->rows - call->padding) * row_bytes, 0, call->padding * row_bytes);
    return paged_attention(&attention);
}

int decoder(const DecoderCall *call) {
    const Places places = places_of(call);
    char *update = NULL;
    for (int64_t i = 0; i < call->num_layers; i++) {
        const Layer *layer = call->layers + i;
        norm(call, layer->input_norm, update, places.normed);
        update = places.update;
        product(call, layer->qkv, places.normed, places.wide, places.padded);
        if (mix(call, i, &places)) return -1;
        product(call, layer->output, places.narrow, update, places.padded);
        norm_update(call, layer->attention_out_norm, update);
        norm(call, layer->mlp_norm, update, places.normed);
        product(call, layer->gate_up, places.normed, places.wide, places.padded);
        gated(&(GateCall){.gate_up = places.wide, .out = places.narrow, .rows = call->rows,
                          .size = layer->down->inputs, .stride = layer->gate_up->outputs, .activation = call->activation,
                          .num_threads = call->num_threads, .is_bf16 = call->is_bf16});
        product(call, layer->down, places.narrow, update, places.padded);
        norm_update(call, layer->mlp_out_norm, update);
    }
    norm(call, call->final_norm, update, call->out);
    if (call->head) product(call, call->head, call->out, call->logits, places.padded);
    return 0;
}
