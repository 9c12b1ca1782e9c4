/* Matrix products with INT8, INT4 and FP8 weights in panels of outputs, for float and bfloat16 inputs.

   A weight is (number - zero) * scale + minimum, with these terms per output and group of inputs. Numbers become floats
   or (INT4) bfloat16 in registers, exactly, and each group's sum of products is scaled. Zeros and minima are added to
   that sum, times the sum of the group's inputs. As in linear.c, an output's bits do not depend on other rows. */

#include <stdlib.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "panels.h"

#define TALLEST (VECTORS * 4)  /* rows whose sums, operands and converted weights fill the registers */
#define FEW_ROWS 2  /* up to this many rows, two panels at a time: more sums that do not wait for each other */
#define FP8_FACTOR 0x1p120f  /* from the offset of a float's exponent to that of FP8 */
#define BIAS 16  /* is added to stored INT4 weights, which are numbers from -8 to 7 plus OFFSET, or from 0 to 15 */
#define OFFSET 8 /* 0 if there are minima */

typedef int8_t bytes __attribute__((vector_size(16)));
typedef int16_t shorts __attribute__((vector_size(32)));

/* Load sixteen bytes as integers of 32 bits. Widened in one step, GCC would convert them one by one. */
INLINE ivec wide_bytes(const void *from) {
    bytes stored;
    memcpy(&stored, from, sizeof stored);
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepi8_epi32((__m128i)stored);
#else
    return __builtin_convertvector(__builtin_convertvector(stored, shorts), ivec);
#endif
}

/* Convert sixteen INT8 or FP8 (E4M3) weights. */
INLINE vec floats_of(const char *from, const int format) {
    const ivec wide = wide_bytes(from);
    if (format == INT8) return __builtin_convertvector(wide, vec);
    return (vec)((uvec)(wide << 20) & 0x87f00000u) * FP8_FACTOR;
}

INLINE uvec shifted(uvec stored, const int places) { return places < 0 ? stored >> -places : stored << places; }

/* Inputs 2 * pair and 2 * pair + 1 of eight have the four bits from 4 * pair on of both halves of the stored word.
   Both become BIAS plus a number from 0 to 15, whose bits are the highest of the mantissa. */
INLINE uvec pair_words(uvec stored, const int pair) {
    return (shifted(stored, 3 - 4 * pair) & 0x00780078u) | 0x41804180u;
}

/* The same of one of the two inputs, as floats. */
INLINE uvec float_words(uvec stored, const int pair, const int is_second) {
    return (shifted(stored, (is_second ? 3 : 19) - 4 * pair) & 0x00780000u) | 0x41800000u;
}

/* Add the products of a word of weights with the inputs of all rows. */
INLINE void add_word(const int rows, const int wide, const char *inputs, int64_t stride, const uvec *weights,
                     vec sums[][2 * VECTORS], const int is_bf16) {
    UNROLL for (int row = 0; row < rows; row++) {
        const uvec x = all_of(inputs + row * stride);
        for (int v = 0; v < wide * VECTORS; v++) sums[row][v] = add_product(sums[row][v], weights[v], x, is_bf16);
        __asm__ volatile("" ::: "memory"); /* as in linear.c */
    }
}

/* Sum the products of `rows` rows with `count` inputs of `wide` panels, which are `distance` bytes apart. */
INLINE void sum_products(const int rows, const int wide, const char *inputs, int64_t stride, const char *panel,
                         int64_t distance, int64_t count, vec sums[][2 * VECTORS], const int format,
                         const int is_bf16) {
    uvec weights[2 * VECTORS];
    if (format != INT4) {
        for (int64_t i = 0; i < count; i++, panel += PANEL) {
            for (int v = 0; v < wide * VECTORS; v++)
                weights[v] = (uvec)floats_of(panel + v / VECTORS * distance + v % VECTORS * LANES, format);
            add_word(rows, wide, inputs + i * 4, stride, weights, sums, 0);
        }
        return;
    }
    for (int64_t i = 0; i < count; i += 8, panel += PANEL * 4) {
        uvec stored[2 * VECTORS];
        for (int v = 0; v < wide * VECTORS; v++)
            stored[v] = words_at(panel + v / VECTORS * distance + v % VECTORS * 64);
        UNROLL for (int pair = 0; pair < 4; pair++) {
            const char *columns = inputs + (i + 2 * pair) * size_of(is_bf16);
            for (int v = 0; v < wide * VECTORS; v++)
                weights[v] = is_bf16 ? pair_words(stored[v], pair) : float_words(stored[v], pair, 0);
            add_word(rows, wide, columns, stride, weights, sums, is_bf16);
            if (is_bf16) continue;
            for (int v = 0; v < wide * VECTORS; v++) weights[v] = float_words(stored[v], pair, 1);
            add_word(rows, wide, columns + 4, stride, weights, sums, is_bf16);
        }
    }
}

