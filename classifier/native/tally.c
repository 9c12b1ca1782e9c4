/* What a question's wording counts: words, numbers, characters and hashed n-grams, in one pass over its code points.

   The same numbers as numpy's, in `classifier/tally.py`, which says what they mean. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define BUCKETS 4096 /* of words and of characters each */
#define BEYOND 128   /* the class and the count of all code points outside ASCII */
#define POWERS 64
#define DAMPED 1024
#define LONG_WORD 8

enum { NOTHING, WORD, NUMBER };

typedef struct {
    uint8_t classes[BEYOND + 1]; /* of code points */
    uint32_t powers[POWERS];
    float damped[DAMPED]; /* what is counted for so many */
} Tables;

typedef struct {
    int64_t words, word_letters, longest_word, long_words, distinct_words;
    int64_t numbers, digits, longest_number;
    int64_t characters[BEYOND + 1];
    int64_t cues[];
} Told;

/* How often each word is there; a place without any is free. */
typedef struct {
    uint32_t hash, count;
} Entry;

static uint32_t mixed(uint32_t hash) {
    hash ^= hash >> 16;
    hash *= 0x85EBCA6Bu;
    hash ^= hash >> 13;
    hash *= 0xC2B2AE35u;
    return hash ^ hash >> 16;
}

static Entry *entry_of(Entry *entries, uint32_t mask, uint32_t hash) {
    uint32_t at = mixed(hash) & mask;
    while (entries[at].count && entries[at].hash != hash) at = (at + 1) & mask;
    return entries + at;
}

static void add_word(Told *told, Entry *entries, uint32_t mask, uint32_t hash, int64_t length) {
    Entry *entry = entry_of(entries, mask, hash);
    told->distinct_words += entry->count == 0;
    *entry = (Entry){hash, entry->count + 1};
    told->words++;
    told->word_letters += length;
    told->long_words += length > LONG_WORD;
    if (length > told->longest_word) told->longest_word = length;
}

static void add_number(Told *told, int64_t length) {
    told->numbers++;
    told->digits += length;
    if (length > told->longest_number) told->longest_number = length;
}

/* Four characters in a row, a blank before the first and behind the last; digits read 0. */
static void count_characters(const uint32_t *codes, int64_t count, const Tables *tables, uint32_t *buckets) {
    uint32_t last[3] = {0, 0, 0};
    for (int64_t at = 0; at < count + 2; at++) {
        uint32_t code = ' ';
        if (at > 0 && at <= count) {
            code = codes[at - 1];
            if (code < BEYOND && tables->classes[code] == NUMBER) code = '0';
        }
        if (at >= 3) {
            uint32_t hash = ((last[0] * 0x01000193u + last[1]) * 0x01000193u + last[2]) * 0x01000193u + code;
            buckets[mixed(hash ^ 4u * 0x2545F491u) & (BUCKETS - 1)]++;
        }
        last[0] = last[1], last[1] = last[2], last[2] = code;
    }
}

/* `counts`: (2 * BUCKETS). `told->cues`: how often each of the words with `cue_hashes` is there. Returns 0, or -1 where
   there is no memory. */
EXPORT int updraft_tally(const uint32_t *codes, int64_t count, const Tables *tables, const uint32_t *cue_hashes,
                         int64_t num_cues, float *counts, Told *told) {
    uint32_t buckets[2 * BUCKETS] = {0}, mask = 15;
    while (mask < count) mask = 2 * mask + 1; /* words are at most half as many as characters, and one */
    Entry *entries = calloc((size_t)mask + 1, sizeof *entries);
    if (!entries) return -1;
    memset(told, 0, sizeof *told);
    int64_t tokens = 0;
    uint32_t before = 0;
    for (int64_t start = 0, end; start < count; start = end) {
        uint8_t class = tables->classes[codes[start] < BEYOND ? codes[start] : BEYOND];
        uint32_t hash = 0;
        for (end = start; end < count; end++) {
            uint32_t code = codes[end], place = code < BEYOND ? code : BEYOND;
            if (tables->classes[place] != class) break;
            told->characters[place]++;
            hash += ((class == NUMBER ? '0' : code) + 1) * tables->powers[(end - start) & (POWERS - 1)];
        }
        if (class == NOTHING) continue;
        if (class == WORD)
            add_word(told, entries, mask, hash, end - start);
        else
            add_number(told, end - start);
        buckets[mixed(hash) & (BUCKETS - 1)]++;
        if (tokens++) buckets[mixed(before * 0x9E3779B1u + hash) & (BUCKETS - 1)]++;
        before = hash;
    }
    count_characters(codes, count, tables, buckets + BUCKETS);
    for (int64_t cue = 0; cue < num_cues; cue++) told->cues[cue] = entry_of(entries, mask, cue_hashes[cue])->count;
    for (int at = 0; at < 2 * BUCKETS; at++) counts[at] = tables->damped[buckets[at] < DAMPED ? buckets[at] : DAMPED - 1];
    free(entries);
    return 0;
}
