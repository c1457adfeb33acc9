/* Convolutions with one filter for each channel, and their gradients; float32, channels last.
 *
 * The arithmetic in one channel, for filters of k x k, a stride s of 1 or 2 and e = k / 2 zeros around the image x:
 *
 *     y[i][j] = sum of w[p][q] x[s i + p - e][s j + q - e]                       over p, q
 *     dw[p][q] = sum of g[i][j] x[s i + p - e][s j + q - e]                      over all images and i, j
 *     dx[a][b] = sum of w[p][q] g[i][j]     over all that have s i + p - e = a and s j + q - e = b
 *
 * With stride 1, dx is the convolution of g with the filter turned by half a circle; with stride 2, each g is handed
 * out to the pixels that it came from.
 *
 * An image has few operations for each of its values, so what counts is how often memory is walked over. Of some
 * channels, so many as fill a line of the cache, the pixels of an image are copied to where they lie side by side among
 * zeros; all sums are made there.
 *
 * Results do not depend on the number of threads: sums for dw are made for groups of images that follow from the size
 * of the batch, then added up group by group. An image has the same y and dx in any batch.
 *
 * Channel counts are multiples of LANES, filters 3x3 or 5x5.
 */
#include "simd.h"

#define PIXEL (2 * LANES) /* floats of a pixel in a copy: two vectors, of which the last channels may use one */
#define MOST_TAPS 25
#define GROUPS 8  /* of images, at most */
#define COLUMNS 3 /* of a result that are made together */

/* Images, their size and channels; the filter's side, the stride; size of the result. */
typedef struct {
    int64_t n, h, w, c, k, stride, oh, ow;
} shape;

typedef struct {
    crew all;
    const shape *s;
    const float *x, *w, *g;
    float *y, *dx, *dw, *sums, *benches;
} job;

/* What a thread works with: copies of an image, of a gradient, and the image's gradient. */
typedef struct {
    float *image, *gradient, *spread;
} bench;

INLINE int64_t edge_of(const shape *s) { return s->k / 2; }
INLINE int64_t edge_of_gradient(const shape *s) { return s->stride == 1 ? edge_of(s) : 0; }
INLINE int64_t copy_size(int64_t h, int64_t w, int64_t edge) { return (h + 2 * edge) * (w + 2 * edge) * PIXEL; }
INLINE int64_t image_size(const shape *s) { return copy_size(s->h, s->w, edge_of(s)); }
INLINE int64_t gradient_size(const shape *s) { return copy_size(s->oh, s->ow, edge_of_gradient(s)); }
INLINE int64_t bench_size(const shape *s) { return 2 * image_size(s) + gradient_size(s); }
INLINE int64_t groups_of(const shape *s) { return least(GROUPS, s->n); }
INLINE int64_t blocks_of(const shape *s) { return over(s->c, PIXEL); }

/* Calls an inlined function with constants for the filter's side, the stride, and the vectors of a pixel. */
#define WITH_VECTORS(k, stride, vectors, call, ...)  \
    if (vectors == 2) call(k, stride, 2, __VA_ARGS__); \
    else call(k, stride, 1, __VA_ARGS__);
#define WITH_CONSTANTS(s, vectors, call, ...)                                              \
    if (s->k == 3 && s->stride == 1) { WITH_VECTORS(3, 1, vectors, call, __VA_ARGS__) }      \
    else if (s->k == 3) { WITH_VECTORS(3, 2, vectors, call, __VA_ARGS__) }                   \
    else if (s->stride == 1) { WITH_VECTORS(5, 1, vectors, call, __VA_ARGS__) }              \
    else { WITH_VECTORS(5, 2, vectors, call, __VA_ARGS__) }

/* ---- copies ---------------------------------------------------------------------------------------------------- */

/* A seat for this thread; copies of what is given begin as zeros, and their edges stay so. */
static bench sit_down(job *work) {
    const shape *s = work->s;
    float *start = work->benches + take(&work->all.seats) * bench_size(s);
    memset(start, 0, 4 * (image_size(s) + gradient_size(s)));
    return (bench){start, start + image_size(s), start + image_size(s) + gradient_size(s)};
}

