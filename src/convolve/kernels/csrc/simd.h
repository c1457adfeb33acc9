/* Shared by all kernels: SIMD vectors as wide as the CPU supports, and work distribution over torch's threads. */
#include <stdint.h>
#include <string.h>

#if defined(LANES) /* set by a test, to compile for another CPU */
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) ((vector) * (const unaligned *)(p))
#define STORE(p, v) (*(unaligned *)(p) = (v))

/* Floats in a register, floats at any address, and the result of a comparison: all or no bits of each lane. */
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t bitmask __attribute__((vector_size(4 * LANES)));

INLINE vector mask(bitmask m, vector a) { return (vector)((bitmask)a & m); }
INLINE vector blend(bitmask m, vector a, vector b) { return (vector)(((bitmask)a & m) | ((bitmask)b & ~m)); }

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; } /* rounded up */

/* GOMP_parallel of the OpenMP library that torch uses: function, its argument, number of threads, flags. */
typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

/* The threads of a job, and two shared counters: the next piece of work, and the next free workspace slot. */
typedef struct {
    int threads;
    parallel_fn parallel; /* NULL: run on the calling thread only */
    int64_t next, next_slot;
} omp_team;

INLINE int64_t fetch_add(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* Run one pass of a job on all threads; returns after all of them have finished. */
INLINE void run_on_team(omp_team *team, void (*pass)(void *), void *job) {
    team->next = team->next_slot = 0;
    if (team->parallel && team->threads > 1)
        team->parallel(pass, job, (unsigned)team->threads, 0);
    else
        pass(job);
}

/* Floats per vector in this build. */
int convolve_lanes(void) { return LANES; }
