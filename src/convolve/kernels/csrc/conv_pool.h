/* Memory of conv_pool.c: sizes that follow from a shape, the layout of the scratch memory, and copies of images into it
 * and back.
 *
 * The scratch memory contains packed weights, the sums of all groups of images, and one workspace per thread.
 */
#include "simd.h"

#define BLOCK (LANES == 16 ? 6 : 3) /* vectors of channels whose sums fit the registers */
#define IMAGE_BYTES 24576           /* size of the images whose lists are used together */
#define MIN_GROUP 8                     /* images per group, minimum */
#define GROUPS 32                   /* groups, maximum */
#define CLOSED 4                    /* index for a window that ReLU zeroed; pixels are 0 to 3 */
#define LINE 64                     /* bytes of a cache line, to which every allocation is aligned */

typedef vector window[4][BLOCK];

/* Images, height, width, input channels; output channels; kernel size; padding; output size after the pool. */
typedef struct {
    int64_t n, h, w, ci, co, kh, kw, top, left, ph, pw;
} shape;

/* A gradient, and the offset of the values that it is multiplied with. */
typedef struct {
    int32_t at;
    float g;
} item;

typedef struct {
    const shape *s;
    const float *x, *w, *bias, *g;
    float *y, *dx, *dw, *db, *packed, *sums;
    int8_t *argmax;
    char *workspaces;
    omp_team team;
} job;

/* Workspace of a thread: zero-padded images, sums of windows, and the lists by channel and by pixel. */
typedef struct {
    float *images;
    window *windows;
    item *by_channel, *by_pixel;
    int32_t *counts, *pixels, *ends;
} workspace;

INLINE int64_t row_of(const shape *s) { return (s->w + 2 * s->left) * s->ci; }
INLINE int64_t size_of(const shape *s) { return (s->h + 2 * s->top) * row_of(s); }
INLINE int64_t windows_of(const shape *s) { return s->ph * s->pw; }
INLINE int64_t lanes_of(const shape *s) { return ceil_div(s->co, LANES) * LANES; }
INLINE int64_t line_of(const shape *s) { return ceil_div(s->kw * s->ci, LANES) * LANES; } /* a kernel row, padded */
INLINE int64_t kernel_of(const shape *s) { return s->kh * s->kw * s->ci; }
INLINE int64_t group_of(const shape *s) { return max(MIN_GROUP, ceil_div(s->n, GROUPS)); }
INLINE int64_t some_of(const shape *s) { return max(1, min(group_of(s), IMAGE_BYTES / (4 * size_of(s)))); }

/* Return the next free bytes and advance. */
INLINE void *bump_alloc(char **rest, int64_t bytes) {
    char *p = *rest;
    *rest += ceil_div(bytes, LINE) * LINE;
    return p;
}

/* Lay out one thread's workspace at `start`; returns its size in bytes. */
static int64_t layout_workspace(const shape *s, char *start, workspace *ws) {
    int64_t some = some_of(s), cells = some * windows_of(s);
    char *rest = start;
    ws->images = bump_alloc(&rest, 4 * (some * size_of(s) + LANES));
    ws->windows = bump_alloc(&rest, (int64_t)sizeof(window) * windows_of(s));
    ws->by_channel = bump_alloc(&rest, (int64_t)sizeof(item) * cells * s->co);
    ws->by_pixel = bump_alloc(&rest, (int64_t)sizeof(item) * cells * s->co);
    ws->counts = bump_alloc(&rest, 4 * s->co);
    ws->pixels = bump_alloc(&rest, 4 * 4 * cells);
    ws->ends = bump_alloc(&rest, 4 * 4 * cells);
    return rest - start;
}

/* Floats for packed weights, and for the sums of one group: weights with padded rows, then biases. */
static int64_t packed_size(const shape *s) {
    return max(lanes_of(s) * (kernel_of(s) + 1), s->kh * s->co * line_of(s));
}
static int64_t sums_size(const shape *s) { return (s->kh * line_of(s) + 1) * s->co; }

/* Lay out the shared memory at `start`, followed by the workspaces; returns its size in bytes. */
static int64_t layout_scratch(job *work, char *start) {
    const shape *s = work->s;
    char *rest = start;
    work->packed = bump_alloc(&rest, 4 * packed_size(s));
    work->sums = bump_alloc(&rest, 4 * ceil_div(s->n, group_of(s)) * sums_size(s));
    work->workspaces = rest;
    return rest - start;
}

/* Scratch memory for either pass, in bytes. */
int64_t convolve_conv_pool_scratch(const shape *s, int threads) {
    job work = {.s = s};
    workspace ws;
    return layout_scratch(&work, NULL) + threads * layout_workspace(s, NULL, &ws);
}

INLINE int has_edge(const shape *s) { return s->top || s->left; }

/* Copy images into zero-padded memory. */
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

/* Copy images back, without the padding. */
static void copy_out(const shape *s, int64_t images, const float *from, float *x) {
    int64_t row = row_of(s), inner = s->w * s->ci, left = s->left * s->ci;
    if (!has_edge(s)) {
        memcpy(x, from, 4 * images * size_of(s));
        return;
    }
    for (; images--; from += size_of(s))
        for (int64_t i = s->top; i < s->top + s->h; i++, x += inner) memcpy(x, from + i * row + left, 4 * inner);
}

/* Offsets of the four pixels of each window; a pixel beyond the edge is replaced by the one before it. */
static void find_pixels(const shape *s, int64_t images, int32_t *at) {
    int64_t row = row_of(s), lowest = s->h + 2 * s->top - s->kh, rightmost = s->w + 2 * s->left - s->kw;
    for (int64_t n = 0; n < images; n++)
        for (int64_t i = 0; i < 2 * s->ph; i += 2)
            for (int64_t j = 0; j < 2 * s->pw; j += 2, at += 4)
                for (int p = 0; p < 4; p++) {
                    int64_t line = min(i + p / 2, lowest), column = min(j + p % 2, rightmost);
                    at[p] = (int32_t)(n * size_of(s) + line * row + column * s->ci);
                }
}

/* Assign a workspace to the calling thread. */
static void acquire_workspace(job *work, workspace *ws) {
    int64_t seat = fetch_add(&work->team.next_slot), each = layout_workspace(work->s, work->workspaces, ws);
    layout_workspace(work->s, work->workspaces + seat * each, ws);
    find_pixels(work->s, work->g ? some_of(work->s) : 1, ws->pixels);
}
