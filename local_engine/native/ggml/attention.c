/* Flash attention over a cache of half precision, in ggml's place.

   ggml takes a query and a cell at a time, or from 64 rows on tiles, of which it computes what is masked, too, and then
   rounds otherwise. Here up to sixteen rows that see the same cells, and all heads that share keys, meet 64 cells at a
   time: cells that nobody sees are passed over, keys and values are converted once for all, and sums are float32
   throughout (Milakov & Gimelshein 2018; Dao et al. 2022). What a row gets depends on the cells that it sees and on
   their order alone, to the last bit, whatever is computed beside it. */

#include "types.h"

#ifdef __AVX512BW__
#include <immintrin.h>
#include <string.h>

#define CELLS 64    /* of the cache at a time */
#define HALF 32     /* of them: their scores with a block of queries fill the registers */
#define ROWS 16     /* of a piece of work at most */
#define QUERIES 96  /* of all its rows and heads */
#define LONGEST 256 /* values of a head */
#define LANES 16
#define FEW 8   /* queries that are not worth turning keys for */
#define BLOCK 2 /* queries at a time: their sums of sums stay in registers */
#define WIDE 8  /* the same where they gather */
#define SPAN 4  /* vectors of a value at a time, where few gather */

/* `f` for all queries, so many at a time. */
#define BY_POWERS(f, ...)                                \
    for (int q = 0, step; q < piece.count; q += step) {  \
        step = piece.count - q;                          \
        step = step >= 4 ? 4 : step >= 2 ? 2 : 1;        \
        if (step == 4) f(4, q, __VA_ARGS__);             \
        if (step == 2) f(2, q, __VA_ARGS__);             \
        if (step == 1) f(1, q, __VA_ARGS__);             \
    }
#define BY_TWOS(f, ...)                           \
    for (int q = 0; q < piece.count; q += BLOCK)  \
        if (piece.count - q == 1)                 \
            f(1, q, __VA_ARGS__);                 \
        else                                      \
            f(2, q, __VA_ARGS__);
#define BY_EIGHTS(f, ...)                         \
    for (int q = 0; q < piece.count; q += WIDE)   \
        switch (piece.count - q) {                \
            case 1: f(1, q, __VA_ARGS__); break;  \
            case 2: f(2, q, __VA_ARGS__); break;  \
            case 3: f(3, q, __VA_ARGS__); break;  \
            case 4: f(4, q, __VA_ARGS__); break;  \
            case 5: f(5, q, __VA_ARGS__); break;  \
            case 6: f(6, q, __VA_ARGS__); break;  \
            case 7: f(7, q, __VA_ARGS__); break;  \
            default: f(8, q, __VA_ARGS__);        \
        }
#define MINUS_INFINITY 0xfc00
#define LOG2_E 1.44269504f

/* What a thread is at: `count` queries of `length` values. Keys and queries lie turned, with the same value of all
   beside each other, but those of few queries row by row, as do values and what is mixed of them. */
typedef struct {
    float turned[LONGEST][QUERIES], query[FEW * LONGEST];
    float keys[LONGEST][CELLS], values[CELLS * LONGEST], weights[QUERIES][CELLS];
    float mixed[QUERIES * LONGEST], largest[QUERIES], total[QUERIES];
    uint64_t visible[ROWS];   /* which of the cells a row sees */
    float added[ROWS][CELLS]; /* to its scores with them, where that is not nothing */
    bool adds[ROWS];
    int length, count;
} __attribute__((aligned(64))) Piece;

static _Thread_local Piece piece;

INLINE float *mixed_of(int q) { return piece.mixed + q * piece.length; }

/* Cells that some row of a piece sees, in order. */
typedef struct {
    int64_t cells[CELLS];
    int count;
} Seen;

/* `rows` from `first` on of a stream, and `heads` query heads from `head` on, which share keys. */
typedef struct {
    const Tensor *query, *key, *value, *mask;
    Tensor *result;
    int64_t stream, first;
    int rows, head, heads;
} Work;

