/* Resize 8-bit RGB images along both axes, columns first, with weights computed by kernels/resize.py.
 *
 * Integer arithmetic: output = min(255, (sum of weight x byte + 2^(bits - 1)) >> bits), and no sum reaches 2^31. So
 * every compiler and CPU computes the same bytes. With AVX2, one multiply-add handles two inputs; the plain loops
 * compute the same.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__) && !defined(PLAIN)
#include <immintrin.h>
#define VECTORS
#endif

#define CHANNELS 3
#define GROUP 4  /* outputs that are computed together */
#define SPARE 32 /* bytes after a line that a vector may access */
#define INLINE static inline __attribute__((always_inline))

/* Weights of one axis: output i is a sum over `taps` inputs (an even number), starting with first[i]. This head is
 * followed by int32 first[outputs rounded up to GROUP] and int16 weights[the same][taps]. */
typedef struct {
    int32_t outputs, taps, bits, first[];
} axis;

/* Rows of `pixels` are `stride` bytes apart, those of the target are contiguous. */
typedef struct {
    const uint8_t *pixels;
    int64_t stride, height, width;
    const axis *across, *down;
    uint8_t *target;
} job;

static int64_t round_up(int64_t outputs) { return (outputs + GROUP - 1) / GROUP * GROUP; }
static int64_t line_bytes(int64_t pixels) { return round_up(pixels) * CHANNELS + SPARE; }
static const int16_t *weights_of(const axis *plan) { return (const int16_t *)(plan->first + round_up(plan->outputs)); }

INLINE uint8_t round_shift(int32_t sum, int bits) {
    sum >>= bits;
    return (uint8_t)(sum < 255 ? sum : 255);
}

#ifdef VECTORS
INLINE int32_t pair_at(const int16_t *weights) { int32_t pair; memcpy(&pair, weights, 4); return pair; }

/* Two neighboring pixels of two lines, as words r r g g b b 0 0 of each. */
INLINE __m256i pixels_at(const uint8_t *one, const uint8_t *other) {
    const __m128i apart = _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    __m128i low = _mm_loadl_epi64((const __m128i *)one), high = _mm_loadl_epi64((const __m128i *)other);
    return _mm256_shuffle_epi8(_mm256_set_m128i(high, low), _mm256_set_m128i(apart, apart));
}

INLINE void make_group(const uint8_t *lines[2], const int32_t *first, const int16_t *weights, int taps, int bits,
                       uint8_t *targets[2]) {
    const __m128i closer = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    __m256i sums[GROUP];
    for (int q = 0; q < GROUP; q++, weights += taps) {
        int64_t from = (int64_t)CHANNELS * first[q];
        sums[q] = _mm256_set1_epi32(1 << (bits - 1));
        for (int k = 0; k < taps; k += 2, from += 2 * CHANNELS) {
            __m256i pair = _mm256_set1_epi32(pair_at(weights + k));
            sums[q] = _mm256_add_epi32(sums[q], _mm256_madd_epi16(pixels_at(lines[0] + from, lines[1] + from), pair));
        }
        sums[q] = _mm256_sra_epi32(sums[q], _mm_cvtsi32_si128(bits));
    }
    __m256i left = _mm256_packs_epi32(sums[0], sums[1]), right = _mm256_packs_epi32(sums[2], sums[3]);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(left, right), _mm256_set_m128i(closer, closer));
    _mm_storeu_si128((__m128i *)targets[0], _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)targets[1], _mm256_extracti128_si256(bytes, 1));
}

/* Four outputs of two taps: their inputs are within 16 bytes of a line. `bytes` are the places of both inputs of each
 * output and channel, as words, and `weights` those of the inputs. */
typedef struct {
    int64_t start;
    uint8_t bytes[3][16];
    int16_t weights[3][8];
} gather;

/* Fill the plan of one group; returns 0 if its inputs are further apart. */
static int plan_gather(const int32_t *first, const int16_t *weights, int count, gather *plan) {
    int32_t start = first[0] < first[count - 1] ? first[0] : first[count - 1];
    memset(plan->bytes, 0x80, sizeof plan->bytes);
    memset(plan->weights, 0, sizeof plan->weights);
    plan->start = (int64_t)CHANNELS * start;
    for (int n = 0; n < count * CHANNELS; n++) {
        int q = n / CHANNELS, from = CHANNELS * (first[q] - start) + n % CHANNELS, at = n % 4;
        if (from < 0 || from + CHANNELS > 15) return 0;
        plan->bytes[n / 4][4 * at] = (uint8_t)from;
        plan->bytes[n / 4][4 * at + 2] = (uint8_t)(from + CHANNELS);
        memcpy(plan->weights[n / 4] + 2 * at, weights + 2 * q, 4);
    }
    return 1;
}

static int plan_gathers(const axis *across, gather *plans) {
    if (across->taps != 2) return 0;
    for (int i = 0; i < across->outputs; i += GROUP) {
        int count = across->outputs - i < GROUP ? across->outputs - i : GROUP;
        if (!plan_gather(across->first + i, weights_of(across) + 2 * i, count, plans + i / GROUP)) return 0;
    }
    return 1;
}

