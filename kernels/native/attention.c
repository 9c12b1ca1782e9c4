/* Attention over a paged cache, read directly from its blocks, for sequences with any number of queries each.

   One pass over the keys with a running maximum (Milakov & Gimelshein 2018), all products and sums in float32. A
   query's result depends on its own keys alone, to the last bit. */

#include "calls.h"
#include "vectors.h"

#define ROWS 16   /* queries that read a key together, times the heads that share a KV head */
#define SHARE 64  /* rows in one work item of a thread */
#define KEYS 64   /* keys between two updates of the running maximum */
#define GROUPS (KEYS / LANES)
#define MAX_DIM 256
#define NEVER (-1e30f)

/* Rows of one sequence that share a KV head, with their intermediate results. */
typedef struct {
    int64_t count;
    int64_t first_key[ROWS], end_key[ROWS]; /* keys visible to each row */
    int64_t begin, end, all_begin, all_end;  /* keys visible to any row, and to all rows */
    float largest[ROWS], total[ROWS];
    float mixed[ROWS * MAX_DIM];
    float scores[ROWS * KEYS];
    char query[ROWS * MAX_DIM * 4];
    char weights[ROWS * KEYS * 4]; /* products work on words of four bytes */
} Tile;

/* Compute sixteen scores for each of `rows` rows from `row` on; with 2, 4 or 8 rows, all sums stay in registers. */
INLINE void score_rows(Tile *tile, int64_t row, const int rows, const char *keys, int64_t first, const int dim,
                       const int is_bf16) {
    const int words = dim / (int)per_word(is_bf16);
    const char *query = tile->query + row * words * 4;
    vec sums[8] = {{0}};
    for (int word = 0; word < words; word++) {
        const uvec key = words_at(keys + word * 64);
        UNROLL for (int r = 0; r < rows; r++)
            sums[r] = add_product(sums[r], key, all_of(query + (r * words + word) * 4), is_bf16);
    }
    for (int r = 0; r < rows; r++) store(tile->scores + (row + r) * KEYS, first, sums[r], 0);
}

INLINE void score(Tile *tile, const char *keys, int64_t first, const int dim, const int is_bf16) {
    for (int64_t row = 0; row < tile->count; row += 8) { /* rows beyond the last are zero and ignored */
        const int64_t left = tile->count - row;
        if (left == 1) score_rows(tile, row, 1, keys, first, dim, is_bf16);
        else if (left == 2) score_rows(tile, row, 2, keys, first, dim, is_bf16);
        else if (left <= 4) score_rows(tile, row, 4, keys, first, dim, is_bf16);
        else score_rows(tile, row, 8, keys, first, dim, is_bf16);
    }
}

/* Convert scores to weights relative to the largest score so far, and rescale earlier results to the same maximum. */
INLINE void weigh(Tile *tile, int64_t base, float scale, const int dim, const int is_bf16) {
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t row = 0; row < tile->count; row++) {
        const int first = (int)(tile->first_key[row] - base), end = (int)(tile->end_key[row] - base);
        vec scores[GROUPS], most = all(NEVER);
        for (int group = 0; group < GROUPS; group++) {
            const ivec key = lanes + group * LANES;
            const vec given = load(tile->scores + row * KEYS, group * LANES, 0) * all(scale);
            scores[group] = either((key >= first) & (key < end), given, all(NEVER));
            most = larger(most, scores[group]);
        }
        float before = tile->largest[row], now = largest_of(most);
        now = now > before ? now : before;
        vec total = {0};
        for (int group = 0; group < GROUPS; group++) {
            const ivec hidden = scores[group] <= all(NEVER); /* NaN is visible, and makes the result NaN */
            const vec powers = (vec)((ivec)exp2_of(scores[group] - all(now)) & ~hidden);
            store(tile->weights, row * KEYS + group * LANES, powers, is_bf16);
            total += load(tile->weights, row * KEYS + group * LANES, is_bf16);
        }
        float kept = exp2_of(all(before - now))[0];
        tile->largest[row] = now;
        tile->total[row] = tile->total[row] * kept + sum_of(total);
        if (kept != 1.0f)
            for (int i = 0; i < dim; i += LANES)
                store(tile->mixed + row * dim, i, load(tile->mixed + row * dim, i, 0) * all(kept), 0);
    }
}

/* Add sixteen values, weighted from the `first`-th weight on, to `rows` rows from `row` on: `vectors` vectors of their
   elements, from element `from` on. */
