/* What all kernels stand on: vectors as wide as the CPU has them, and torch's threads to share the work. */
#include <stdint.h>
#include <string.h>

#if defined(LANES) /* those of another machine, for a test */
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) ((vector) * (const loose *)(p))
#define STORE(p, v) (*(loose *)(p) = (v))

/* Floats in a register, floats anywhere in memory, and what comparing floats gives: all or no bits of each lane. */
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));

INLINE vector keep(mask m, vector a) { return (vector)((mask)a & m); }
INLINE vector choose(mask m, vector a, vector b) { return (vector)(((mask)a & m) | ((mask)b & ~m)); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; } /* rounded up */

/* GOMP_parallel of torch's own OpenMP library: a pass, its job, the number of threads, flags. */
typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

/* The threads of a job, and two counters that they take numbers from: of the next piece of work, and of a seat each. */
typedef struct {
    int threads;
    parallel_fn parallel; /* NULL: the calling thread works alone */
    int64_t next, seats;
} crew;

INLINE int64_t take(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* All threads run one pass of a job, and are through with it when this returns. */
INLINE void share(crew *all, void (*pass)(void *), void *job) {
    all->next = all->seats = 0;
    if (all->parallel && all->threads > 1)
        all->parallel(pass, job, (unsigned)all->threads, 0);
    else
        pass(job);
}

/* For how many floats at once a file was compiled. */
int convolve_lanes(void) { return LANES; }