INLINE const char *at(const Tensor *tensor, int64_t one, int64_t two, int64_t three) {
    return (const char *)tensor->data + one * tensor->strides[1] + two * tensor->strides[2] + three * tensor->strides[3];
}

/* What is added to the scores of a row, of each cell; NULL: nothing. */
INLINE const uint16_t *mask_of(const Tensor *mask, int64_t row, int64_t stream) {
    return mask ? (const uint16_t *)at(mask, row, 0, stream % mask->sizes[3]) : NULL;
}

/* Which of the next 64 cells are there, and which of them a row sees. */
INLINE uint64_t first_bits(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE uint64_t seen_by(const uint16_t *mask, int64_t cell, int64_t cells) {
    uint64_t there = first_bits(cells - cell);
    if (!mask) return there;
    const __m512i never = _mm512_set1_epi16((short)MINUS_INFINITY);
    uint32_t one = (uint32_t)there, other = (uint32_t)(there >> 32);
    one = _mm512_mask_cmpneq_epi16_mask(one, _mm512_maskz_loadu_epi16(one, mask + cell), never);
    other = _mm512_mask_cmpneq_epi16_mask(other, _mm512_maskz_loadu_epi16(other, mask + cell + 32), never);
    return (uint64_t)other << 32 | one;
}

/* 2 to the power of x <= 0, within 2e-7; of less than -126 next to nothing. */
INLINE __m512 power_of_two(__m512 x) {
    static const float terms[] = {1.535336e-4f, 1.339887e-3f, 9.618437e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.931472e-1f, 1};
    x = _mm512_max_ps(x, _mm512_set1_ps(-126));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole), sum = _mm512_set1_ps(terms[0]);
    for (int i = 1; i < 7; i++) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(sum, whole);
}

INLINE __m512 halves(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }

/* The rows' queries, times `scale`. */
static void begin(const Work *w, float scale) {
    piece.length = (int)w->query->sizes[0];
    piece.count = w->rows * w->heads;
    for (int row = 0; row < w->rows; row++)
        for (int head = 0; head < w->heads; head++) {
            int q = row * w->heads + head;
            const float *from = (const float *)at(w->query, w->first + row, w->head + head, w->stream);
            for (int i = 0; i < piece.length; i++)
                *(piece.count <= FEW ? &piece.query[q * piece.length + i] : &piece.turned[i][q]) = from[i] * scale;
            memset(mixed_of(q), 0, sizeof(float) * piece.length);
            piece.largest[q] = -__builtin_inff();
            piece.total[q] = 0;
        }
}

