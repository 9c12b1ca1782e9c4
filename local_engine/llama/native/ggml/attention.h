/* A piece of attention: what its thread knows of it, and what its steps share. */

#pragma once

#include <immintrin.h>

#include "types.h"

#define CELLS 64    /* of the cache at a time */
#define ROWS 16     /* of a piece at most */
#define QUERIES 96  /* of all its rows and heads */
#define LONGEST 256 /* numbers of a key or a value */
#define LANES 16
#define FEW 8 /* queries of a key head that are not worth turning its keys for */

/* A thread's piece: for each of some key heads `count` queries of `length` numbers. Queries lie row by row where they
   are few, else turned, the same number of all beside each other, as do keys. */
typedef struct {
    union {
        float turned[LONGEST][QUERIES], query[QUERIES * LONGEST];
    };
    float keys[LONGEST][CELLS], scores[QUERIES][CELLS];
    double values[CELLS][LANES], weights[QUERIES][CELLS], mixed[QUERIES * LONGEST], total[QUERIES];
    float largest[QUERIES];   /* exponent of the weights' unit */
    uint64_t visible[ROWS];   /* which of the cells a row sees */
    float added[ROWS][CELLS]; /* to its scores with them, where that is not nothing */
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

/* A key head: where its keys and values begin, how far apart they are, and the place of its first query. */
typedef struct {
    const char *keys, *values;
    int64_t key_stride, value_stride;
    int first;
} Head;

INLINE double *mixed_of(int q) { return piece.mixed + q * piece.length; }

INLINE __m512 halves(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }

/* A key or value that is likely to be next. */
INLINE void fetch(const char *cell) {
    for (int byte = 0; byte < 2 * piece.length; byte += 64) _mm_prefetch(cell + byte, _MM_HINT_T1);
}

/* `f` for all queries of a key head, `most` at a time: with a constant number of them, and the place of the first. */
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
