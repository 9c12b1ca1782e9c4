/* What rows of logits say of their model's certainty: two passes of plain C for what takes numpy ten.

   Sixteen floats at a time, for whatever vector unit the compiler finds (the vector extension of GCC and Clang). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define PIECE 4096 /* logits whose sums are kept in single precision */

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

/* One row: the most likely token, the log of the sum of all exponentials, the entropy, and the lead of that token's
   logit over the next. */
typedef struct {
    double token, log_total, entropy, margin;
} Measured;

INLINE vec all(float value) { return (vec){0} + value; }

INLINE vec either(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }

/* From `at` on; behind the end there are impossible tokens. */
INLINE vec load(const float *logits, int64_t at, int64_t count) {
    vec values = all(-INFINITY);
    if (at + LANES <= count)
        memcpy(&values, logits + at, sizeof values);
    else
        memcpy(&values, logits + at, sizeof(float) * (count - at));
    return values;
}

/* e to the power of x <= 0, and of NaN: after Cephes, within 2e-7 of the truth. */
INLINE vec exp_of(vec x) {
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x * all(1.44269504f) + magic, n = shifted - magic;
    vec f = x - n * all(0.693359375f) + n * all(2.12194440e-4f); /* log 2 in two parts */
    vec power = all(1.9875691500e-4f);
    power = power * f + all(1.3981999507e-3f);
    power = power * f + all(8.3334519073e-3f);
    power = power * f + all(4.1665795894e-2f);
    power = power * f + all(1.6666665459e-1f);
    power = power * f + all(5.0000001201e-1f);
    power = power * f * f + f + all(1.0f);
    return power * (vec)(((ivec)shifted - (ivec)magic + 127) << 23);
}

/* The most likely token, of equals the first, and its lead; returns its logit. */
static float find_best(const float *logits, int64_t count, Measured *row) {
    vec best = all(-INFINITY), second = best;
    ivec place = {0}, here = {0};
    for (int lane = 0; lane < LANES; lane++) here[lane] = lane;
    for (int64_t at = 0; at < count; at += LANES, here += LANES) {
        vec values = load(logits, at, count);
        ivec larger = values > best;
        vec less = either(larger, best, values);
        second = either(less > second, less, second);
        best = either(larger, values, best);
        place = (ivec)either(larger, (vec)here, (vec)place);
    }
    int first = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (best[lane] > best[first] || (best[lane] == best[first] && place[lane] < place[first])) first = lane;
    float next = second[first];
    for (int lane = 0; lane < LANES; lane++)
        if (lane != first && best[lane] > next) next = best[lane];
    *row = (Measured){.token = place[first], .margin = (double)best[first] - next};
    return best[first];
}

/* Entropy is log Z - sum(p * (x - best)), with log Z of the shifted logits x - best. */
static void measure(const float *logits, int64_t count, Measured *row) {
    const vec best = all(find_best(logits, count, row)), least = all(-87.0f); /* e to that power is the least normal number */
    double total = 0, weighted = 0;
    for (int64_t piece = 0; piece < count; piece += PIECE) {
        int64_t end = piece + PIECE < count ? piece + PIECE : count;
        vec powers = {0}, products = {0};
        for (int64_t at = piece; at < end; at += LANES) {
            vec behind = load(logits, at, end) - best;
            const ivec counts = ~(behind < least); /* NaN does, so that it shows */
            behind = either(counts, behind, least);
            vec power = (vec)((ivec)exp_of(behind) & counts);
            powers += power;
            products += power * behind;
        }
        for (int lane = 0; lane < LANES; lane++) total += powers[lane], weighted += products[lane];
    }
    row->log_total = best[0] + log(total);
    row->entropy = log(total) - weighted / total;
}

/* `logits`: `rows` times `count` of them; `found`: room for as many rows. */
EXPORT void updraft_measure(const float *logits, int64_t rows, int64_t count, Measured *found) {
    for (int64_t row = 0; row < rows; row++) measure(logits + row * count, count, found + row);
}
