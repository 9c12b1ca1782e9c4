/* A token for each row of logits, by Gumbel-max under top-k, top-p and min-p, without sorting and with little noise.

   The draw is a race: argmax(x / T - log(-log u)) is argmin(-log(u) / weight) with weight = exp((x - highest) / T). As
   -log(u) >= 1 - u, no token arrives before (1 - u) / weight, a bound that takes one hash and one exponential in single
   precision. Exact noise, in double precision, is computed only if the bound is not later than the best arrival so far.

   Truncation removes the end of a row's order (larger logits first, among equals the lower id). If the
   winner of the race is kept, it is the result. If not, that token and all tokens after it in the order are excluded,
   and the race is repeated among the tokens before it.

   If rounding could change the result of a row, the result is UNDECIDED, and the caller uses the reference. */

#include <math.h>

#include "calls.h"
#include "vectors.h"

#define UNDECIDED (-1)
#define GOLDEN 0x9E3779B97F4A7C15ull  /* as in protocol/sampling_noise.py */
#define FIRST 0xBF58476D1CE4E5B9ull
#define SECOND 0x94D049BB133111EBull
#define HALF (LANES / 2)
#define LOG2_E 1.4426950408889634
#define FAR 86.0f      /* maximum exponent of 2 in a bound; beyond it, noise is exact only if 1 - u is 0 in 31 bits */
#define SLACK 1e-3     /* relative margin of a bound, a hundred times its rounding error in single precision */
#define CLOSE 1e-12    /* scores nearer than this, relative to their size, may change order by rounding */
#define CLOSEST 1e-4   /* largest value of CLOSE * |score| that SLACK covers */
#define AT_BORDER 1e-9 /* probabilities this near to top-p or min-p may be on either side, depending on rounding */
#define NOTHING (-40.0) /* exp of a smaller number is too small to change a sum of probabilities */

typedef double dvec __attribute__((vector_size(64)));
typedef int64_t lvec __attribute__((vector_size(64)));
typedef uint64_t wvec __attribute__((vector_size(64)));
typedef float fhalf __attribute__((vector_size(32)));
typedef int32_t ihalf __attribute__((vector_size(32)));

/* `likeliest`, `highest`: the first token of the order and its logit. */
typedef struct {
    const void *logits;
    const uint32_t *mask;
    uint64_t key;
    double temperature;
    int64_t size, likeliest;
    float highest;
} Row;

/* The order up to token `last` of the tokens with logit `value`. */
typedef struct {
    float value;
    int32_t last;
} Cut;

static const Cut NO_CUT = {-INFINITY, INT32_MAX};

#define LANE_NUMBERS ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#define MIX_MOST(word) /* the mixing without its last step, which does not change the upper 31 bits */ \
    (word ^= word >> 30, word *= FIRST, word ^= word >> 27, word *= SECOND)

INLINE ivec all_int(int32_t value) { return value - (ivec){0}; }

INLINE vec smaller(vec a, vec b) { return either(b < a, b, a); }

INLINE int any(ivec wanted) {
    uint64_t words[8], bits = 0;
    memcpy(words, &wanted, sizeof wanted);
    for (int word = 0; word < 8; word++) bits |= words[word];
    return bits != 0;
}

/* Load sixteen logits from token `i` on, a multiple of sixteen; -inf for masked tokens and beyond the end. */
INLINE vec logits_at(const Row *row, int64_t i, const int is_bf16) {
    const int64_t left = row->size - i;
    ivec wanted = all_int(-1);
    vec x;
    if (left >= LANES) {
        x = load(row->logits, i, is_bf16);
    } else {
        x = load_some(row->logits, i, left, is_bf16);
        wanted = LANE_NUMBERS < all_int(left);
    }
    if (row->mask) wanted &= ((all_int(row->mask[i / 32] >> (i % 32)) >> LANE_NUMBERS) & 1) != 0;
    return left >= LANES && !row->mask ? x : either(wanted, x, all(-INFINITY));
}

/* Which of these logits are inside the cut. */
INLINE ivec inside(vec x, int64_t i, Cut cut) {
    const vec value = all(cut.value);
    return (x > value) | ((x == value) & (LANE_NUMBERS + all_int(i) <= all_int(cut.last)));
}

INLINE int64_t first_of(const Row *row, float value, const int is_bf16) {
    for (int64_t i = 0; i < row->size; i += LANES) {
        const vec x = logits_at(row, i, is_bf16);
        if (any(x == all(value)))
            for (int lane = 0; lane < LANES; lane++)
                if (x[lane] == value) return i + lane;
    }
    return 0;
}

