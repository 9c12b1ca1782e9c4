/* Flash attention over a half-precision cache, in place of ggml's.

   ggml processes a query and a cell at a time, or, from 64 rows on, tiles, for which it also computes masked cells and
   rounds differently. Here, up to sixteen rows that see the same cells, with all heads that share keys, process 64
   cells at a time: cells that no row sees are skipped, and keys and values are converted once for all (Milakov &
   Gimelshein 2018; Dao et al. 2022). A row's result depends only on the cells that it sees, to the last bit, whatever
   is computed beside it: the unit of the weights is a power of two, so changing the unit is exact. The result does not
   depend on the position of its cells either, except for about one number in 100 million: values are summed in double
   precision, where the order of sums hardly ever changes the float32 result. */

#include "attention.h"

#include <string.h>

#include "attention_scores.h"
#include "attention_values.h"

#define MINUS_INFINITY 0xfc00 /* in half precision */
#define LOG2_E 1.44269504f

_Thread_local Piece updraft_piece;

/* Work of one piece: `rows` rows from `first` on, in one stream; for each of `key_heads` key heads from `key_head` on,
   the query heads `from` to `to` among those that share its keys. */
typedef struct {
    const Tensor *query, *key, *value, *mask;
    Tensor *result;
    int64_t stream, first;
    int rows, key_head, key_heads, from, to;
} Work;

INLINE char *at(const Tensor *tensor, int64_t one, int64_t two, int64_t three) {
    const int64_t *strides = (const int64_t *)tensor->nb;
    return (char *)tensor->data + one * strides[1] + two * strides[2] + three * strides[3];
}

/* The mask of a row, which is added to its scores, one value per cell; NULL for none. */
INLINE const uint16_t *mask_of(const Work *w, int64_t row) {
    return w->mask ? (const uint16_t *)at(w->mask, row, 0, w->stream % w->mask->ne[3]) : NULL;
}

INLINE uint64_t first_bits(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

/* Which of the next 64 cells exist and are visible to a row. */
INLINE uint64_t seen_by(const uint16_t *mask, int64_t cell, int64_t cells) {
    uint64_t there = first_bits(cells - cell);
    if (!mask) return there;
    const __m512i never = _mm512_set1_epi16((short)MINUS_INFINITY);
    uint32_t one = (uint32_t)there, other = (uint32_t)(there >> 32);
    one = _mm512_mask_cmpneq_epi16_mask(one, _mm512_maskz_loadu_epi16(one, mask + cell), never);
    other = _mm512_mask_cmpneq_epi16_mask(other, _mm512_maskz_loadu_epi16(other, mask + cell + 32), never);
    return (uint64_t)other << 32 | one;
}

/* Query head and row of query `q` of the piece. Queries are ordered by key head, then row, then query head. */
INLINE int64_t head_of(const Work *w, int q) {
    int64_t together = w->query->ne[2] / w->key->ne[2];
    return (w->key_head + q / piece.count) * together + w->from + q % piece.count % (w->to - w->from);
}
INLINE int64_t row_of(const Work *w, int q) { return w->first + q % piece.count / (w->to - w->from); }

/* Load the queries of the rows, times `scale`, and reset their results. */
static void begin(const Work *w, float scale) {
    piece.length = (int)w->query->ne[0];
    piece.count = w->rows * (w->to - w->from);
    for (int q = 0; q < piece.count * w->key_heads; q++) {
        const float *from = (const float *)at(w->query, row_of(w, q), head_of(w, q), w->stream);
        for (int i = 0; i < piece.length; i++)
            *(piece.count <= FEW ? &piece.query[q * piece.length + i] : &piece.turned[i][q]) = from[i] * scale;
        memset(mixed_of(q), 0, sizeof(double) * piece.length);
        piece.largest[q] = -__builtin_inff();
        piece.total[q] = 0;
    }
}

/* Record which of the cells a row sees, and the values that its mask adds to the scores. */
static void look(const uint16_t *mask, int row, const Seen *seen) {
    int64_t first = seen->cells[0];
    uint64_t adds = 0;
    uint16_t gathered[CELLS];
    piece.visible[row] = first_bits(seen->count);
    piece.adds[row] = false;
    if (!mask) return;
    const uint16_t *added = mask + first;
    if (seen->cells[seen->count - 1] != first + seen->count - 1) { /* not contiguous; mostly they are */
        for (int i = 0; i < seen->count; i++) gathered[i] = mask[seen->cells[i]];
        added = gathered;
    }
    piece.visible[row] = seen_by(added, 0, seen->count);
    for (int i = 0; i < seen->count; i++) adds |= (uint64_t)((added[i] & 0x7fff) != 0) << i;
    piece.adds[row] = adds & piece.visible[row];
    for (int i = 0; i < seen->count && piece.adds[row]; i++)
        piece.added[row][i] = piece.visible[row] >> i & 1 ? _cvtsh_ss(added[i]) * LOG2_E : 0;
}

/* 2 to the power of `rest`, which is between -1/2 and 1/2, within 2e-7. */
INLINE __m512 power_of_two(__m512 rest) {
    static const float terms[] = {1.535336e-4f,   1.339887e-3f,  9.618437e-3f, 5.5503324e-2f,
                                  2.4022648e-1f, 6.931472e-1f, 1.0f};
    __m512 sum = _mm512_set1_ps(terms[0]);
    for (int i = 1; i < 7; i++) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(terms[i]));
    return sum;
}