/* Return the numbers that stand for 0; `at` is an index into the zeros. */
INLINE vec zeros_at(const Weights *weights, int64_t at, const int format) {
    const vec zero = all(format != INT4 ? 0 : weights->minimum ? BIAS : BIAS + OFFSET);
    return weights->zero ? zero + __builtin_convertvector(wide_bytes(weights->zero + at), vec) : zero;
}

/* Return the scales or minima of one vector of a panel. */
INLINE vec terms_at(const Weights *weights, const void *terms, const uint16_t *factors, int64_t panel, int64_t group,
                    const int v) {
    const int64_t at = (panel * weights->groups + group) * PANEL + v * LANES;
    if (!factors) return weights->has_halves ? load_halves(terms, at) : load(terms, at, 0);
    const int32_t groups = weights->groups, of_factor = weights->factor_groups;
    const int64_t factor_at = (panel * (groups / of_factor) + (int32_t)group / of_factor) * PANEL + v * LANES;
    return __builtin_convertvector(wide_bytes((const int8_t *)terms + at), vec) * load_halves(factors, factor_at);
}

/* Where the sums of a panel are, and what their groups are multiplied with. */
typedef struct {
    const LinearCall *call;
    const float *row_sums; /* (rows, groups): sums of inputs; null if no zeros are subtracted */
    int64_t first, panel, group;
    vec *sums; /* (panels, BLOCK_ROWS, VECTORS) */
} Place;

INLINE void add_group(const Place *place, int64_t row, const int rows, const int wide, vec kept[][2 * VECTORS],
                      const int format) {
    const Weights *weights = place->call->weights;
    for (int v = 0; v < wide * VECTORS; v++) {
        const int64_t panel = place->panel + v / VECTORS;
        const vec zero = zeros_at(weights, (panel * weights->groups + place->group) * PANEL + v % VECTORS * LANES, format);
        const vec scale = terms_at(weights, weights->scale, weights->scale_factor, panel, place->group, v % VECTORS);
        vec minimum = all(0);
        if (weights->minimum)
            minimum = terms_at(weights, weights->minimum, weights->minimum_factor, panel, place->group, v % VECTORS);
        for (int r = 0; r < rows; r++) {
            vec *sum = place->sums + (v / VECTORS * BLOCK_ROWS + row + r) * VECTORS + v % VECTORS;
            vec value = kept[r][v];
            if (place->row_sums) { /* one product per line: a row's bits would depend on how GCC fuses two */
                const float inputs = place->row_sums[(place->first + row + r) * weights->groups + place->group];
                value -= zero * inputs;
                *sum += minimum * inputs;
            }
            *sum += value * scale;
        }
    }
}

INLINE void tile(const Place *place, int64_t row, const int rows, const int wide, const int format,
                 const int is_bf16) {
    const LinearCall *call = place->call;
    const Weights *weights = call->weights;
    const int64_t length = weights->inputs / weights->groups, half_bytes = format == INT4 ? 1 : 2;
    const int64_t distance = weights->inputs * PANEL * half_bytes / 2, stride = call->stride * size_of(is_bf16);
    const char *inputs = (const char *)call->inputs + (place->first + row) * stride;
    vec kept[TALLEST][2 * VECTORS] = {0};
    sum_products(rows, wide, inputs + place->group * length * size_of(is_bf16), stride,
                 (const char *)weights->packed + place->panel * distance + place->group * length * PANEL * half_bytes / 2,
                 distance, length, kept, format, is_bf16);
    add_group(place, row, rows, wide, kept, format);
}