/* Find the likeliest token; return whether all logits are numbers and none is +inf. */
INLINE int survey(Row *row, const int is_bf16) {
    vec highest = all(-INFINITY);
    ivec wrong = {0};
    for (int64_t i = 0; i < row->size; i += LANES) {
        const vec x = logits_at(row, i, is_bf16);
        highest = larger(highest, x);
        wrong |= x != x;
    }
    row->highest = largest_of(highest);
    row->likeliest = first_of(row, row->highest, is_bf16);
    return !any(wrong) && row->highest < INFINITY;
}

INLINE int64_t count_from(const Row *row, float value, const int is_bf16) {
    ivec count = {0};
    int64_t sum = 0;
    for (int64_t i = 0; i < row->size; i += LANES) count -= logits_at(row, i, is_bf16) >= all(value);
    for (int lane = 0; lane < LANES; lane++) sum += count[lane];
    return sum;
}

/* Map floats to integers of the same order: the bits, inverted for negative floats. -0 and +0 differ. */
INLINE int32_t place_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

INLINE float value_of(int32_t place) {
    const int32_t bits = place ^ ((place >> 31) & 0x7fffffff);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Cut after the first `count` tokens of the order. The last token's logit is found by bisection. */
static Cut top_k_cut(const Row *row, int64_t count, const int is_bf16) {
    int64_t lowest = place_of(-INFINITY), above = (int64_t)place_of(row->highest) + 1;
    if (count >= row->size) return NO_CUT;
    while (above - lowest > 1) { /* invariant: at least `count` tokens from `lowest` on, fewer from `above` on */
        const int64_t middle = lowest + (above - lowest) / 2;
        if (count_from(row, value_of(middle), is_bf16) >= count) lowest = middle;
        else above = middle;
    }
    const float value = value_of(lowest);
    if (value == -INFINITY) return NO_CUT; /* tokens with this logit are never drawn */
    int64_t equals = count - count_from(row, nextafterf(value, INFINITY), is_bf16); /* equal logits inside the cut */
    for (int64_t i = 0; i < row->size; i += LANES) {
        const vec x = logits_at(row, i, is_bf16);
        if (any(x == all(value)))
            for (int lane = 0; lane < LANES; lane++)
                if (x[lane] == value && --equals == 0) return (Cut){value, i + lane};
    }
    return NO_CUT; /* unreachable: enough logits equal `value` */
}

INLINE double scaled(const Row *row, float value) { return (double)value / row->temperature; }

/* e to the power of x, for x from -700 to 0, within 1e-12, by a Taylor series around the nearest power of two. */
INLINE dvec exp_of_doubles(dvec x) {
    const dvec magic = (dvec){0} + 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
    const dvec shifted = x * LOG2_E + magic, n = shifted - magic;
    const dvec f = x - n * 0.693147180559945309;
    dvec power = (dvec){0} + 1.0 / 39916800;
    power = power * f + 1.0 / 3628800;
    power = power * f + 1.0 / 362880;
    power = power * f + 1.0 / 40320;
    power = power * f + 1.0 / 5040;
    power = power * f + 1.0 / 720;
    power = power * f + 1.0 / 120;
    power = power * f + 1.0 / 24;
    power = power * f + 1.0 / 6;
    power = power * f + 0.5;
    power = power * f + 1.0;
    power = power * f + 1.0;
    return (dvec)((lvec)power + (((lvec)shifted - (lvec)magic) << 52));
}

INLINE dvec weights(vec x, int half, dvec temperature, double highest) {
    fhalf values;
    memcpy(&values, (const char *)&x + half * sizeof values, sizeof values);
    const dvec behind = __builtin_convertvector(values, dvec) / temperature - highest, least = (dvec){0} - 700.0;
    const lvec near = behind > least;
    return exp_of_doubles((dvec)(((lvec)behind & near) | ((lvec)least & ~near)));
}

/* Sum of the weights inside the cut. */
static double mass(const Row *row, Cut cut, const int is_bf16) {
    const dvec temperature = (dvec){0} + row->temperature;
    const double highest = scaled(row, row->highest);
    const vec least = all((float)((highest + NOTHING) * row->temperature));
    dvec low = {0}, high = {0};
    double sum = 0;
    for (int64_t i = 0; i < row->size; i += LANES) {
        const vec x = logits_at(row, i, is_bf16);
        const ivec wanted = inside(x, i, cut) & (x >= least);
        if (!any(wanted)) continue;
        const vec left = either(wanted, x, all(-INFINITY));
        low += weights(left, 0, temperature, highest);
        high += weights(left, 1, temperature, highest);
    }
    for (int lane = 0; lane < HALF; lane++) sum += low[lane] + high[lane];
    return sum;
}

/* The best token so far and its score, the second best score, and the largest bound that can still win. */
typedef struct {
    int64_t token;
    double score, second;
    float limit;
} Race;

INLINE void run(Race *race, const Row *row, float value, int64_t token) {
    uint64_t word = row->key + (uint64_t)(token + 1) * GOLDEN;
    MIX_MOST(word);
    word ^= word >> 31;
    const double u = ((double)(word >> 11) + 0.5) * 0x1p-53;
    /* once in 2^53, u is 1: the score is then infinite and leaves the row undecided */
    const double score = u < 1 ? scaled(row, value) - log(-log(u)) : INFINITY;
    if (score > race->score) {
        race->second = race->score;
        race->score = score;
        race->token = token;
        race->limit = (float)(exp(scaled(row, row->highest) - score) * (1 + SLACK));
    } else if (score > race->second) {
        race->second = score;
    }
}

INLINE ihalf first_bits(wvec word) { return __builtin_convertvector(~MIX_MOST(word) >> 33, ihalf); }

/* 1 - u of sixteen tokens, rounded down to 31 bits; `base`: the key, advanced to the first token. */
INLINE vec least_delays(uint64_t base) {
    const wvec steps = (wvec){1, 2, 3, 4, 5, 6, 7, 8} * GOLDEN;
    const ihalf halves[2] = {first_bits(steps + base), first_bits(steps + (base + HALF * GOLDEN))};
    ivec bits;
    memcpy(&bits, halves, sizeof bits);
    return __builtin_convertvector(bits, vec) * all(0x1p-31f);
}

/* The winner among the tokens inside the cut. */
static int64_t winner(const Row *row, Cut cut, const int is_bf16) {
    const vec highest = all(row->highest), rate = all((float)(LOG2_E / row->temperature));
    Race race = {-1, -INFINITY, -INFINITY, INFINITY};
    run(&race, row, row->highest, row->likeliest); /* the likeliest token first: few others can then arrive earlier */
    for (int64_t i = 0; i < row->size; i += LANES) {
        const vec x = logits_at(row, i, is_bf16);
        const vec earliest = least_delays(row->key + i * GOLDEN) * exp2_of(smaller((highest - x) * rate, all(FAR)));
        const ivec near = (earliest <= all(race.limit)) & inside(x, i, cut);
        if (any(near))
            for (int lane = 0; lane < LANES; lane++)
                if (near[lane] && i + lane != row->likeliest) run(&race, row, x[lane], i + lane);
    }
    const double close = CLOSE * (1 + fabs(race.score));
    return close < CLOSEST && race.score - race.second > close ? race.token : UNDECIDED;
}

/* Whether a token other than the likeliest is kept; UNDECIDED if that depends on rounding. `whole`: the mass of all
   tokens that top-k keeps. */
INLINE int stays(const Row *row, int64_t token, float value, double top_p, double min_p, double whole,
                 const int is_bf16) {
    if (min_p > 0) {
        const double weight = exp(scaled(row, value) - scaled(row, row->highest));
        if (fabs(weight - min_p) <= AT_BORDER * min_p) return UNDECIDED;
        if (weight < min_p) return 0;
    }
    if (top_p >= 1) return 1;
    const double before = mass(row, (Cut){value, token - 1}, is_bf16) / whole;
    return fabs(before - top_p) <= AT_BORDER ? UNDECIDED : before < top_p;
}

INLINE int64_t drawn(const Row *row, int64_t top_k, double top_p, double min_p, const int is_bf16) {
    Cut cut = top_k > 0 ? top_k_cut(row, top_k, is_bf16) : NO_CUT;
    const double whole = top_p < 1 ? mass(row, cut, is_bf16) : 0;
    for (;;) {
        const int64_t token = winner(row, cut, is_bf16);
        if (token == UNDECIDED || token == row->likeliest) return token; /* the likeliest token always stays */
        const float value = element(row->logits, token, is_bf16);
        const int staying = stays(row, token, value, top_p, min_p, whole, is_bf16);
        if (staying) return staying == UNDECIDED ? UNDECIDED : token;
        cut = (Cut){value, token - 1};
    }
}

INLINE int64_t sample_row(const SampleCall *call, int64_t index, const int is_bf16) {
    Row row = {
        .logits = (const char *)call->logits + index * call->stride * (is_bf16 ? 2 : 4),
        .mask = call->mask ? call->mask + index * call->mask_stride : NULL,
        .key = call->keys[index],
        .temperature = call->temperatures[index],
        .size = call->size,
    };
    if (!survey(&row, is_bf16)) return UNDECIDED;
    if (row.highest == -INFINITY) return 0;
    if (row.temperature < call->min_temperature) return row.likeliest;
    return drawn(&row, call->top_k ? call->top_k[index] : 0, call->top_p ? call->top_p[index] : 1,
                 call->min_p ? call->min_p[index] : 0, is_bf16);
}

void sample_rows(const SampleCall *call) {
#pragma omp parallel for num_threads(call->num_threads) schedule(dynamic) if (call->rows > 1)
    for (int64_t row = 0; row < call->rows; row++)
        call->chosen[row] = call->is_bf16 ? sample_row(call, row, 1) : sample_row(call, row, 0);
}