/* Some channels of an image, into the middle of a copy. */
INLINE void copy_in(const int vectors, const float *x, int64_t h, int64_t w, int64_t c, int64_t edge, float *to) {
    to += (edge * (w + 2 * edge) + edge) * PIXEL;
    for (int64_t i = 0; i < h; i++, to += 2 * edge * PIXEL)
        for (int64_t j = 0; j < w; j++, to += PIXEL, x += c)
            for (int v = 0; v < vectors; v++) STORE(to + v * LANES, LOAD(x + v * LANES));
}

/* And back. */
INLINE void copy_out(const int vectors, const float *from, int64_t h, int64_t w, int64_t c, int64_t edge, float *x) {
    from += (edge * (w + 2 * edge) + edge) * PIXEL;
    for (int64_t i = 0; i < h; i++, from += 2 * edge * PIXEL)
        for (int64_t j = 0; j < w; j++, from += PIXEL, x += c)
            for (int v = 0; v < vectors; v++) STORE(x + v * LANES, LOAD(from + v * LANES));
}

/* The filters of some channels side by side, or turned by half a circle. */
static void pack(const shape *s, const float *w, int turned, int vectors, float *to) {
    int64_t taps = s->k * s->k;
    for (int64_t i = 0; i < taps; i++)
        memcpy(to + (turned ? taps - 1 - i : i) * PIXEL, w + i * s->c, 4 * vectors * LANES);
}

/* ---- sums ------------------------------------------------------------------------------------------------------ */

/* Some columns of a row of results; `from` is the first pixel that they see, in a copy with lines of `line` floats. */
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

/* A convolution of a copy with packed filters. */
INLINE void convolve(const int k, const int stride, const int vectors, const float *from, int64_t line, int64_t h,
                     int64_t w, int64_t c, const float *packed, float *to) {
    for (int64_t i = 0; i < h; i++, from += stride * line, to += w * c) {
        int64_t j = 0;
        for (; j + COLUMNS <= w; j += COLUMNS)
            add_taps(k, stride, vectors, COLUMNS, from + j * stride * PIXEL, line, packed, c, to + j * c);
        for (; j < w; j++) add_taps(k, stride, vectors, 1, from + j * stride * PIXEL, line, packed, c, to + j * c);
    }
}