/* Turns sixteen vectors, so that lane i of the j-th is lane j of the i-th. */
INLINE void turn(__m512 v[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + j], (__m512d)t[i + j + 2]);
            v[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + j], (__m512d)t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            t[j + i] = _mm512_shuffle_f32x4(v[j + i], v[j + i + 4], 0x88);
            t[j + i + 4] = _mm512_shuffle_f32x4(v[j + i], v[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

/* A cell that is likely to come next. */
INLINE void fetch(const char *cell) {
    for (int byte = 0; byte < 2 * piece.length; byte += 64) _mm_prefetch(cell + byte, _MM_HINT_T1);
}

/* Keys and values of the cells, turned as they are used; those behind them are fetched meanwhile. */
static void convert(const Work *w, const Seen *seen, const char *keys, const char *values) {
    const int64_t next = seen->cells[seen->count - 1] + 1;
    const int64_t key_stride = (int64_t)w->key->strides[1], value_stride = (int64_t)w->value->strides[1];
    for (int cell = 0; cell < CELLS; cell += LANES) {
        const char *rows[LANES];
        for (int j = 0; j < LANES; j++) {
            rows[j] = keys + seen->cells[cell + j < seen->count ? cell + j : 0] * key_stride;
            fetch(keys + (next + cell + j) * key_stride);
        }
        for (int i = 0; i < piece.length; i += LANES) {
            __m512 block[LANES];
            for (int j = 0; j < LANES; j++) block[j] = halves((const uint16_t *)rows[j] + i);
            turn(block);
            for (int j = 0; j < LANES; j++) _mm512_store_ps(&piece.keys[i + j][cell], block[j]);
        }
    }
    for (int cell = 0; cell < seen->count; cell++) {
        const uint16_t *value = (const uint16_t *)(values + seen->cells[cell] * value_stride);
        fetch(values + (next + cell) * value_stride);
        for (int i = 0; i < piece.length; i += LANES)
            _mm512_store_ps(piece.values + cell * piece.length + i, halves(value + i));
    }
}

/* Which of a head's sixteenths are added up in what order: each by itself, then as `sums` below adds lanes. */
static const int8_t ORDER[LANES] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

/* Scores of `queries` from the q-th on, with half of the cells. */
INLINE void score(const int queries, int q, int cell) {
    __m512 levels[5][BLOCK][2];
#pragma GCC unroll 16
    for (int place = 0; place < LANES; place++) {
        const int l = ORDER[place];
        __m512 one[BLOCK], other[BLOCK];
#pragma GCC unroll 2
        for (int j = 0; j < queries; j++) one[j] = other[j] = _mm512_setzero_ps();
        for (int i = l; i < piece.length; i += LANES) {
            __m512 a = _mm512_load_ps(&piece.keys[i][cell]), b = _mm512_load_ps(&piece.keys[i][cell + LANES]);
#pragma GCC unroll 2
            for (int j = 0; j < queries; j++) {
                __m512 query = _mm512_set1_ps(piece.turned[i][q + j]);
                one[j] = _mm512_fmadd_ps(query, a, one[j]);
                other[j] = _mm512_fmadd_ps(query, b, other[j]);
            }
        }
        int level = 0;
#pragma GCC unroll 5
        for (; place >> level & 1; level++)
#pragma GCC unroll 2
            for (int j = 0; j < queries; j++) {
                one[j] = _mm512_add_ps(levels[level][j][0], one[j]);
                other[j] = _mm512_add_ps(levels[level][j][1], other[j]);
            }
#pragma GCC unroll 2
        for (int j = 0; j < queries; j++) {
            levels[level][j][0] = one[j];
            levels[level][j][1] = other[j];
        }
    }
#pragma GCC unroll 2
    for (int j = 0; j < queries; j++) {
        _mm512_store_ps(&piece.weights[q + j][cell], levels[4][j][0]);
        _mm512_store_ps(&piece.weights[q + j][cell + LANES], levels[4][j][1]);
    }
}

/* The sums of sixteen vectors' lanes. */
INLINE __m512 sums(__m512 v[LANES]) {
    for (int i = 0; i < LANES; i += 2)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 1]), _mm512_unpackhi_ps(v[i], v[i + 1]));
    for (int i = 0; i < LANES; i += 4) {
        __m512d a = (__m512d)v[i], b = (__m512d)v[i + 2];
        v[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    for (int i = 0; i < LANES; i += 8) { /* quarters 0 and 2, 1 and 3 */
        __m512 a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x44), b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee);
        v[i] = _mm512_add_ps(a, b);
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[8], 0x88), _mm512_shuffle_f32x4(v[0], v[8], 0xdd));
}

/* Scores of 1, 2 or 4 of few queries with all cells, straight from the cache: as many of these at a time as there are
   sums for. To the bit what `score` finds. */