INLINE void make_gathered(const uint8_t *lines[2], const gather *plan, int bits, uint8_t *targets[2]) {
    __m128i one = _mm_loadu_si128((const __m128i *)(lines[0] + plan->start));
    __m128i two = _mm_loadu_si128((const __m128i *)(lines[1] + plan->start));
    __m256i both = _mm256_set_m128i(two, one), sums[3];
    for (int q = 0; q < 3; q++) {
        __m256i place = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)plan->bytes[q]));
        __m256i weight = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)plan->weights[q]));
        sums[q] = _mm256_madd_epi16(_mm256_shuffle_epi8(both, place), weight);
        sums[q] = _mm256_add_epi32(sums[q], _mm256_set1_epi32(1 << (bits - 1)));
        sums[q] = _mm256_sra_epi32(sums[q], _mm_cvtsi32_si128(bits));
    }
    __m256i low = _mm256_packs_epi32(sums[0], sums[1]), high = _mm256_packs_epi32(sums[2], sums[2]);
    __m256i bytes = _mm256_packus_epi16(low, high);
    _mm_storeu_si128((__m128i *)targets[0], _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)targets[1], _mm256_extracti128_si256(bytes, 1));
}

/* Four sums of two bytes times two weights, for the bytes of one line and those of the next. */
INLINE void add_lines(__m256i sums[4], const uint8_t *one, const uint8_t *next, __m256i pair) {
    const __m256i none = _mm256_setzero_si256();
    __m256i a = _mm256_loadu_si256((const __m256i *)one), b = _mm256_loadu_si256((const __m256i *)next);
    __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(low, none), pair));
    sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(low, none), pair));
    sums[2] = _mm256_add_epi32(sums[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(high, none), pair));
    sums[3] = _mm256_add_epi32(sums[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(high, none), pair));
}

/* Compute the vectors of 64 bytes of a line, like blend_vectors. */
INLINE int64_t blend_wide(const uint8_t *lines, int64_t stride, const int16_t *weights, int taps, int bits,
                          uint8_t *target, int64_t count) {
    int64_t x = 0;
#ifdef __AVX512BW__
    const __m512i none = _mm512_setzero_si512();
    for (; x + 64 <= count; x += 64) {
        __m512i half = _mm512_set1_epi32(1 << (bits - 1)), sums[4] = {half, half, half, half};
        const uint8_t *from = lines + x;
        for (int k = 0; k < taps; k += 2, from += 2 * stride) {
            __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + stride);
            __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
            __m512i pair = _mm512_set1_epi32(pair_at(weights + k));
            sums[0] = _mm512_add_epi32(sums[0], _mm512_madd_epi16(_mm512_unpacklo_epi8(low, none), pair));
            sums[1] = _mm512_add_epi32(sums[1], _mm512_madd_epi16(_mm512_unpackhi_epi8(low, none), pair));
            sums[2] = _mm512_add_epi32(sums[2], _mm512_madd_epi16(_mm512_unpacklo_epi8(high, none), pair));
            sums[3] = _mm512_add_epi32(sums[3], _mm512_madd_epi16(_mm512_unpackhi_epi8(high, none), pair));
        }
        for (int q = 0; q < 4; q++) sums[q] = _mm512_sra_epi32(sums[q], _mm_cvtsi32_si128(bits));
        __m512i low = _mm512_packs_epi32(sums[0], sums[1]), high = _mm512_packs_epi32(sums[2], sums[3]);
        _mm512_storeu_si512(target + x, _mm512_packus_epi16(low, high));
    }
#endif
    return x;
}

/* Compute the whole vectors of a line; returns the number of bytes. Packing restores the order before unpacking. */
INLINE int64_t blend_vectors(const uint8_t *lines, int64_t stride, const int16_t *weights, int taps, int bits,
                             uint8_t *target, int64_t count) {
    const __m128i shift = _mm_cvtsi32_si128(bits);
    int64_t x = blend_wide(lines, stride, weights, taps, bits, target, count);
    for (; x + 32 <= count; x += 32) {
        __m256i half = _mm256_set1_epi32(1 << (bits - 1)), sums[4] = {half, half, half, half};
        const uint8_t *from = lines + x;
        for (int k = 0; k < taps; k += 2, from += 2 * stride)
            add_lines(sums, from, from + stride, _mm256_set1_epi32(pair_at(weights + k)));
        for (int q = 0; q < 4; q++) sums[q] = _mm256_sra_epi32(sums[q], shift);
        __m256i low = _mm256_packs_epi32(sums[0], sums[1]), high = _mm256_packs_epi32(sums[2], sums[3]);
        _mm256_storeu_si256((__m256i *)(target + x), _mm256_packus_epi16(low, high));
    }
    return x;
}
#else
typedef struct {
    int unused;
} gather;

