/* Convolutions with one filter for each channel, and their gradients; float32, channels last.
 *
 * The arithmetic in one channel, for filters of k x k, a stride s of 1 or 2 and e = k / 2 zeros around the image x:
 *
 *     y[i][j] = sum of w[p][q] x[s i + p - e][s j + q - e]                       over p, q
 *     dw[p][q] = sum of g[i][j] x[s i + p - e][s j + q - e]                      over all images and i, j
 *     dx[a][b] = sum of w[p][q] g[i][j]     over all that have s i + p - e = a and s j + q - e = b
 *
 * TensorFlow's padding has e - 1 zeros above or on the left if the stride is 2 and the side is even; e is e - 1 there.
 *
 * With stride 1, dx is the convolution of g with the filter rotated by 180 degrees; with stride 2, each g is scattered
 * to the pixels that it came from.
 *
 * Each value takes few operations, so memory traffic dominates. The pixels of as many channels as fill a cache line are
 * copied into contiguous zero-padded memory, and all sums are computed there.
 *
 * Results do not depend on the number of threads: dw is summed over groups of images whose number depends on the batch
 * size only, then group by group. An image has the same y and dx in any batch.
 *
 * Channel counts are multiples of LANES, filters 3x3 or 5x5.
 */
#include "simd.h"

#define PIXEL (2 * LANES) /* floats of a pixel in a copy: two vectors; the last channels may use one of them */
#define MAX_TAPS 25
#define GROUPS 8  /* of images, maximum */
#define COLUMNS 3 /* of a result that are computed together */

/* Images, height, width, channels; filter size, stride; output height, width; zeros that are missing above and on the
 * left, 0 or 1. */
typedef struct {
    int64_t n, h, w, c, k, stride, oh, ow, above, left;
} shape;

typedef struct {
    omp_team team;
    const shape *s;
    const float *x, *w, *g;
    float *y, *dx, *dw, *sums, *workspaces;
} job;

/* Workspace of a thread: padded copies of an image, of a gradient, and of the image's gradient. */
typedef struct {
    float *image, *gradient, *spread;
} workspace;

INLINE int64_t edge_of(const shape *s) { return s->k / 2; }
INLINE int64_t edge_of_gradient(const shape *s) { return s->stride == 1 ? edge_of(s) : 0; }
INLINE int64_t copy_size(int64_t h, int64_t w, int64_t edge) { return (h + 2 * edge) * (w + 2 * edge) * PIXEL; }
INLINE int64_t image_size(const shape *s) { return copy_size(s->h, s->w, edge_of(s)); }
INLINE int64_t line_of(const shape *s) { return (s->w + 2 * edge_of(s)) * PIXEL; }
INLINE int64_t first_of(const shape *s) { return s->above * line_of(s) + s->left * PIXEL; } /* of the first filter */
INLINE int64_t gradient_size(const shape *s) { return copy_size(s->oh, s->ow, edge_of_gradient(s)); }
INLINE int64_t workspace_size(const shape *s) { return 2 * image_size(s) + gradient_size(s); }
INLINE int64_t groups_of(const shape *s) { return min(GROUPS, s->n); }
INLINE int64_t blocks_of(const shape *s) { return ceil_div(s->c, PIXEL); }

/* Call an inlined function with constants for the filter size, the stride, and the vectors of a pixel. */
#define WITH_VECTORS(k, stride, vectors, call, ...)  \
    if (vectors == 2) call(k, stride, 2, __VA_ARGS__); \
    else call(k, stride, 1, __VA_ARGS__);
#define WITH_CONSTANTS(s, vectors, call, ...)                                              \
    if (s->k == 3 && s->stride == 1) { WITH_VECTORS(3, 1, vectors, call, __VA_ARGS__) }      \
    else if (s->k == 3) { WITH_VECTORS(3, 2, vectors, call, __VA_ARGS__) }                   \
    else if (s->stride == 1) { WITH_VECTORS(5, 1, vectors, call, __VA_ARGS__) }              \
    else { WITH_VECTORS(5, 2, vectors, call, __VA_ARGS__) }

/* ---- copies ---------------------------------------------------------------------------------------------------- */

/* Assign a workspace to the calling thread. Copies start as zeros, and their padding stays zero. */
static workspace acquire_workspace(job *work) {
    const shape *s = work->s;
    float *start = work->workspaces + fetch_add(&work->team.next_slot) * workspace_size(s);
    memset(start, 0, 4 * (image_size(s) + gradient_size(s)));
    return (workspace){start, start + image_size(s), start + image_size(s) + gradient_size(s)};
}

/* Copy some channels of an image into padded memory. */
INLINE void copy_in(const int vectors, const float *x, int64_t h, int64_t w, int64_t c, int64_t edge, float *to) {
    to += (edge * (w + 2 * edge) + edge) * PIXEL;
    for (int64_t i = 0; i < h; i++, to += 2 * edge * PIXEL)
        for (int64_t j = 0; j < w; j++, to += PIXEL, x += c)
            for (int v = 0; v < vectors; v++) STORE(to + v * LANES, LOAD(x + v * LANES));
}

