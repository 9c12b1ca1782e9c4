/* Matrix products with weights packed into panels of columns, for any number of rows.

   A panel holds the weights of PANEL outputs: for each input in turn, one weight per output; in bfloat16, two inputs at
   a time, as the processor's dot product requires. So a single row reads memory in one stream, and many rows find the
   panel in the cache. Every output is summed over the inputs in a fixed order: its bits do not depend on other rows. */

#include "panels.h"

#define BLOCK_INPUTS 1024  /* inputs that are summed separately: shorter sums have smaller rounding errors */

int64_t linear_panel(void) { return PANEL; }

/* Whether vectors have 512 bits and, if `is_bf16`, dot products of bfloat16 are available. */
int64_t linear_is_vectorised(int64_t is_bf16) {
    int64_t has_vectors = 0, has_dot_products = 0;
#if defined(__AVX512F__)
    has_vectors = 1;
#endif
#if defined(__AVX512BF16__)
    has_dot_products = 1;
#endif
    return is_bf16 ? has_dot_products : has_vectors;
}

/* `plain`: (outputs, inputs), rows `stride` elements apart. Elements beyond the last output stay unchanged in `packed`.
   Panels are written front to back, because scattered writes take several times as long. */
void linear_pack(const void *plain, int64_t stride, void *packed, const Weights *weights, int64_t num_threads) {
    const int64_t size = size_of(weights->is_bf16), words = weights->inputs * size / 4;
    const int64_t panels = (weights->outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t left = weights->outputs - panel * PANEL, outputs = left < PANEL ? left : PANEL;
        const char *from = (const char *)plain + panel * PANEL * stride * size;
        char *to = (char *)packed + panel * PANEL * weights->inputs * size;
        for (int64_t word = 0; word < words; word++)
            for (int64_t output = 0; output < outputs; output++)
                memcpy(to + (word * PANEL + output) * 4, from + output * stride * size + word * 4, 4);
    }
}

/* Unpack the weights of `outputs` into `plain`, (rows, inputs). Returns -1 for an output that does not exist. */
int linear_rows(const Weights *weights, const int64_t *outputs, int64_t rows, void *plain) {
    const int64_t words = weights->inputs * size_of(weights->is_bf16) / 4;
    for (int64_t row = 0; row < rows; row++) {
        if (outputs[row] < 0 || outputs[row] >= weights->outputs) return -1;
        if (weights->format) {
            quantized_row(weights, outputs[row], (char *)plain + row * words * 4);
            continue;
        }
        const int64_t panel = outputs[row] / PANEL, output = outputs[row] % PANEL;
        const char *from = (const char *)weights->packed + (panel * words * PANEL + output) * 4;
        for (int64_t word = 0; word < words; word++)
            memcpy((char *)plain + (row * words + word) * 4, from + word * PANEL * 4, 4);
    }
    return 0;
}

/* Set or increase the sums of `rows` rows of inputs, `stride` bytes apart, by the sums over `words` words. */
INLINE void tile(const int rows, const char *inputs, int64_t stride, const char *panel, int64_t words, vec *sums,
                 const int is_first, const int is_bf16) {
    vec kept[TILE_ROWS][VECTORS] = {0};
    for (int64_t word = 0; word < words; word++, panel += PANEL * 4) {
        uvec weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = words_at(panel + v * 64);
        UNROLL for (int row = 0; row < rows; row++) {
            const uvec x = all_of(inputs + row * stride + word * 4);
            for (int v = 0; v < VECTORS; v++) kept[row][v] = add_product(kept[row][v], weights[v], x, is_bf16);
            __asm__ volatile("" ::: "memory"); /* else GCC loads all rows' inputs first and runs out of registers */
        }
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) {
            vec *sum = sums + row * VECTORS + v;
            *sum = is_first ? kept[row][v] : *sum + kept[row][v];
        }
}

INLINE void tile_of(int rows, const char *inputs, int64_t stride, const char *panel, int64_t words, vec *sums,
                    const int is_first, const int is_bf16) {
    switch (rows) { /* a constant number of rows keeps the sums in registers */
#define ROWS(n) case n: tile(n, inputs, stride, panel, words, sums, is_first, is_bf16); break;
    ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if TILE_ROWS == 12
    ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
    }
}

/* Compute the sums of up to BLOCK_ROWS rows with one panel. */
INLINE void sum_block(const LinearCall *call, int64_t first, int64_t rows, int64_t panel, vec *sums,
                      const int is_bf16) {
    const int64_t inputs = call->weights->inputs, size = size_of(is_bf16), stride = call->stride * size;
    const char *weights = (const char *)call->weights->packed + panel * PANEL * inputs * size;
    for (int64_t from = 0; from < inputs; from += BLOCK_INPUTS) {
        const int64_t count = inputs - from < BLOCK_INPUTS ? inputs - from : BLOCK_INPUTS;
        const char *columns = (const char *)call->inputs + from * size;
        int64_t row = 0;
        for (int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--) {
            const int64_t tall = (rows - row + tiles - 1) / tiles; /* tiles of about equal height */
            tile_of((int)tall, columns + (first + row) * stride, stride, weights + from * PANEL * size,
                    count * size / 4, sums + row * VECTORS, from == 0, is_bf16);
            row += tall;
        }
    }
}

INLINE void multiply(const LinearCall *call, const int is_bf16) {
    const int64_t panels = (call->weights->outputs + PANEL - 1) / PANEL;
    const int64_t work = call->rows * call->weights->outputs * call->weights->inputs;
#pragma omp parallel num_threads(call->num_threads) if (work > PARALLEL_FROM)
    {
        vec sums[BLOCK_ROWS * VECTORS];
        for (int64_t first = 0; first < call->rows; first += BLOCK_ROWS) {
            const int64_t rows = call->rows - first < BLOCK_ROWS ? call->rows - first : BLOCK_ROWS;
#pragma omp for schedule(static) nowait
            for (int64_t panel = 0; panel < panels; panel++) {
                sum_block(call, first, rows, panel, sums, is_bf16);
                store_block(call, first, rows, panel, sums, is_bf16);
            }
        }
    }
}

void linear(const LinearCall *call) {
    if (call->weights->format) quantized_linear(call);
    else if (call->weights->is_bf16) multiply(call, 1);
    else multiply(call, 0);
}

void expert_linear(const ExpertsCall *call) {
    for (int64_t expert = 0; expert < call->num_experts; expert++) {
        const int64_t first = call->starts[expert], rows = call->starts[expert + 1] - first;
        if (rows == 0) continue;
        const Weights *weights = call->experts[expert];
        const int64_t size = size_of(weights->is_bf16);
        linear(&(LinearCall){.weights = weights, .rows = rows, .stride = call->stride,
                             .inputs = (const char *)call->inputs + first * call->stride * size,
                             .outputs = (char *)call->outputs + first * weights->outputs * size,
                             .num_threads = call->num_threads});
    }
}
