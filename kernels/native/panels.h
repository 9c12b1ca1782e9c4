/* Panels of outputs, which all matrix products share: their sizes, and the storing of sums. */

#pragma once

#include "calls.h"
#include "vectors.h"

#if defined(__AVX512F__)
#define VECTORS 2  /* vectors of outputs per panel */
#define TILE_ROWS 12  /* rows whose sums (VECTORS each) and operands fill 32 registers */
#else
#define VECTORS 1
#define TILE_ROWS 4
#endif
#define PANEL (VECTORS * LANES)
#define BLOCK_ROWS 288     /* rows that a thread computes for each time it reads a panel from memory */
#define PARALLEL_FROM 32768  /* multiplications: fewer are left to one thread */

/* Store the sums of `rows` rows with one panel, after adding the bias. */
INLINE void store_block(const LinearCall *call, int64_t first, int64_t rows, int64_t panel, const vec *sums,
                        const int is_bf16) {
    const Weights *weights = call->weights;
    for (int v = 0; v < VECTORS; v++) {
        const int64_t output = panel * PANEL + v * LANES, left = weights->outputs - output;
        if (left <= 0) return;
        float bias[LANES] = {0};
        for (int lane = 0; weights->bias && lane < LANES && lane < left; lane++)
            bias[lane] = element(weights->bias, output + lane, is_bf16);
        for (int64_t row = 0; row < rows; row++) {
            const vec values = sums[row * VECTORS + v] + load(bias, 0, 0);
            const int64_t at = (first + row) * weights->outputs + output;
            if (left >= LANES) store(call->outputs, at, values, is_bf16);
            else store_some(call->outputs, at, values, left, is_bf16);
        }
    }
}