/* The sums of dw over one image: row by row of the result, and of the filter. */
INLINE void add_filters(const int k, const int stride, const int vectors, const shape *s, const bench *own,
                        float *sums) {
    int64_t line = (s->w + 2 * edge_of(s)) * PIXEL, edge = edge_of_gradient(s), width = s->ow + 2 * edge;
    for (int64_t i = 0; i < s->oh; i++)
        for (int p = 0; p < k; p++) {
            const float *x = own->image + (i * stride + p) * line;
            const float *g = own->gradient + ((i + edge) * width + edge) * PIXEL;
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

/* A gradient, handed out to the pixels of a copy of zeros. */
INLINE void hand_out(const int k, const int stride, const int vectors, const shape *s, const bench *own,
                     const float *packed) {
    int64_t line = (s->w + 2 * edge_of(s)) * PIXEL;
    for (int64_t i = 0; i < s->oh; i++)
        for (int p = 0; p < k; p++) {
            float *to = own->spread + (i * stride + p) * line;
            const float *g = own->gradient + i * s->ow * PIXEL, *w = packed + p * k * PIXEL;
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

INLINE void convolve_image(const int k, const int stride, const int vectors, const job *work, const bench *own,
                           int64_t image, int64_t first) {
    const shape *s = work->s;
    float packed[MOST_TAPS * PIXEL];
    pack(s, work->w + first, 0, vectors, packed);
    copy_in(vectors, work->x + image * s->h * s->w * s->c + first, s->h, s->w, s->c, edge_of(s), own->image);
    convolve(k, stride, vectors, own->image, (s->w + 2 * edge_of(s)) * PIXEL, s->oh, s->ow, s->c, packed,
             work->y + image * s->oh * s->ow * s->c + first);
}

static void run_forward(void *given) {
    job *work = given;
    const shape *s = work->s;
    bench own = sit_down(work);
    int64_t blocks = blocks_of(s);
    for (int64_t i; (i = take(&work->all.next)) < s->n * blocks;) {
        int64_t first = i % blocks * PIXEL, vectors = s->c - first >= PIXEL ? 2 : 1;
        WITH_CONSTANTS(s, vectors, convolve_image, work, &own, i / blocks, first)
    }
}

INLINE void differentiate_image(const int k, const int stride, const int vectors, const job *work, const bench *own,
                                int64_t image, int64_t first, const float *packed, float *sums) {
    const shape *s = work->s;
    int64_t edge = edge_of_gradient(s), size = s->h * s->w * s->c;
    copy_in(vectors, work->x + image * size + first, s->h, s->w, s->c, edge_of(s), own->image);
    copy_in(vectors, work->g + image * s->oh * s->ow * s->c + first, s->oh, s->ow, s->c, edge, own->gradient);
    add_filters(k, stride, vectors, s, own, sums);
    if (!work->dx) return;
    float *dx = work->dx + image * size + first;
    if (stride == 1) {
        convolve(k, 1, vectors, own->gradient, (s->ow + 2 * edge) * PIXEL, s->h, s->w, s->c, packed, dx);
    } else {
        memset(own->spread, 0, 4 * image_size(s));
        hand_out(k, stride, vectors, s, own, packed);
        copy_out(vectors, own->spread, s->h, s->w, s->c, edge_of(s), dx);
    }
}

/* One group of images, some channels. */
static void differentiate(const job *work, const bench *own, int64_t group, int64_t first) {
    const shape *s = work->s;
    int64_t taps = s->k * s->k, vectors = s->c - first >= PIXEL ? 2 : 1;
    int64_t begin = s->n * group / groups_of(s), end = s->n * (group + 1) / groups_of(s);
    float packed[MOST_TAPS * PIXEL], sums[MOST_TAPS * PIXEL];
    pack(s, work->w + first, s->stride == 1, (int)vectors, packed);
    memset(sums, 0, sizeof sums);
    for (int64_t image = begin; image < end; image++) {
        WITH_CONSTANTS(s, vectors, differentiate_image, work, own, image, first, packed, sums)
    }
    for (int64_t i = 0; i < taps; i++)
        memcpy(work->sums + (group * taps + i) * s->c + first, sums + i * PIXEL, 4 * vectors * LANES);
}

static void run_backward(void *given) {
    job *work = given;
    bench own = sit_down(work);
    int64_t blocks = blocks_of(work->s);
    for (int64_t i; (i = take(&work->all.next)) < groups_of(work->s) * blocks;)
        differentiate(work, &own, i / blocks, i % blocks * PIXEL);
}

/* Bytes of scratch for either pass: the sums of all groups, and a bench for each thread. */
int64_t convolve_depthwise_scratch(const shape *s, int threads) {
    return 4 * (groups_of(s) * s->k * s->k * s->c + threads * bench_size(s));
}

static job set_up(const shape *s, float *scratch, int threads, parallel_fn parallel) {
    float *benches = scratch + groups_of(s) * s->k * s->k * s->c;
    return (job){.all = {.threads = threads, .parallel = parallel}, .s = s, .sums = scratch, .benches = benches};
}

/* y from x and the filters w, [k][k][c]. */
int convolve_depthwise_forward(const shape *s, const float *x, const float *w, float *y, float *scratch, int threads,
                               parallel_fn parallel) {
    job work = set_up(s, scratch, threads, parallel);
    work.x = x, work.w = w, work.y = y;
    share(&work.all, run_forward, &work);
    return 0;
}

/* dw, as [k][k][c], and dx if it is asked for, from x, w and the gradient g of y. */
int convolve_depthwise_backward(const shape *s, const float *x, const float *w, const float *g, float *dx, float *dw,
                                float *scratch, int threads, parallel_fn parallel) {
    job work = set_up(s, scratch, threads, parallel);
    int64_t size = s->k * s->k * s->c;
    work.x = x, work.w = w, work.g = g, work.dx = dx;
    share(&work.all, run_backward, &work);
    memcpy(dw, work.sums, 4 * size);
    for (int64_t group = 1; group < groups_of(s); group++)
        for (int64_t i = 0; i < size; i++) dw[i] += work.sums[group * size + i];
    return 0;
}
