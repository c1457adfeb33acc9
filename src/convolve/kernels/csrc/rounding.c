/* Rounding of float32 arrays, in place, onto the grid of fp16 or bf16; values stay float32.
 *
 * The arithmetic of one element is in rounding.h.
 *
 * The random bits of element i are a hash of (a, b, i), so they do not depend on the number of threads.
 *
 * Returned flags: 1 a finite value left the range (or an infinity was clamped), 2 a NaN occurred, 4 an infinity
 * occurred.
 */
#include "rounding.h"

#define CHUNK 32768

enum { NEAREST_FP16, NEAREST_BF16, STOCHASTIC_FP16, STOCHASTIC_BF16, LOOK };

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    float *data;
    int64_t size, next;
    uint32_t a, b, clamped, flags;
    int kind;
} job;

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
    case NEAREST_FP16: ROUND_LOOP(nearest_fp16(m), LARGEST_FP16) break;
    case NEAREST_BF16: ROUND_LOOP(nearest_bf16(m), LARGEST_BF16) break;
    case STOCHASTIC_FP16: ROUND_LOOP(stochastic_fp16(m, hash(first + (uint32_t)i, a, b)), LARGEST_FP16) break;
    case STOCHASTIC_BF16: ROUND_LOOP(stochastic_bf16(m, hash(first + (uint32_t)i, a, b)), LARGEST_BF16) break;
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