static void sum_inputs(const LinearCall *call, int64_t row, float *sums, int is_bf16) {
    const int64_t groups = call->weights->groups, length = call->weights->inputs / groups;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t from = row * call->stride + group * length;
        vec total = {0};
        int64_t at = 0;
        for (; at + LANES <= length; at += LANES) total += load(call->inputs, from + at, is_bf16);
        if (at < length) total += load_some(call->inputs, from + at, length - at, is_bf16);
        sums[row * groups + group] = sum_of(total);
    }
}

/* Compute one or two panels for up to BLOCK_ROWS rows. */
INLINE void panels_of(Place *place, int64_t rows, const int wide, const int format, const int is_bf16) {
    const int has_pairs = is_bf16 && format == INT4;
    for (int p = 0; p < wide; p++) memset(place->sums + p * BLOCK_ROWS * VECTORS, 0, rows * VECTORS * sizeof(vec));
    for (place->group = 0; place->group < place->call->weights->groups; place->group++) {
        for (int64_t row = 0, tall; row < rows; row += tall) {
            const int64_t left = rows - row;
            tall = left >= TALLEST ? TALLEST : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            /* a constant number of rows keeps the sums in registers */
            if (tall == 1) tile(place, row, 1, wide, format, has_pairs);
            else if (tall == 2) tile(place, row, 2, wide, format, has_pairs);
            else if (wide == 1 && tall == 4) tile(place, row, 4, 1, format, has_pairs);
            else if (wide == 1) tile(place, row, TALLEST, 1, format, has_pairs);
        }
    }
    for (int p = 0; p < wide; p++)
        store_block(place->call, place->first, rows, place->panel + p, place->sums + p * BLOCK_ROWS * VECTORS, is_bf16);
}

typedef void Block(Place *, int64_t rows, int wide);

static void multiply(const LinearCall *call, float *row_sums, Block *block, int has_pairs) {
    const int64_t panels = (call->weights->outputs + PANEL - 1) / PANEL;
    const int64_t work = call->rows * call->weights->outputs * call->weights->inputs;
#pragma omp parallel num_threads(call->num_threads) if (work > PARALLEL_FROM)
    {
        vec sums[2 * BLOCK_ROWS * VECTORS];
        Place place = {.call = call, .row_sums = row_sums, .sums = sums};
        if (row_sums) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < call->rows; row++) sum_inputs(call, row, row_sums, has_pairs);
        }
        for (place.first = 0; place.first < call->rows; place.first += BLOCK_ROWS) {
            const int64_t left = call->rows - place.first, rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
#pragma omp for schedule(static) nowait
            for (int64_t pair = 0; pair < (panels + 1) / 2; pair++) {
                place.panel = 2 * pair;
                if (rows <= FEW_ROWS && place.panel + 1 < panels) {
                    block(&place, rows, 2);
                    continue;
                }
                for (; place.panel < panels && place.panel < 2 * pair + 2; place.panel++) block(&place, rows, 1);
            }
        }
    }
}

/* One function per format and type of inputs, so that both are constants. */
#define BLOCK(name, format, is_bf16) \
    static void name(Place *place, int64_t rows, int wide) { \
        if (wide == 2) panels_of(place, rows, 2, format, is_bf16); \
        else panels_of(place, rows, 1, format, is_bf16); \
    }
BLOCK(int8_block, INT8, 0) BLOCK(int8_block_bf16, INT8, 1)
BLOCK(int4_block, INT4, 0) BLOCK(int4_block_bf16, INT4, 1)
BLOCK(fp8_block, FP8, 0) BLOCK(fp8_block_bf16, FP8, 1)

/* INT8 and FP8 are multiplied in float: converting two weights to one word of bfloat16 takes longer. */
static float *widen_inputs(const LinearCall *call) {
    const int64_t inputs = call->weights->inputs;
    float *floats = malloc(call->rows * inputs * sizeof(float));
#pragma omp parallel for num_threads(call->num_threads) if (call->rows > 8)
    for (int64_t row = 0; row < call->rows; row++) {
        float *to = floats + row * inputs;
        int64_t at = 0;
        for (; at + LANES <= inputs; at += LANES) store(to, at, load(call->inputs, row * call->stride + at, 1), 0);
        for (; at < inputs; at++) to[at] = element(call->inputs, row * call->stride + at, 1);
    }
    return floats;
}

