/* Attention over a paged cache, straight from its blocks, for a batch of sequences with any number of queries each.

One pass over the keys with a running maximum (Milakov & Gimelshein 2018), all products and sums in float32. What a
query gets depends on its own keys alone, to the last bit. */

#include "vectors.h"

#define ROWS 16   /* queries, heads that share a KV head included, that read a key together */
#define SHARE 64  /* of them, how many are one piece of work for a thread */
#define KEYS 64   /* keys between two updates of the running maximum */
#define MOST_DIM 256
#define NEVER (-1e30f)

/* `query` and `out`: (rows, heads, head_dim), rows `query_stride` elements apart. `cache`: (blocks, 2 * kv_heads,
   block_size, head_dim), the keys' heads first. `sequences`: (n, 4): first row, position of the first query, number of
   queries, where its block table begins in `tables`. `most_queries`
   of a sequence. `window`: tokens in sight, the query's own included; 0 for all. */
typedef struct {
    const void *query;
    void *out;
    const void *cache;
    const int64_t *sequences;
    const int64_t *tables;
    int64_t query_stride;
    int64_t num_sequences;
    int64_t most_queries;
    int64_t heads;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t window;
    int64_t num_threads;
    int64_t is_bf16;
    double scale;
} AttentionCall;

/* Some rows of one sequence that share a KV head, with what they have gathered so far. */
typedef struct {
    int64_t count;
    int64_t first_key[ROWS], end_key[ROWS]; /* in sight of each row */
    float largest[ROWS], total[ROWS];
    float query[ROWS * MOST_DIM];
    float mixed[ROWS * MOST_DIM];
    float weights[ROWS * KEYS];
} Tile;

/* Lane i of the result is the sum of all lanes of v[i]. */
INLINE vec sums_of(vec *v) {
    UNROLL for (int count = LANES; count > 1; count /= 2)
        UNROLL for (int i = 0; i < count / 2; i++)
            v[i] = EVEN_LANES(v[2 * i], v[2 * i + 1]) + ODD_LANES(v[2 * i], v[2 * i + 1]);
    return v[0];
}

/* Sixteen keys or values of one block as floats. */
INLINE void widen(float *wide, const void *cache, int64_t index, const int dim, const int is_bf16) {
    for (int i = 0; i < LANES * dim; i += LANES) {
        vec values = load(cache, index + i, is_bf16);
        memcpy(wide + i, &values, sizeof values);
    }
}

INLINE void score(Tile *tile, const float *keys, int first, const int dim) {
    for (int64_t row = 0; row < tile->count; row++) {
        vec sums[LANES] = {{0}};
        for (int i = 0; i < dim; i += LANES) {
            vec query = load(tile->query + row * dim, i, 0);
            UNROLL for (int key = 0; key < LANES; key++) sums[key] += query * load(keys + key * dim, i, 0);
        }
        store(tile->weights + row * KEYS, first, sums_of(sums), 0);
    }
}

/* Scores to weights, relative to the largest score so far; what was gathered before is brought to the same measure. */
INLINE void weigh(Tile *tile, int64_t base, const int dim) {
    for (int64_t row = 0; row < tile->count; row++) {
        float *weights = tile->weights + row * KEYS;
        vec most = all(NEVER);
        for (int key = 0; key < KEYS; key++)
            if (base + key < tile->first_key[row] || base + key >= tile->end_key[row]) weights[key] = NEVER;
        for (int key = 0; key < KEYS; key += LANES) most = larger(most, load(weights, key, 0));
        float before = tile->largest[row], now = largest_of(most);
        now = now > before ? now : before;
        vec total = {0};
        for (int key = 0; key < KEYS; key += LANES) {
            vec scores = load(weights, key, 0);
            ivec hidden = scores <= all(NEVER); /* what is not a number is seen, and makes the result none */
            vec powers = (vec)((ivec)exp2_of(scores - all(now)) & ~hidden);
            total += powers;
            store(weights, key, powers, 0);
        }
        float kept = exp2_of(all(before - now))[0];
        tile->largest[row] = now;
        tile->total[row] = tile->total[row] * kept + sum_of(total);
        if (kept != 1.0f)
            for (int i = 0; i < dim; i += LANES)
                store(tile->mixed + row * dim, i, load(tile->mixed + row * dim, i, 0) * all(kept), 0);
    }
}

INLINE void mix(Tile *tile, const float *values, int first, int64_t base, const int dim) {
    for (int64_t row = 0; row < tile->count; row++) {
        const float *weights = tile->weights + row * KEYS + first;
        int64_t from = tile->first_key[row] - base - first, end = tile->end_key[row] - base - first;
        from = from < 0 ? 0 : from;
        end = end > LANES ? LANES : end;
        vec mixed[MOST_DIM / LANES] = {{0}};
        UNROLL for (int i = 0; i < dim / LANES; i++) mixed[i] = load(tile->mixed + row * dim, i * LANES, 0);
        for (int64_t key = from; key < end; key++)
            UNROLL for (int i = 0; i < dim / LANES; i++)
                mixed[i] += all(weights[key]) * load(values + key * dim, i * LANES, 0);
        UNROLL for (int i = 0; i < dim / LANES; i++) store(tile->mixed + row * dim, i * LANES, mixed[i], 0);
    }
}

