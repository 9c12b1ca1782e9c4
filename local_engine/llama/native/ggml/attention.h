/* State of a piece of attention: data per thread, shared by the steps of the computation. */

#pragma once

#include <immintrin.h>

#include "types.h"

#define CELLS 64    /* cells of the cache processed at a time */
#define ROWS 16     /* maximum rows of a piece */
#define QUERIES 96  /* maximum queries of a piece: rows times heads */
#define LONGEST 256 /* maximum size of a key or value */
#define LANES 16
#define FEW 8 /* up to this many queries per key head, transposing the keys does not pay */

/* A thread's piece: for each of several key heads, `count` queries of `length` numbers. Few queries are stored row by
   row; more are stored transposed, with the same element of all queries side by side, like the keys. */
typedef struct {
    union {
        float turned[LONGEST][QUERIES], query[QUERIES * LONGEST];
    };
    float keys[LONGEST][CELLS], scores[QUERIES][CELLS];
    double values[CELLS][LANES], weights[QUERIES][CELLS], mixed[QUERIES * LONGEST], total[QUERIES];
    float largest[QUERIES];   /* exponent of the weights' unit */
    uint64_t visible[ROWS];   /* cells that each row sees */
    float added[ROWS][CELLS]; /* mask values added to the scores, if not all zero */
    bool adds[ROWS];
    int length, count;
} __attribute__((aligned(64))) Piece;

extern _Thread_local Piece updraft_piece __attribute__((visibility("hidden")));
#define piece updraft_piece

/* Cells that some row of the piece sees, in order. */
typedef struct {
    int64_t cells[CELLS];
    int count;
} Seen;

/* A key head: addresses and strides of its keys and values, and the index of its first query. */
typedef struct {
    const char *keys, *values;
    int64_t key_stride, value_stride;
    int first;
} Head;

INLINE double *mixed_of(int q) { return piece.mixed + q * piece.length; }

INLINE __m512 halves(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }

/* Prefetch a key or value that is likely to be next. */
INLINE void fetch(const char *cell) {
    for (int byte = 0; byte < 2 * piece.length; byte += 64) _mm_prefetch(cell + byte, _MM_HINT_T1);
}

/* Apply `f` to all queries of a key head, at most `most` at a time: a constant number of them, from the first index. */
#define CASE(f, n, most, ...)             \
    case n:                               \
        if (n <= most) f(n, __VA_ARGS__); \
        break;
#define FOR_ALL(f, most, head, ...)                                                    \
    for (int left = piece.count, q = (head)->first; left > 0; left -= most, q += most) \
        switch (left < most ? left : most) {                                           \
            CASE(f, 1, most, q, __VA_ARGS__)                                           \
            CASE(f, 2, most, q, __VA_ARGS__)                                           \
            CASE(f, 3, most, q, __VA_ARGS__)                                           \
            CASE(f, 4, most, q, __VA_ARGS__)                                           \
            CASE(f, 5, most, q, __VA_ARGS__)                                           \
            CASE(f, 6, most, q, __VA_ARGS__)                                           \
            CASE(f, 7, most, q, __VA_ARGS__)                                           \
            CASE(f, 8, most, q, __VA_ARGS__)                                           \
        }