INLINE __m512 whole(__m512 v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* Rescale the results so far to the weights' new unit. */
static void change_unit(int q, float largest) {
    const double exponent = (double)piece.largest[q] - (double)largest;
    const __m512d change = _mm512_scalef_pd(_mm512_set1_pd(1), _mm512_set1_pd(exponent));
    for (int i = 0; i < piece.length; i += 8)
        _mm512_store_pd(mixed_of(q) + i, _mm512_mul_pd(_mm512_load_pd(mixed_of(q) + i), change));
    piece.total[q] *= _mm512_cvtsd_f64(change);
    piece.largest[q] = largest;
}

/* Convert scores to weights, in units of the power of two of the largest score so far. */
static void weigh(int q, int row) {
    __m512 scores[CELLS / LANES], most = _mm512_set1_ps(piece.largest[q]);
    __m512d sum = _mm512_setzero_pd();
    if (!piece.visible[row]) {
        memset(piece.weights[q], 0, sizeof(piece.weights[q]));
        return;
    }
    for (int i = 0; i < CELLS / LANES; i++) {
        const __mmask16 visible = (__mmask16)(piece.visible[row] >> LANES * i);
        scores[i] = _mm512_load_ps(&piece.scores[q][LANES * i]);
        if (piece.adds[row]) scores[i] = _mm512_add_ps(scores[i], _mm512_load_ps(&piece.added[row][LANES * i]));
        scores[i] = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), visible, scores[i]);
        most = _mm512_max_ps(most, whole(scores[i]));
    }
    const float largest = _mm512_reduce_max_ps(most);
    for (int i = 0; i < CELLS / LANES; i++) {
        const __mmask16 visible = (__mmask16)(piece.visible[row] >> LANES * i);
        __m512 exponent = whole(scores[i]), weight = power_of_two(_mm512_sub_ps(scores[i], exponent));
        weight = _mm512_maskz_scalef_ps(visible, weight, _mm512_sub_ps(exponent, _mm512_set1_ps(largest)));
        _mm512_store_pd(&piece.weights[q][LANES * i], lower(weight));
        _mm512_store_pd(&piece.weights[q][LANES * i + 8], upper(weight));
        sum = _mm512_add_pd(sum, _mm512_add_pd(lower(weight), upper(weight)));
    }
    if (largest != piece.largest[q]) change_unit(q, largest);
    piece.total[q] += _mm512_reduce_add_pd(sum);
}

/* Process these cells for all queries. */
static void meet(const Work *w, const Seen *seen) {
    const int heads = w->to - w->from;
    bool alike = true; /* whether all rows see all cells */
    for (int row = 0; row < w->rows; row++) {
        look(mask_of(w, w->first + row), row, seen);
        alike = alike && piece.visible[row] == first_bits(seen->count);
    }
    for (int i = 0; i < w->key_heads; i++) {
        Head head = {at(w->key, 0, w->key_head + i, w->stream), at(w->value, 0, w->key_head + i, w->stream),
                     (int64_t)w->key->nb[1], (int64_t)w->value->nb[1], i * piece.count};
        score(&head, seen);
        for (int q = 0; q < piece.count; q++) weigh(head.first + q, q / heads);
        if (alike || are_numbers(&head, seen))
            gather(&head, seen);
        else
            for (int q = 0; q < piece.count; q++) gather_seen(&head, seen, head.first + q, piece.visible[q / heads]);
    }
}