/* Copy them back. */
INLINE void copy_out(const int vectors, const float *from, int64_t h, int64_t w, int64_t c, int64_t edge, float *x) {
    from += (edge * (w + 2 * edge) + edge) * PIXEL;
    for (int64_t i = 0; i < h; i++, from += 2 * edge * PIXEL)
        for (int64_t j = 0; j < w; j++, from += PIXEL, x += c)
            for (int v = 0; v < vectors; v++) STORE(x + v * LANES, LOAD(from + v * LANES));
}

/* Copy the filters of some channels, optionally rotated by 180 degrees. */
static void pack(const shape *s, const float *w, int turned, int vectors, float *to) {
    int64_t taps = s->k * s->k;
    for (int64_t i = 0; i < taps; i++)
        memcpy(to + (turned ? taps - 1 - i : i) * PIXEL, w + i * s->c, 4 * vectors * LANES);
}

/* ---- sums ------------------------------------------------------------------------------------------------------ */

/* Compute some columns of an output row; `from` is the first input pixel, in a copy with rows of `line` floats. */
INLINE void add_taps(const int k, const int stride, const int vectors, const int columns, const float *from,
                     int64_t line, const float *w, int64_t c, float *to) {
    vector sum[COLUMNS][2] = {0};
    for (int p = 0; p < k; p++, from += line)
        for (int q = 0; q < k; q++, w += PIXEL)
            for (int v = 0; v < vectors; v++) {
                vector tap = LOAD(w + v * LANES);
                for (int i = 0; i < columns; i++) sum[i][v] += tap * LOAD(from + (i * stride + q) * PIXEL + v * LANES);
            }
    for (int i = 0; i < columns; i++)
        for (int v = 0; v < vectors; v++) STORE(to + i * c + v * LANES, sum[i][v]);
}

/* Convolve a copy with packed filters. */
INLINE void convolve(const int k, const int stride, const int vectors, const float *from, int64_t line, int64_t h,
                     int64_t w, int64_t c, const float *packed, float *to) {
    for (int64_t i = 0; i < h; i++, from += stride * line, to += w * c) {
        int64_t j = 0;
        for (; j + COLUMNS <= w; j += COLUMNS)
            add_taps(k, stride, vectors, COLUMNS, from + j * stride * PIXEL, line, packed, c, to + j * c);
        for (; j < w; j++) add_taps(k, stride, vectors, 1, from + j * stride * PIXEL, line, packed, c, to + j * c);
    }
}

/* Add one image to the sums of dw, by output row and filter row. */
INLINE void add_filters(const int k, const int stride, const int vectors, const shape *s, const workspace *ws,
                        float *sums) {
    int64_t line = line_of(s), edge = edge_of_gradient(s), width = s->ow + 2 * edge;
    for (int64_t i = 0; i < s->oh; i++)
        for (int p = 0; p < k; p++) {
            const float *x = ws->image + first_of(s) + (i * stride + p) * line;
            const float *g = ws->gradient + ((i + edge) * width + edge) * PIXEL;
            float *to = sums + p * k * PIXEL;
            vector sum[5][2];
            for (int q = 0; q < k; q++)
                for (int v = 0; v < vectors; v++) sum[q][v] = LOAD(to + q * PIXEL + v * LANES);
            for (int64_t j = 0; j < s->ow; j++, g += PIXEL, x += stride * PIXEL)
                for (int v = 0; v < vectors; v++) {
                    vector one = LOAD(g + v * LANES);
                    for (int q = 0; q < k; q++) sum[q][v] += one * LOAD(x + q * PIXEL + v * LANES);
                }
            for (int q = 0; q < k; q++)
                for (int v = 0; v < vectors; v++) STORE(to + q * PIXEL + v * LANES, sum[q][v]);
        }
}

/* Scatter a gradient to the pixels of a zeroed copy. */
INLINE void hand_out(const int k, const int stride, const int vectors, const shape *s, const workspace *ws,
                     const float *packed) {
    int64_t line = line_of(s);
    for (int64_t i = 0; i < s->oh; i++)
        for (int p = 0; p < k; p++) {
            float *to = ws->spread + first_of(s) + (i * stride + p) * line;
            const float *g = ws->gradient + i * s->ow * PIXEL, *w = packed + p * k * PIXEL;
            for (int64_t j = 0; j < s->ow; j++, g += PIXEL, to += stride * PIXEL)
                for (int v = 0; v < vectors; v++) {
                    vector one = LOAD(g + v * LANES);
                    for (int q = 0; q < k; q++) {
                        float *at = to + q * PIXEL + v * LANES;
                        STORE(at, LOAD(at) + one * LOAD(w + q * PIXEL + v * LANES));
                    }
                }
        }
}

/* ---- passes ---------------------------------------------------------------------------------------------------- */