/* Where sixteen keys (part 0) or values (part 1) from `position` on lie in the cache. */
INLINE int64_t place(const AttentionCall *call, const int64_t *table, int64_t kv_head, int64_t position, int part) {
    int64_t page = (table[position / call->block_size] * 2 + part) * call->kv_heads + kv_head;
    return (page * call->block_size + position % call->block_size) * call->head_dim;
}

/* Blocks lie scattered: the processor does not guess the next one. */
INLINE void fetch(const void *cache, int64_t index, const int dim, const int is_bf16) {
    const int size = is_bf16 ? 2 : 4;
    for (int line = 0; line < LANES * dim * size; line += 64)
        __builtin_prefetch((const char *)cache + index * size + line);
}

INLINE void attend_tile(const AttentionCall *call, Tile *tile, const int64_t *table, int64_t kv_head, const int dim,
                        const int is_bf16) {
    int64_t first = tile->first_key[0], end = 0;
    for (int64_t row = 0; row < tile->count; row++) end = tile->end_key[row] > end ? tile->end_key[row] : end;
    float wide[LANES * MOST_DIM];
    for (int64_t base = first / KEYS * KEYS; base < end; base += KEYS) {
        int64_t stop = base + KEYS < end ? base + KEYS : end;
        for (int64_t key = base; key < stop; key += LANES) {
            if (key + LANES <= first) continue; /* out of sight: its block may be gone */
            fetch(call->cache, place(call, table, kv_head, key, 1), dim, is_bf16);
            if (key + KEYS < end) fetch(call->cache, place(call, table, kv_head, key + KEYS, 0), dim, is_bf16);
            widen(wide, call->cache, place(call, table, kv_head, key, 0), dim, is_bf16);
            score(tile, wide, (int)(key - base), dim);
        }
        weigh(tile, base, dim);
        for (int64_t key = base; key < stop; key += LANES) {
            if (key + LANES <= first) continue;
            widen(wide, call->cache, place(call, table, kv_head, key, 1), dim, is_bf16);
            mix(tile, wide, (int)(key - base), base, dim);
        }
    }
}

/* SHARE rows of one sequence, from `done` on: its queries in all heads that share one KV head. */
INLINE void attend(const AttentionCall *call, const int64_t *sequence, int64_t kv_head, int64_t done, const int dim,
                   const int is_bf16) {
    const int64_t shared = call->heads / call->kv_heads, rows = sequence[2] * shared;
    const int64_t end = rows < done + SHARE ? rows : done + SHARE;
    const float to_power_of_two = (float)(call->scale * 1.4426950408889634);
    Tile tile;
    for (; done < end; done += tile.count) {
        tile.count = end - done < ROWS ? end - done : ROWS;
        for (int64_t row = 0; row < tile.count; row++) {
            int64_t number = (done + row) / shared, head = kv_head * shared + (done + row) % shared;
            int64_t position = sequence[1] + number, oldest = call->window ? position - call->window + 1 : 0;
            int64_t from = (sequence[0] + number) * call->query_stride + head * dim;
            tile.first_key[row] = oldest > 0 ? oldest : 0;
            tile.end_key[row] = position + 1;
            tile.largest[row] = NEVER;
            tile.total[row] = 0;
            for (int i = 0; i < dim; i += LANES) {
                store(tile.query + row * dim, i, load(call->query, from + i, is_bf16) * all(to_power_of_two), 0);
                store(tile.mixed + row * dim, i, all(0), 0);
            }
        }
        attend_tile(call, &tile, call->tables + sequence[3], kv_head, dim, is_bf16);
        for (int64_t row = 0; row < tile.count; row++) {
            int64_t number = (done + row) / shared, head = kv_head * shared + (done + row) % shared;
            int64_t to = ((sequence[0] + number) * call->heads + head) * dim;
            for (int i = 0; i < dim; i += LANES)
                store(call->out, to + i, load(tile.mixed + row * dim, i, 0) * all(1.0f / tile.total[row]), is_bf16);
        }
    }
}

/* A function for each head_dim that models have: the loops over it are unrolled and sums stay in registers. */
#define ATTEND_ALL(NAME, DIM, IS_BF16)                                                      \
    static void NAME(const AttentionCall *call) {                                           \
        int64_t rows = call->most_queries * (call->heads / call->kv_heads);                 \
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

/* 0, or -1 for a head_dim that is too large or no multiple of sixteen, and a block_size that is none. */
int paged_attention(const AttentionCall *call) {
    if (call->head_dim % LANES || call->head_dim > MOST_DIM || call->block_size % LANES) return -1;
    if (!call->is_bf16) attend_any_float(call);
    else if (call->head_dim == 32) attend_32_bf16(call);
    else if (call->head_dim == 64) attend_64_bf16(call);
    else if (call->head_dim == 128) attend_128_bf16(call);
    else attend_any_bf16(call);
    return 0;
}