/* Attend with rows of which each sees all cells that the previous row sees. */
static void attend(const Work *w, float scale) {
    const uint16_t *last = mask_of(w, w->first + w->rows - 1);
    int64_t cells = w->key->ne[1];
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
    for (int q = 0; q < piece.count * w->key_heads; q++) {
        float *to = (float *)at(w->result, head_of(w, q), row_of(w, q), w->stream);
        double share = piece.total[q] > 0 ? 1 / piece.total[q] : 0;
        for (int i = 0; i < piece.length; i++) to[i] = (float)(mixed_of(q)[i] * share);
    }
}

/* Whether a row sees all cells that the previous row sees. */
static bool follows(const Work *w, int64_t row) {
    const uint16_t *mask = mask_of(w, row), *before = mask_of(w, row - 1);
    int64_t cells = w->key->ne[1];
    for (int64_t cell = 0; mask && cell < cells; cell += CELLS)
        if (seen_by(before, cell, cells) & ~seen_by(mask, cell, cells)) return false;
    return true;
}

static bool is_ours(const Tensor *r) {
    const Tensor *query = r->src[0], *key = r->src[1], *value = r->src[2], *mask = r->src[3];
    float numbers[3]; /* scale, slope of position biases (ALiBi), soft cap */
    memcpy(numbers, r->op_params, sizeof(numbers));
    return query->type == GGML_TYPE_F32 && key->type == GGML_TYPE_F16 && value->type == GGML_TYPE_F16 && !r->src[4] &&
           numbers[1] == 0 && numbers[2] == 0 && key->ne[0] == value->ne[0] && key->ne[0] <= LONGEST &&
           key->ne[0] % LANES == 0 && key->ne[2] == value->ne[2] && key->ne[3] == query->ne[3] &&
           value->ne[3] == query->ne[3] && query->ne[2] / key->ne[2] <= QUERIES &&
           (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1));
}

/* Division of heads and rows into pieces: at most `rows` rows and `heads` key heads per piece; the query heads of a key
   head are split into `parts`. The division does not change results. */
typedef struct {
    int64_t rows, heads, parts;
} Division;

/* Make pieces as large as possible while every thread has work: more rows share keys, more heads share pages. */
static Division divided(const Tensor *query, const Tensor *key, int threads) {
    int64_t together = query->ne[2] / key->ne[2], rows = query->ne[1], key_heads = key->ne[2];
    Division d = {QUERIES / together < ROWS ? QUERIES / together : ROWS, 1, 1};
    while (d.rows > 1 && (rows + d.rows - 1) / d.rows * key_heads < 2 * threads) d.rows = (d.rows + 1) / 2;
    int64_t blocks = (rows + d.rows - 1) / d.rows * query->ne[3];
    while (d.heads < key_heads && (d.heads + 1) * d.rows * together <= QUERIES &&
           blocks * ((key_heads + d.heads) / (d.heads + 1)) >= threads)
        d.heads++;
    while (d.parts < together && blocks * key_heads * d.parts < threads) d.parts++;
    return d;
}

/* Attend with the piece's rows, as many at a time as see the same cells. */
static void attend_rows(Work w, int64_t end, float scale) {
    for (int64_t row = w.first + 1; row <= end; row++) {
        if (row < end && follows(&w, row)) {
            w.rows++;
            continue;
        }
        attend(&w, scale);
        w.first = row;
        w.rows = 1;
    }
}

bool updraft_attention(const Params *params, Tensor *result) {
    if (!is_ours(result)) return false;
    const Tensor *query = result->src[0], *key = result->src[1];
    const int64_t together = query->ne[2] / key->ne[2], rows = query->ne[1], key_heads = key->ne[2];
    const Division d = divided(query, key, params->nth);
    float scale;
    memcpy(&scale, result->op_params, sizeof(scale));
    int64_t number = 0;
    for (int64_t stream = 0; stream < query->ne[3]; stream++)
        for (int64_t first = 0; first < rows; first += d.rows)
            for (int64_t head = 0; head < key_heads; head += d.heads)
                for (int64_t part = 0; part < d.parts; part++) {
                    if (number++ % params->nth != params->ith) continue;
                    Work w = {query, key, result->src[2], result->src[3], result, stream, first, 1, (int)head,
                              (int)(key_heads - head < d.heads ? key_heads - head : d.heads),
                              (int)(together * part / d.parts), (int)(together * (part + 1) / d.parts)};
                    attend_rows(w, first + d.rows < rows ? first + d.rows : rows, scale * LOG2_E);
                }
    return true;
}