INLINE void score_few(const int queries, int q, const Work *w, const Seen *seen, const char *keys) {
    const int64_t stride = (int64_t)w->key->strides[1], next = seen->cells[seen->count - 1] + 1;
    const int at_once = LANES / queries;
    for (int cell = 0; cell < seen->count; cell += at_once) {
        const char *rows[LANES];
        __m512 v[LANES];
        float found[LANES] __attribute__((aligned(64)));
        for (int c = 0; c < at_once; c++) {
            rows[c] = keys + seen->cells[cell + c < seen->count ? cell + c : 0] * stride;
            fetch(keys + (next + cell + c) * stride);
        }
        for (int c = 0; c < LANES; c++) v[c] = _mm512_setzero_ps();
        for (int i = 0; i < piece.length; i += LANES)
            for (int c = 0; c < at_once; c++) {
                __m512 key = halves((const uint16_t *)rows[c] + i);
                for (int j = 0; j < queries; j++) {
                    __m512 query = _mm512_load_ps(piece.query + (q + j) * piece.length + i);
                    v[c * queries + j] = _mm512_fmadd_ps(query, key, v[c * queries + j]);
                }
            }
        _mm512_store_ps(found, sums(v));
        for (int c = 0; c < at_once; c++)
            for (int j = 0; j < queries; j++) piece.weights[q + j][cell + c] = found[c * queries + j];
    }
}

/* What `queries` from the q-th on gather from converted values. */
INLINE void gather(const int queries, int q, int cells) {
    for (int i = 0; i < piece.length; i += LANES) {
        __m512 mixed[WIDE];
#pragma GCC unroll 8
        for (int j = 0; j < queries; j++) mixed[j] = _mm512_load_ps(mixed_of(q + j) + i);
        for (int cell = 0; cell < cells; cell++) {
            __m512 value = _mm512_load_ps(piece.values + cell * piece.length + i);
#pragma GCC unroll 8
            for (int j = 0; j < queries; j++)
                mixed[j] = _mm512_fmadd_ps(_mm512_set1_ps(piece.weights[q + j][cell]), value, mixed[j]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < queries; j++) _mm512_store_ps(mixed_of(q + j) + i, mixed[j]);
    }
}

/* The same of 1, 2 or 4 of few queries, straight from the cache; `vectors` of a value, from the i-th number on. */
INLINE void gather_part(
    const int queries, const int vectors, int q, int i, const Seen *seen, const char *values, int64_t stride) {
    __m512 mixed[4][SPAN];
    for (int j = 0; j < queries; j++)
        for (int k = 0; k < vectors; k++) mixed[j][k] = _mm512_load_ps(mixed_of(q + j) + i + k * LANES);
    for (int cell = 0; cell < seen->count; cell++) {
        const uint16_t *value = (const uint16_t *)(values + seen->cells[cell] * stride) + i;
        for (int k = 0; k < vectors; k++) {
            __m512 part = halves(value + k * LANES);
            for (int j = 0; j < queries; j++)
                mixed[j][k] = _mm512_fmadd_ps(_mm512_set1_ps(piece.weights[q + j][cell]), part, mixed[j][k]);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int k = 0; k < vectors; k++) _mm512_store_ps(mixed_of(q + j) + i + k * LANES, mixed[j][k]);
}

INLINE void gather_few(const int queries, int q, const Work *w, const Seen *seen, const char *values) {
    const int64_t stride = (int64_t)w->value->strides[1], next = seen->cells[seen->count - 1] + 1;
    int i = 0;
    for (int cell = 0; q == 0 && cell < CELLS; cell++) fetch(values + (next + cell) * stride);
    for (; i + SPAN * LANES <= piece.length; i += SPAN * LANES) gather_part(queries, SPAN, q, i, seen, values, stride);
    for (; i < piece.length; i += LANES) gather_part(queries, 1, q, i, seen, values, stride);
}

/* What a row sees of the cells, and what its mask adds to the scores. */
static void look(const uint16_t *mask, int row, const Seen *seen) {
    int64_t first = seen->cells[0];
    uint64_t adds = 0;
    piece.visible[row] = first_bits(seen->count);
    piece.adds[row] = false;
    if (!mask) return;
    uint16_t gathered[CELLS];
    const uint16_t *added = mask + first;
    if (seen->cells[seen->count - 1] != first + seen->count - 1) { /* not one behind the other, as they mostly are */
        for (int i = 0; i < seen->count; i++) gathered[i] = mask[seen->cells[i]];
        added = gathered;
    }
    piece.visible[row] = seen_by(added, 0, seen->count);
    for (int i = 0; i < seen->count; i++) adds |= (uint64_t)(added[i] << 1 != 0) << i;
    piece.adds[row] = adds & piece.visible[row];
    for (int i = 0; i < seen->count && piece.adds[row]; i++)
        piece.added[row][i] = piece.visible[row] >> i & 1 ? _cvtsh_ss(added[i]) * LOG2_E : 0;
}

/* Scores to weights, relative to the largest so far; what was gathered before is brought to the same measure. */
static void weigh(int q, int row) {
    const __m512 least = _mm512_set1_ps(-__builtin_inff());
    float *weights = piece.weights[q];
    __m512 scores[CELLS / LANES], most = _mm512_set1_ps(piece.largest[q]), sum = _mm512_setzero_ps();
    for (int i = 0; i < CELLS / LANES; i++) {
        scores[i] = _mm512_mask_loadu_ps(least, (__mmask16)(piece.visible[row] >> LANES * i), weights + LANES * i);
        if (piece.adds[row]) scores[i] = _mm512_add_ps(scores[i], _mm512_load_ps(&piece.added[row][LANES * i]));
        most = _mm512_max_ps(most, scores[i]);
    }
    float largest = _mm512_reduce_max_ps(most);
    if (!piece.visible[row]) largest = 0; /* whatever the weights are, they are not taken */
    for (int i = 0; i < CELLS / LANES; i++) {
        __m512 weight = power_of_two(_mm512_sub_ps(scores[i], _mm512_set1_ps(largest)));
        weight = _mm512_maskz_mov_ps((__mmask16)(piece.visible[row] >> LANES * i), weight);
        sum = _mm512_add_ps(sum, weight);
        _mm512_store_ps(weights + LANES * i, weight);
    }
    if (!piece.visible[row]) return;
    if (largest != piece.largest[q]) {
        float factor = _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(piece.largest[q] - largest)));
        for (int i = 0; i < piece.length; i += LANES) {
            float *mixed = mixed_of(q) + i;
            _mm512_store_ps(mixed, _mm512_mul_ps(_mm512_load_ps(mixed), _mm512_set1_ps(factor)));
        }
        piece.total[q] *= factor;
        piece.largest[q] = largest;
    }
    piece.total[q] += _mm512_reduce_add_ps(sum);
}

