/* The memory of conv_pool.c: the sizes that follow from a shape, what is laid out in the scratch memory, and the way of
 * images into it and back.
 *
 * Scratch memory holds packed weights, the sums of all groups of images, and a bench for each thread.
 */
#include "simd.h"

#define BLOCK (LANES == 16 ? 6 : 3) /* vectors of channels whose sums fit the registers */
#define IMAGE_BYTES 24576           /* images whose lists are used together */
#define LEAST 8                     /* images of a group, at least */
#define GROUPS 32                   /* groups, at most */
#define CLOSED 4                    /* the pixel of a window that let nothing through; others are 0 to 3 */
#define LINE 64                     /* bytes of a line of the cache, where each piece of memory begins */

typedef vector window[4][BLOCK];

/* Images, their size and channels; output channels; the kernel; zeros above and on the left; windows of the pool. */
typedef struct {
    int64_t n, h, w, ci, co, kh, kw, top, left, ph, pw;
} shape;

/* A gradient, and where what it is multiplied with begins. */
typedef struct {
    int32_t at;
    float g;
} item;

typedef struct {
    const shape *s;
    const float *x, *w, *bias, *g;
    float *y, *dx, *dw, *db, *packed, *sums;
    int8_t *where;
    char *benches;
    crew crew;
} job;

/* What a thread works with: images among zeros, sums of windows, and the lists by channel and by pixel. */
typedef struct {
    float *images;
    window *windows;
    item *by_channel, *by_pixel;
    int32_t *counts, *pixels, *ends;
} bench;

INLINE int64_t row_of(const shape *s) { return (s->w + 2 * s->left) * s->ci; }
INLINE int64_t size_of(const shape *s) { return (s->h + 2 * s->top) * row_of(s); }
INLINE int64_t windows_of(const shape *s) { return s->ph * s->pw; }
INLINE int64_t lanes_of(const shape *s) { return over(s->co, LANES) * LANES; }
INLINE int64_t line_of(const shape *s) { return over(s->kw * s->ci, LANES) * LANES; } /* a kernel row, padded */
INLINE int64_t kernel_of(const shape *s) { return s->kh * s->kw * s->ci; }
INLINE int64_t group_of(const shape *s) { return most(LEAST, over(s->n, GROUPS)); }
INLINE int64_t some_of(const shape *s) { return most(1, least(group_of(s), IMAGE_BYTES / (4 * size_of(s)))); }

/* The next bytes of what is left. */
INLINE void *carve(char **rest, int64_t bytes) {
    char *p = *rest;
    *rest += over(bytes, LINE) * LINE;
    return p;
}

/* Lay a thread's bench out at `start`; returns its bytes. */
static int64_t furnish(const shape *s, char *start, bench *own) {
    int64_t some = some_of(s), cells = some * windows_of(s);
    char *rest = start;
    own->images = carve(&rest, 4 * (some * size_of(s) + LANES));
    own->windows = carve(&rest, (int64_t)sizeof(window) * windows_of(s));
    own->by_channel = carve(&rest, (int64_t)sizeof(item) * cells * s->co);
    own->by_pixel = carve(&rest, (int64_t)sizeof(item) * cells * s->co);
    own->counts = carve(&rest, 4 * s->co);
    own->pixels = carve(&rest, 4 * 4 * cells);
    own->ends = carve(&rest, 4 * 4 * cells);
    return rest - start;
}

/* Floats for packed weights, and for the sums of one group: weights, with padded rows, then biases. */
static int64_t packed_size(const shape *s) {
    return most(lanes_of(s) * (kernel_of(s) + 1), s->kh * s->co * line_of(s));
}
static int64_t sums_size(const shape *s) { return (s->kh * line_of(s) + 1) * s->co; }

/* Lay out at `start` what all threads share, with the benches behind it; returns its bytes. */
static int64_t settle_in(job *work, char *start) {
    const shape *s = work->s;
    char *rest = start;
    work->packed = carve(&rest, 4 * packed_size(s));
    work->sums = carve(&rest, 4 * over(s->n, group_of(s)) * sums_size(s));
    work->benches = rest;
    return rest - start;
}

/* Scratch memory for either pass, in bytes. */
int64_t convolve_conv_pool_scratch(const shape *s, int threads) {
    job work = {.s = s};
    bench own;
    return settle_in(&work, NULL) + threads * furnish(s, NULL, &own);
}

INLINE int has_edge(const shape *s) { return s->top || s->left; }

/* Images into the middle of zeros. */
static void copy_in(const shape *s, int64_t images, const float *x, float *to) {
    int64_t row = row_of(s), inner = s->w * s->ci, left = s->left * s->ci;
    if (!has_edge(s)) {
        memcpy(to, x, 4 * images * size_of(s));
        return;
    }
    memset(to, 0, 4 * images * size_of(s));
    for (; images--; to += size_of(s))
        for (int64_t i = s->top; i < s->top + s->h; i++, x += inner) memcpy(to + i * row + left, x, 4 * inner);
}

/* And back. */
static void copy_out(const shape *s, int64_t images, const float *from, float *x) {
    int64_t row = row_of(s), inner = s->w * s->ci, left = s->left * s->ci;
    if (!has_edge(s)) {
        memcpy(x, from, 4 * images * size_of(s));
        return;
    }
    for (; images--; from += size_of(s))
        for (int64_t i = s->top; i < s->top + s->h; i++, x += inner) memcpy(x, from + i * row + left, 4 * inner);
}

/* Where the four pixels of each window begin, for some images; those beyond the edge are the ones before it. */
static void find_pixels(const shape *s, int64_t images, int32_t *at) {
    int64_t row = row_of(s), lowest = s->h + 2 * s->top - s->kh, rightmost = s->w + 2 * s->left - s->kw;
    for (int64_t n = 0; n < images; n++)
        for (int64_t i = 0; i < 2 * s->ph; i += 2)
            for (int64_t j = 0; j < 2 * s->pw; j += 2, at += 4)
                for (int p = 0; p < 4; p++) {
                    int64_t line = least(i + p / 2, lowest), column = least(j + p % 2, rightmost);
                    at[p] = (int32_t)(n * size_of(s) + line * row + column * s->ci);
                }
}

/* A bench for the calling thread. */
static void sit_down(job *work, bench *own) {
    int64_t seat = take(&work->crew.seats), each = furnish(work->s, work->benches, own);
    furnish(work->s, work->benches + seat * each, own);
    find_pixels(work->s, work->g ? some_of(work->s) : 1, own->pixels);
}