/* Dequantize the weights of one output into `plain`, in the type of the activations. */
void quantized_row(const Weights *weights, int64_t output, void *plain) {
    const int64_t panel = output / PANEL, inputs = weights->inputs, length = inputs / weights->groups;
    const int v = output % PANEL / LANES, lane = output % LANES, is_int4 = weights->format == INT4;
    const char *from = (const char *)weights->packed + panel * PANEL * (is_int4 ? inputs / 2 : inputs);
    for (int64_t group = 0; group < weights->groups; group++) {
        const int64_t at = (panel * weights->groups + group) * PANEL + v * LANES;
        const vec zero = zeros_at(weights, at, is_int4 ? INT4 : INT8);
        const vec scale = terms_at(weights, weights->scale, weights->scale_factor, panel, group, v);
        vec minimum = all(0);
        if (weights->minimum) minimum = terms_at(weights, weights->minimum, weights->minimum_factor, panel, group, v);
        for (int64_t i = group * length; i < (group + 1) * length; i++) {
            vec number;
            if (is_int4) number = (vec)float_words(words_at(from + i / 8 * PANEL * 4 + v * 64), i % 8 / 2, i % 2);
            else number = floats_of(from + i * PANEL + v * LANES, weights->format);
            const vec values = (number - zero) * scale + minimum;
            store_some(plain, i, all(values[lane]), 1, weights->is_bf16);
        }
    }
}

/* Rearrange numbers into panels. `numbers`: rows of bytes, `stride` bytes apart; for INT4, words of four inputs that are
   `stride` apart, (steps, outputs, stride). Bytes and words beyond the last output stay unchanged. */
void quantized_pack(const void *numbers, int64_t stride, void *packed, const Weights *weights, int64_t num_threads) {
    const int64_t panels = (weights->outputs + PANEL - 1) / PANEL, inputs = weights->inputs;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t first = panel * PANEL, left = weights->outputs - first, outputs = left < PANEL ? left : PANEL;
        if (weights->format != INT4) {
            const char *from = (const char *)numbers + first * stride;
            char *to = (char *)packed + first * inputs;
            for (int64_t i = 0; i < inputs; i += 8) {
                const int64_t count = inputs - i < 8 ? inputs - i : 8;
                uint64_t eights[PANEL] = {0};
                for (int64_t o = 0; o < outputs; o++) memcpy(eights + o, from + o * stride + i, count);
                for (int64_t k = 0; k < count; k++, to += PANEL)
                    for (int64_t o = 0; o < outputs; o++) to[o] = (char)(eights[o] >> 8 * k);
            }
            continue;
        }
        uint32_t *to = (uint32_t *)packed + first * inputs / 8;
        for (int64_t i = 0; i < inputs; i += 8, to += PANEL) {
            const int64_t step = i / (4 * stride), quarter = i % (4 * stride) / stride;
            for (int64_t o = 0; o < outputs; o++) {
                const uint16_t *from = (const uint16_t *)numbers + (step * weights->outputs + first + o) * stride + i % stride;
                uint32_t word = 0;
                for (int k = 0; k < 8; k++)
                    word |= (uint32_t)(from[k] >> 4 * quarter & 0xf) << (k / 2 * 4 + k % 2 * 16);
                to[o] = word;
            }
        }
    }
}

void quantized_linear(const LinearCall *call) {
    static Block *const blocks[][2] = {[INT8] = {int8_block, int8_block_bf16},
                                       [INT4] = {int4_block, int4_block_bf16},
                                       [FP8] = {fp8_block, fp8_block_bf16}};
    const Weights *weights = call->weights;
    const int has_pairs = weights->is_bf16 && weights->format == INT4;
    LinearCall widened = *call;
    float *row_sums = NULL, *floats = NULL;
    if (weights->zero || weights->minimum || weights->format == INT4)
        row_sums = malloc(call->rows * weights->groups * sizeof(float));
    if (weights->is_bf16 && !has_pairs) {
        floats = widen_inputs(call);
        widened.inputs = floats;
        widened.stride = weights->inputs;
    }
    multiply(&widened, row_sums, blocks[weights->format][weights->is_bf16], has_pairs);
    free(row_sums);
    free(floats);
}