/* All queries meet these cells. */
static void meet(const Work *w, const Seen *seen) {
    const int64_t head = w->head / (w->query->sizes[2] / w->key->sizes[2]);
    const char *keys = at(w->key, 0, head, w->stream), *values = at(w->value, 0, head, w->stream);
    const bool few = piece.count <= FEW;
    if (few) {
        BY_POWERS(score_few, w, seen, keys)
    } else {
        convert(w, seen, keys, values);
        for (int cell = 0; cell < seen->count; cell += HALF) {
            BY_TWOS(score, cell)
        }
    }
    for (int row = 0; row < w->rows; row++) {
        look(mask_of(w->mask, w->first + row, w->stream), row, seen);
        for (int q = row * w->heads; q < (row + 1) * w->heads; q++) weigh(q, row);
    }
    if (few) {
        BY_POWERS(gather_few, w, seen, values)
    } else {
        BY_EIGHTS(gather, seen->count)
    }
}

/* Rows of which each sees all that the one before it sees. */
static void attend(const Work *w, float scale) {
    const uint16_t *last = mask_of(w->mask, w->first + w->rows - 1, w->stream);
    int64_t cells = w->key->sizes[1];
    Seen seen = {.count = 0};
    begin(w, scale);
    for (int64_t cell = 0; cell < cells; cell += CELLS)
        for (uint64_t left = seen_by(last, cell, cells); left; left &= left - 1) {
            seen.cells[seen.count++] = cell + __builtin_ctzll(left);
            if (seen.count == CELLS) {
                meet(w, &seen);
                seen.count = 0;
            }
        }
    if (seen.count) meet(w, &seen);
    for (int q = 0; q < piece.count; q++) {
        int64_t row = w->first + q / w->heads, head = w->head + q % w->heads;
        float *to = (float *)at(w->result, head, row, w->stream), share = piece.total[q] > 0 ? 1 / piece.total[q] : 0;
        for (int i = 0; i < piece.length; i++) to[i] = mixed_of(q)[i] * share;
    }
}