INLINE void mix_part(Tile *tile, int64_t row, const int rows, const char *values, int64_t first, int from,
                     const int vectors, const int dim, const int is_bf16) {
    const int64_t row_words = KEYS / per_word(is_bf16);
    const char *weights = tile->weights + (row * row_words + first / per_word(is_bf16)) * 4;
    vec mixed[4][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) mixed[r][v] = load(tile->mixed + (row + r) * dim, from + v * LANES, 0);
    for (int word = 0; word < LANES / per_word(is_bf16); word++) {
        uvec value[4];
        UNROLL for (int v = 0; v < vectors; v++) value[v] = words_at(values + (word * dim + from + v * LANES) * 4);
        UNROLL for (int r = 0; r < rows; r++) {
            const uvec weight = all_of(weights + (r * row_words + word) * 4);
            UNROLL for (int v = 0; v < vectors; v++) mixed[r][v] = add_product(mixed[r][v], value[v], weight, is_bf16);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) store(tile->mixed + (row + r) * dim, from + v * LANES, mixed[r][v], 0);
}

INLINE void mix_rows(Tile *tile, int64_t row, const int rows, const char *values, int64_t first, const int dim,
                     const int is_bf16) {
    int from = 0;
    for (; from + 64 <= dim; from += 64) mix_part(tile, row, rows, values, first, from, 4, dim, is_bf16);
    for (; from + 32 <= dim; from += 32) mix_part(tile, row, rows, values, first, from, 2, dim, is_bf16);
    for (; from < dim; from += 16) mix_part(tile, row, rows, values, first, from, 1, dim, is_bf16);
}

/* Add sixteen values that all rows see. */
INLINE void mix(Tile *tile, const char *values, int64_t first, const int dim, const int is_bf16) {
    for (int64_t row = 0; row < tile->count; row += 4) {
        const int64_t left = tile->count - row;
        if (left == 1) mix_rows(tile, row, 1, values, first, dim, is_bf16);
        else if (left == 2) mix_rows(tile, row, 2, values, first, dim, is_bf16);
        else mix_rows(tile, row, 4, values, first, dim, is_bf16);
    }
}

/* Add sixteen values, the first at position `key`, of which some rows see only a part. Hidden values must not reach
   these rows, because they may be NaN. */
INLINE void mix_border(Tile *tile, const char *values, int64_t key, int64_t first, const int dim, const int is_bf16) {
    const int64_t step = per_word(is_bf16);
    char visible[LANES * MAX_DIM * 4];
    int64_t from = 0, end = 0; /* key range of `visible` */
    for (int64_t row = 0; row < tile->count; row++) {
        if (row == 0 || tile->first_key[row] - key != from || tile->end_key[row] - key != end) {
            from = tile->first_key[row] - key;
            end = tile->end_key[row] - key;
            for (int64_t word = 0; word < LANES / step; word++) {
                uint32_t mask = 0;
                for (int64_t part = 0; part < step; part++)
                    if (word * step + part >= from && word * step + part < end)
                        mask |= is_bf16 ? 0xffffu << (16 * part) : 0xffffffffu;
                for (int64_t i = 0; i < dim; i += LANES) {
                    const uvec kept = words_at(values + (word * dim + i) * 4) & (mask - (uvec){0});
                    memcpy(visible + (word * dim + i) * 4, &kept, sizeof kept);
                }
            }
        }
        mix_rows(tile, row, 1, visible, first, dim, is_bf16);
    }
}

/* Address of sixteen keys (part 0) or values (part 1) from `position` on in the cache. */
INLINE const char *place(const AttentionCall *call, const int32_t *table, int64_t kv_head, int64_t position, int part,
                         const int is_bf16) {
    int64_t page = (table[position / call->block_size] * 2 + part) * call->kv_heads + kv_head;
    int64_t index = (page * call->block_size + position % call->block_size) * call->head_dim;
    return (const char *)call->cache + index * size_of(is_bf16);
}

/* Prefetch a block, because blocks are scattered and the processor cannot predict the next one. */
INLINE void fetch(const char *from, const int dim, const int is_bf16) {
    for (int line = 0; line < LANES * dim * (int)size_of(is_bf16); line += 64) __builtin_prefetch(from + line);
}

INLINE void attend_tile(const AttentionCall *call, Tile *tile, const int32_t *table, int64_t kv_head, const int dim,
                        const int is_bf16) {
    const float to_power_of_two = (float)(call->scale * 1.4426950408889634);
    for (int64_t base = tile->begin / KEYS * KEYS; base < tile->end; base += KEYS) {
        const int64_t stop = base + KEYS < tile->end ? base + KEYS : tile->end;
        /* keys before the first group are not visible, and their block may be freed */
        const int64_t start = base > tile->begin ? base : tile->begin / LANES * LANES;
        for (int64_t key = start; key < stop; key += LANES) {
            fetch(place(call, table, kv_head, key, 1, is_bf16), dim, is_bf16);
            if (key + KEYS < tile->end) fetch(place(call, table, kv_head, key + KEYS, 0, is_bf16), dim, is_bf16);
            score(tile, place(call, table, kv_head, key, 0, is_bf16), key - base, dim, is_bf16);
        }
        weigh(tile, base, to_power_of_two, dim, is_bf16);
        for (int64_t key = start; key < stop; key += LANES) {
            const char *values = place(call, table, kv_head, key, 1, is_bf16);
            if (key >= tile->all_begin && key + LANES <= tile->all_end) mix(tile, values, key - base, dim, is_bf16);
            else mix_border(tile, values, key, key - base, dim, is_bf16);
        }
    }
}

/* Start a tile with the next `count` rows of a sequence. */
INLINE void begin_tile(const AttentionCall *call, Tile *tile, const int64_t *sequence, int64_t kv_head, int64_t done,
                       const int dim, const int is_bf16) {
    const int64_t shared = call->heads / call->kv_heads, size = dim * size_of(is_bf16);
    memset(tile->query, 0, ROWS * size);
    memset(tile->mixed, 0, sizeof(float) * ROWS * dim);
    for (int64_t row = 0; row < tile->count; row++) {
        int64_t number = (done + row) / shared, head = kv_head * shared + (done + row) % shared;
        int64_t position = sequence[1] + number, oldest = call->window ? position - call->window + 1 : 0;
        int64_t from = (sequence[0] + number) * call->query_stride + head * dim;
        memcpy(tile->query + row * size, (const char *)call->query + from * size_of(is_bf16), size);
        tile->first_key[row] = oldest > 0 ? oldest : 0;
        tile->end_key[row] = position + 1;
        tile->largest[row] = NEVER;
        tile->total[row] = 0;
    }
    tile->begin = tile->first_key[0], tile->all_begin = tile->first_key[tile->count - 1];
    tile->all_end = tile->end_key[0], tile->end = tile->end_key[tile->count - 1];
}

/* Attend with SHARE rows of one sequence, from `done` on: its queries in all heads that share one KV head. */
INLINE void attend(const AttentionCall *call, const int64_t *sequence, int64_t kv_head, int64_t done, const int dim,
                   const int is_bf16) {
    const int64_t shared = call->heads / call->kv_heads, rows = sequence[2] * shared;
    const int64_t end = rows < done + SHARE ? rows : done + SHARE;
    Tile tile;
    for (; done < end; done += tile.count) {
        tile.count = end - done < ROWS ? end - done : ROWS;
        begin_tile(call, &tile, sequence, kv_head, done, dim, is_bf16);
        attend_tile(call, &tile, call->tables + sequence[3], kv_head, dim, is_bf16);
        for (int64_t row = 0; row < tile.count; row++) {
            int64_t number = (done + row) / shared, head = kv_head * shared + (done + row) % shared;
            int64_t to = ((sequence[0] + number) * call->heads + head) * dim;
            float total = tile.total[row];
            if (call->sinks) total += exp2_of(all(call->sinks[head] * 1.44269504f - tile.largest[row]))[0];
            for (int i = 0; i < dim; i += LANES)
                store(call->out, to + i, load(tile.mixed + row * dim, i, 0) * all(1.0f / total), is_bf16);
        }
    }
}

/* One function per common head_dim, so that loops over it are unrolled and sums stay in registers. */
#define ATTEND_ALL(NAME, DIM, IS_BF16)                                                      \
    static void NAME(const AttentionCall *call) {                                           \
        int64_t rows = call->max_queries * (call->heads / call->kv_heads);                 \
        int64_t shares = (rows + SHARE - 1) / SHARE, work = shares * call->kv_heads;        \
        _Pragma("omp parallel for schedule(dynamic, 1) num_threads(call->num_threads) if (call->num_sequences * work > 1)") \
        for (int64_t item = 0; item < call->num_sequences * work; item++)                   \
            attend(call, call->sequences + item / work * 4, item % work / shares,           \
                   item % shares * SHARE, DIM, IS_BF16);                                    \
    }

ATTEND_ALL(attend_32_bf16, 32, 1)
ATTEND_ALL(attend_64_bf16, 64, 1)
ATTEND_ALL(attend_128_bf16, 128, 1)
ATTEND_ALL(attend_any_bf16, (int)call->head_dim, 1)
ATTEND_ALL(attend_any_float, (int)call->head_dim, 0)

int paged_attention(const AttentionCall *call) {
    if (call->head_dim % LANES || call->head_dim > MAX_DIM || call->block_size % LANES) return -1;
    if (!call->is_bf16) attend_any_float(call);
    else if (call->head_dim == 32) attend_32_bf16(call);
    else if (call->head_dim == 64) attend_64_bf16(call);
    else if (call->head_dim == 128) attend_128_bf16(call);
    else attend_any_bf16(call);
    return 0;
}