INLINE void convolve_image(const int k, const int stride, const int vectors, const job *work, const workspace *ws,
                           int64_t image, int64_t first) {
    const shape *s = work->s;
    float packed[MAX_TAPS * PIXEL];
    pack(s, work->w + first, 0, vectors, packed);
    copy_in(vectors, work->x + image * s->h * s->w * s->c + first, s->h, s->w, s->c, edge_of(s), ws->image);
    convolve(k, stride, vectors, ws->image + first_of(s), line_of(s), s->oh, s->ow, s->c, packed,
             work->y + image * s->oh * s->ow * s->c + first);
}

static void run_forward(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    workspace ws = acquire_workspace(work);
    int64_t blocks = blocks_of(s);
    for (int64_t i; (i = fetch_add(&work->team.next)) < s->n * blocks;) {
        int64_t first = i % blocks * PIXEL, vectors = s->c - first >= PIXEL ? 2 : 1;
        WITH_CONSTANTS(s, vectors, convolve_image, work, &ws, i / blocks, first)
    }
}

INLINE void differentiate_image(const int k, const int stride, const int vectors, const job *work, const workspace *ws,
                                int64_t image, int64_t first, const float *packed, float *sums) {
    const shape *s = work->s;
    int64_t edge = edge_of_gradient(s), size = s->h * s->w * s->c;
    copy_in(vectors, work->x + image * size + first, s->h, s->w, s->c, edge_of(s), ws->image);
    copy_in(vectors, work->g + image * s->oh * s->ow * s->c + first, s->oh, s->ow, s->c, edge, ws->gradient);
    add_filters(k, stride, vectors, s, ws, sums);
    if (!work->dx) return;
    float *dx = work->dx + image * size + first;
    if (stride == 1) {
        convolve(k, 1, vectors, ws->gradient, (s->ow + 2 * edge) * PIXEL, s->h, s->w, s->c, packed, dx);
    } else {
        memset(ws->spread, 0, 4 * image_size(s));
        hand_out(k, stride, vectors, s, ws, packed);
        copy_out(vectors, ws->spread, s->h, s->w, s->c, edge_of(s), dx);
    }
}

/* Gradients of one group of images, some channels. */
static void differentiate(const job *work, const workspace *ws, int64_t group, int64_t first) {
    const shape *s = work->s;
    int64_t taps = s->k * s->k, vectors = s->c - first >= PIXEL ? 2 : 1;
    int64_t begin = s->n * group / groups_of(s), end = s->n * (group + 1) / groups_of(s);
    float packed[MAX_TAPS * PIXEL], sums[MAX_TAPS * PIXEL];
    pack(s, work->w + first, s->stride == 1, (int)vectors, packed);
    memset(sums, 0, sizeof sums);
    for (int64_t image = begin; image < end; image++) {
        WITH_CONSTANTS(s, vectors, differentiate_image, work, ws, image, first, packed, sums)
    }
    for (int64_t i = 0; i < taps; i++)
        memcpy(work->sums + (group * taps + i) * s->c + first, sums + i * PIXEL, 4 * vectors * LANES);
}

static void run_backward(void *argument) {
    job *work = argument;
    workspace ws = acquire_workspace(work);
    int64_t blocks = blocks_of(work->s);
    for (int64_t i; (i = fetch_add(&work->team.next)) < groups_of(work->s) * blocks;)
        differentiate(work, &ws, i / blocks, i % blocks * PIXEL);
}

/* Bytes of scratch for either pass: the sums of all groups, and a workspace for each thread. */
int64_t convolve_depthwise_scratch(const shape *s, int threads) {
    return 4 * (groups_of(s) * s->k * s->k * s->c + threads * workspace_size(s));
}

static job set_up(const shape *s, float *scratch, int threads, parallel_fn parallel) {
    float *workspaces = scratch + groups_of(s) * s->k * s->k * s->c;
    return (job){.team = {.threads = threads, .parallel = parallel}, .s = s, .sums = scratch, .workspaces = workspaces};
}

/* Compute y from x and the filters w, [k][k][c]. */
int convolve_depthwise_forward(const shape *s, const float *x, const float *w, float *y, float *scratch, int threads,
                               parallel_fn parallel) {
    job work = set_up(s, scratch, threads, parallel);
    work.x = x, work.w = w, work.y = y;
    run_on_team(&work.team, run_forward, &work);
    return 0;
}

/* Compute dw, as [k][k][c], and dx unless it is NULL, from x, w and the gradient g of y. */
int convolve_depthwise_backward(const shape *s, const float *x, const float *w, const float *g, float *dx, float *dw,
                                float *scratch, int threads, parallel_fn parallel) {
    job work = set_up(s, scratch, threads, parallel);
    int64_t size = s->k * s->k * s->c;
    work.x = x, work.w = w, work.g = g, work.dx = dx;
    run_on_team(&work.team, run_backward, &work);
    memcpy(dw, work.sums, 4 * size);
    for (int64_t group = 1; group < groups_of(s); group++)
        for (int64_t i = 0; i < size; i++) dw[i] += work.sums[group * size + i];
    return 0;
}