/* Whether a row sees all that the one before it sees. */
static bool follows(const Work *w, int64_t row) {
    const uint16_t *mask = mask_of(w->mask, row, w->stream), *before = mask_of(w->mask, row - 1, w->stream);
    for (int64_t cell = 0; mask && cell < w->key->sizes[1]; cell += CELLS)
        if (seen_by(before, cell, w->key->sizes[1]) & ~seen_by(mask, cell, w->key->sizes[1])) return false;
    return true;
}

static bool is_ours(const Tensor *r) {
    const Tensor *query = r->sources[0], *key = r->sources[1], *value = r->sources[2], *mask = r->sources[3];
    float parameters[3]; /* scale, slopes of positions, a soft cap */
    memcpy(parameters, r->parameters, sizeof(parameters));
    return query->type == TYPE_F32 && key->type == TYPE_F16 && value->type == TYPE_F16 && !r->sources[4] &&
           parameters[1] == 0 && parameters[2] == 0 && key->sizes[0] == value->sizes[0] && key->sizes[0] <= LONGEST &&
           key->sizes[0] % LANES == 0 && key->sizes[2] == value->sizes[2] && key->sizes[3] == query->sizes[3] &&
           value->sizes[3] == query->sizes[3] && query->sizes[2] / key->sizes[2] <= QUERIES &&
           (!mask || (mask->type == TYPE_F16 && mask->sizes[2] == 1));
}

/* Heads and rows are divided so that every thread gets its share; to the results that makes no difference. */
EXPORT bool updraft_attention(const Params *params, Tensor *result) {
    const Tensor *query = result->sources[0], *key = result->sources[1];
    if (!is_ours(result)) return false;
    float scale;
    memcpy(&scale, result->parameters, sizeof(scale));
    scale *= LOG2_E; /* powers of two, not of e */
    int64_t together = query->sizes[2] / key->sizes[2], rows = query->sizes[1], key_heads = key->sizes[2];
    int64_t at_once = QUERIES / together < ROWS ? QUERIES / together : ROWS, parts = 1;
    while (at_once > 1 && (rows + at_once - 1) / at_once * key_heads < 2 * params->threads) at_once = (at_once + 1) / 2;
    while (parts < together && (rows + at_once - 1) / at_once * key_heads * parts < params->threads) parts++;
    int64_t number = 0;
    for (int64_t stream = 0; stream < query->sizes[3]; stream++)
        for (int64_t first = 0; first < rows; first += at_once)
            for (int64_t part = 0; part < key_heads * parts; part++) {
                if (number++ % params->threads != params->thread) continue;
                int64_t key_head = part / parts, from = together * (part % parts) / parts;
                int64_t to = together * (part % parts + 1) / parts, end = first + at_once < rows ? first + at_once : rows;
                Work w = {query, key, result->sources[2], result->sources[3], result, stream, first, 1,
                          (int)(key_head * together + from), (int)(to - from)};
                for (int64_t row = first + 1; row <= end; row++) {
                    if (row < end && follows(&w, row)) {
                        w.rows++;
                        continue;
                    }
                    attend(&w, scale);
                    w.first = row;
                    w.rows = 1;
                }
            }
    return true;
}
#else
EXPORT bool updraft_attention(const Params *params, Tensor *result) {
    (void)params, (void)result;
    return false;
}
#endif
