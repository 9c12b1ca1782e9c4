/* Several more tokens of each sequence in one call: each pass gets the tokens that the previous pass chose.

   A pass of a small model takes less time than Python needs to prepare it. */

#include "calls.h"
#include "vectors.h"

/* `decoder` and `sampling`: of a pass with as many rows as the first pass, one row per sequence. Data that differ per
   pass follow those of the previous pass: slots, `sequences`, angles, noise keys and chosen tokens. `live`: number of
   sequences in each pass, a prefix of the previous pass's sequences. `first`: tokens of the first pass. `embeddings`:
   (vocabulary, size), null if they are the weights of `lookup`; multiplied by `embedding_scale`. */
typedef struct {
    const DecoderCall *decoder;
    const SampleCall *sampling;
    const void *embeddings;
    const Weights *lookup;
    const int64_t *first, *live;
    int64_t passes;
    double embedding_scale;
} ContinuationCall;

INLINE void embed(const ContinuationCall *call, const int64_t *tokens, int64_t rows, const int is_bf16) {
    const int64_t size = call->decoder->size;
    void *to = call->decoder->residual;
    if (!call->embeddings) linear_rows(call->lookup, tokens, rows, to);
    for (int64_t row = 0; row < rows; row++) {
        const void *from = call->embeddings ? call->embeddings : to;
        const int64_t place = (call->embeddings ? tokens[row] : row) * size;
        for (int64_t i = 0; i < size; i += LANES)
            store(to, row * size + i, load(from, place + i, is_bf16) * (float)call->embedding_scale, is_bf16);
    }
}

static int compute(const ContinuationCall *call, int64_t start, int64_t rows) {
    DecoderCall decoder_call = *call->decoder;
    HeadsCall heads = *decoder_call.heads;
    AttentionCall attention = *decoder_call.attention;
    heads.slots += start;
    heads.rows = rows;
    attention.sequences += 4 * start;
    attention.num_sequences = rows;
    attention.max_queries = 1;
    for (int i = 0; i < 2; i++) {
        Angles *angles = decoder_call.angles + i;
        angles->cosine += start * angles->pairs;
        angles->sine += start * angles->pairs;
    }
    decoder_call.heads = &heads;
    decoder_call.attention = &attention;
    decoder_call.rows = rows;
    return decoder(&decoder_call);
}

/* Choose tokens. Where rounding decides, take the likeliest token, which is good enough for a draft. */
static void choose(const SampleCall *common, int64_t start, int64_t rows) {
    SampleCall call = *common;
    call.keys += start;
    call.chosen += start;
    call.rows = rows;
    sample_rows(&call);
    const double greedy = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (call.chosen[row] >= 0) continue;
        SampleCall one = call;
        one.logits = (const char *)call.logits + row * call.stride * (call.is_bf16 ? 2 : 4);
        one.temperatures = &greedy;
        one.chosen = call.chosen + row;
        one.rows = 1;
        sample_rows(&one);
        if (one.chosen[0] < 0) one.chosen[0] = 0; /* no number is the largest of these logits */
    }
}

/* 0, or -1 for a shape that attention does not support. */
int continuation(const ContinuationCall *call) {
    const int64_t *tokens = call->first;
    int64_t start = 0;
    for (int64_t pass = 0; pass < call->passes; pass++) {
        const int64_t rows = call->live[pass];
        if (call->decoder->is_bf16) embed(call, tokens, rows, 1);
        else embed(call, tokens, rows, 0);
        if (compute(call, start, rows)) return -1;
        choose(call->sampling, start, rows);
        tokens = call->sampling->chosen + start;
        start += rows;
    }
    return 0;
}
