/* Rounding of float32 arrays, in place, onto the grid of fp16 or bf16; values stay float32.
 *
 * Nearest, ties to even. fp16 keeps 10 of the 23 mantissa bits, bf16 keeps 7; adding half a step (minus one, plus one
 * if the last kept bit is odd) to the integer of the bits, and clearing the rest, rounds all normal values; the carry
 * into the exponent is correct. bf16 has the exponents of float32, so this holds for its subnormals too. Below 2^-14
 * fp16 has the fixed spacing 2^-24, which is that of float32 in [0.5, 1): adding and subtracting 0.75 rounds there.
 *
 * Stochastic. The same, with uniform random bits in place of the half step: a value is rounded up with a probability
 * equal to its distance from the grid point below. In fp16's subnormal range the distance is compared with a 31-bit
 * number.
 *
 * The random bits of element i are a hash of (a, b, i), so they do not depend on the number of threads.
 *
 * Returned flags: 1 a finite value left the range (or an infinity was clamped), 2 a NaN occurred, 4 an infinity
 * occurred.
 */
#include <stdint.h>
#include <string.h>

#define CHUNK 32768

enum { NEAREST_FP16, NEAREST_BF16, STOCHASTIC_FP16, STOCHASTIC_BF16, LOOK };

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    float *data;
    int64_t size, next;
    uint32_t a, b, clamped, flags;
    int kind;
} job;

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* a if `mask` is all ones, b if it is zero: compilers vectorize this, but branch on `?:`. */
static inline uint32_t blend(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
static inline uint32_t is_small(uint32_t m) { return (uint32_t)-((int32_t)m < 0x38800000); }

static inline uint32_t hash(uint32_t i, uint32_t a, uint32_t b) {
    uint32_t h = i * 0x9E3779B9u + a;
    h ^= h >> 16;
    h *= 0x7FEB352Du;
    h ^= h >> 15;
    h += b;
    h *= 0x846CA68Bu;
    return h ^ (h >> 16);
}

static inline uint32_t nearest_fp16(uint32_t m) {
    uint32_t normal = (m + 0xFFFu + ((m >> 13) & 1u)) & ~0x1FFFu;
    uint32_t small = bits_of((float_of(m) + 0.75f) - 0.75f);
    return blend(is_small(m), small, normal);
}

static inline uint32_t nearest_bf16(uint32_t m) { return (m + 0x7FFFu + ((m >> 16) & 1u)) & ~0xFFFFu; }

static inline uint32_t stochastic_fp16(uint32_t m, uint32_t h) {
    uint32_t normal = (m + (h >> 19)) & ~0x1FFFu;
    float scaled = float_of(m & is_small(m)) * 16777216.0f;
    int32_t below = (int32_t)scaled;
    int32_t bar = (int32_t)((scaled - (float)below) * 2147483648.0f);
    int32_t up = (int32_t)(h >> 1) < bar;
    uint32_t small = bits_of((float)(below + up) * 5.9604644775390625e-8f);
    return blend(is_small(m), small, normal);
}

static inline uint32_t stochastic_bf16(uint32_t m, uint32_t h) { return (m + (h >> 16)) & ~0xFFFFu; }

/* One loop without branches for each rounding mode, for the compiler to vectorize. */
#define ROUND_LOOP(EXPRESSION, LARGEST)                                          \
    for (int64_t i = 0; i < n; i++) {                                            \
        uint32_t u = bits_of(x[i]), m = u & 0x7FFFFFFFu;                         \
        uint32_t r = (EXPRESSION);                                               \
        uint32_t over = r > (LARGEST), nan = m > 0x7F800000u;                    \
        uint32_t infinite = m == 0x7F800000u;                                    \
        r = over ? (clamped ? (LARGEST) : 0x7F800000u) : r;                      \
        r = nan ? m : r;                                                         \
        left |= over & (nan ^ 1u) & ((infinite ^ 1u) | clamped);                 \
        nans |= nan;                                                             \
        infinities |= infinite;                                                  \
        x[i] = float_of(r | (u & 0x80000000u));                                  \
    }

static uint32_t run_chunk(float *x, int64_t n, int64_t start, const job *work) {
    uint32_t a = work->a + (uint32_t)(start >> 32) * 0x85EBCA6Bu, b = work->b, first = (uint32_t)start;
    uint32_t clamped = work->clamped, left = 0, nans = 0, infinities = 0;
    switch (work->kind) {
    case NEAREST_FP16: ROUND_LOOP(nearest_fp16(m), 0x477FE000u) break;
    case NEAREST_BF16: ROUND_LOOP(nearest_bf16(m), 0x7F7F0000u) break;
    case STOCHASTIC_FP16: ROUND_LOOP(stochastic_fp16(m, hash(first + (uint32_t)i, a, b)), 0x477FE000u) break;
    case STOCHASTIC_BF16: ROUND_LOOP(stochastic_bf16(m, hash(first + (uint32_t)i, a, b)), 0x7F7F0000u) break;
    default:
        for (int64_t i = 0; i < n; i++) {
            uint32_t m = bits_of(x[i]) & 0x7FFFFFFFu;
            nans |= m > 0x7F800000u;
            infinities |= m == 0x7F800000u;
        }
    }
    return left | nans << 1 | infinities << 2;
}

static void run_chunks(void *argument) {
    job *work = argument;
    for (;;) {
        int64_t start = __atomic_fetch_add(&work->next, CHUNK, __ATOMIC_RELAXED);
        if (start >= work->size) return;
        int64_t n = work->size - start < CHUNK ? work->size - start : CHUNK;
        uint32_t flags = run_chunk(work->data + start, n, start, work);
        if (flags) __atomic_fetch_or(&work->flags, flags, __ATOMIC_RELAXED);
    }
}

/* `parallel` is GOMP_parallel of the OpenMP library that torch uses (or NULL): one thread pool, not two. */
int convolve_round(float *data, int64_t size, int kind, int clamped, uint64_t key, int threads, parallel_fn parallel) {
    job work = {data, size, 0, (uint32_t)key, (uint32_t)(key >> 32), clamped != 0, 0, kind};
    if (parallel && threads > 1 && size > 2 * CHUNK)
        parallel(run_chunks, &work, (unsigned)threads, 0);
    else
        run_chunks(&work);
    return (int)work.flags;
}