static int plan_gathers(const axis *across, gather *plans) { return 0; }
INLINE void make_gathered(const uint8_t *lines[2], const gather *plan, int bits, uint8_t *targets[2]) {}

INLINE void make_group(const uint8_t *lines[2], const int32_t *first, const int16_t *weights, int taps, int bits,
                       uint8_t *targets[2]) {
    for (int n = 0; n < 2; n++)
        for (int q = 0; q < GROUP; q++)
            for (int c = 0; c < CHANNELS; c++) {
                const uint8_t *from = lines[n] + (int64_t)CHANNELS * first[q] + c;
                int32_t sum = 1 << (bits - 1);
                for (int k = 0; k < taps; k++) sum += weights[q * taps + k] * from[CHANNELS * k];
                targets[n][CHANNELS * q + c] = round_shift(sum, bits);
            }
}

INLINE int64_t blend_vectors(const uint8_t *lines, int64_t stride, const int16_t *weights, int taps, int bits,
                             uint8_t *target, int64_t count) {
    return 0;
}
#endif

/* Resize two lines of pixels; all four lines have SPARE bytes after them. `plans` may be NULL. */
INLINE void resize_rows(const uint8_t *one, const uint8_t *two, const axis *across, const gather *plans, uint8_t *target,
                        int64_t wide) {
    const uint8_t *lines[2] = {one, two};
    uint8_t *targets[2] = {target, target + wide};
    const int16_t *weights = weights_of(across);
    const int outputs = across->outputs, taps = across->taps, bits = across->bits; /* stores do not change them */
    for (int i = 0; i < outputs; i += GROUP) {
        if (plans) make_gathered(lines, plans++, bits, targets);
        else make_group(lines, across->first + i, weights + (int64_t)i * taps, taps, bits, targets);
        targets[0] += GROUP * CHANNELS;
        targets[1] += GROUP * CHANNELS;
    }
}

/* Compute one line of `count` bytes from `taps` lines that are `wide` bytes apart. */
INLINE void resize_columns(const uint8_t *lines, int64_t wide, const int16_t *weights, int taps, int bits,
                           uint8_t *target, int64_t count) {
    int64_t x = blend_vectors(lines, wide, weights, taps, bits, target, count);
    for (; x < count; x++) {
        int32_t sum = 1 << (bits - 1);
        for (int k = 0; k < taps; k++) sum += weights[k] * lines[k * wide + x];
        target[x] = round_shift(sum, bits);
    }
}

/* Return a line that may be read for row_bytes: itself if so many bytes of the image follow its start, else a copy. */
static const uint8_t *readable_line(const job *work, int64_t y, int64_t row_bytes, uint8_t *copy) {
    if (y >= work->height) return copy;
    int64_t start = y * work->stride, bytes = work->width * CHANNELS;
    if (start + row_bytes <= (work->height - 1) * work->stride + bytes) return work->pixels + start;
    return memcpy(copy, work->pixels + start, (size_t)bytes);
}

static void resize_across(const job *work, const gather *plans, uint8_t *pair, uint8_t *lines, int64_t wide) {
    const axis *across = work->across;
    int64_t row_bytes = line_bytes(work->width + across->taps);
    for (int64_t y = 0; y < work->height; y += 2) {
        const uint8_t *one = readable_line(work, y, row_bytes, pair);
        const uint8_t *two = readable_line(work, y + 1, row_bytes, pair + row_bytes);
        if (plans) resize_rows(one, two, across, plans, lines + y * wide, wide);
        else resize_rows(one, two, across, NULL, lines + y * wide, wide);
    }
}

/* With a constant for the usual number of taps, the compiler needs no inner loop. */
static void resize_down(const job *work, const uint8_t *lines, int64_t wide) {
    const axis *down = work->down;
    int64_t count = (int64_t)work->across->outputs * CHANNELS;
    const int16_t *weights = weights_of(down);
    for (int y = 0; y < down->outputs; y++, weights += down->taps) {
        const uint8_t *from = lines + down->first[y] * wide;
        if (down->taps == 2) resize_columns(from, wide, weights, 2, down->bits, work->target + y * count, count);
        else resize_columns(from, wide, weights, down->taps, down->bits, work->target + y * count, count);
    }
}

/* Returns 1 if memory allocation fails. */
static int resize_image(const job *work) {
    int64_t wide = line_bytes(work->across->outputs), pair = 2 * line_bytes(work->width + work->across->taps);
    int64_t groups = round_up(work->across->outputs) / GROUP * (int64_t)sizeof(gather);
    uint8_t *memory = malloc(groups + pair + (work->height + 1 + work->down->taps) * wide);
    if (!memory) return 1;
    gather *plans = (gather *)memory;
    uint8_t *lines = memory + groups;
    resize_across(work, plan_gathers(work->across, plans) ? plans : NULL, lines, lines + pair, wide);
    resize_down(work, lines + pair, wide);
    free(memory);
    return 0;
}
