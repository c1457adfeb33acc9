/* Batch norm while training, optionally followed by an activation, and its gradients; float32, channels last.
 *
 * The arithmetic, for the n values x of one channel, with weight w and bias b:
 *
 *     mean = sum(x) / n      variance = sum((x - mean)^2) / n      r = 1 / sqrt(variance + epsilon)
 *     y = (x - mean) w r + b,  then the activation
 *
 * and for a gradient g of y, after the activation's backward pass (which recomputes y; nothing is saved):
 *
 *     db = sum(g)      dw = r sum(g (x - mean))      dx = w r (g - db / n - (x - mean) r dw / n)
 *
 * Frozen statistics are given, and constant: dx = w r g, computed in the pass that sums db and dw.
 *
 * Mean and variance are computed in one pass over blocks of m values, from d = x - s with a shift s for each block,
 * and added in double for the first value x0 of the channel, with t = s - x0:
 *
 *     S = sum over blocks of (sum(d) + m t)      Q = sum over blocks of (sum(d^2) + 2 t sum(d) + m t^2)
 *     mean = x0 + S / n      variance = Q / n - (S / n)^2
 *
 * The shift is the mean of the block before; in the first block of a group, that of its first FIRST_LINES lines. It is a
 * mean of m values of the channel (or of a constant fraction of m), so m (s - mean)^2 is at most n variance: what d
 * cancels is bounded for all blocks together by a multiple of n variance, for any values. The same holds in
 * double for x0, with m = 1. So the relative error of the variance is a small multiple of the float rounding, and no
 * single value can increase it.
 *
 * Memory is treated as rows of channels. A line is as many rows as make a whole number of vectors, so each vector of a
 * line has the same channels in all lines. Sums are float over a block of lines, double over the blocks of a group,
 * then over the groups in order. The number of groups depends on the number of rows only, so results do not depend on
 * the number of threads.
 */
#include "activations.h"

#include <math.h>

#define BLOCK_FLOATS 4096 /* of each tensor: a block stays in the L1 cache while its vectors are summed */
#define GROUP_ROWS 64     /* per group, minimum */
#define GROUPS 16         /* maximum */
#define FIRST_LINES 16    /* whose mean is the first shift of a group; a block of the input has no fewer */

/* Rows, channels; rows per line; whole lines. */
typedef struct {
    int64_t rows, c, per_line, lines;
} shape;

/* `center`, `scale` and `shift` contain a whole line, `along` two, `rest` three; `sums` two lines of doubles for each
 * group, `near` a line for each group: the shifts of its blocks. */
typedef struct {
    shape s;
    int activation;
    const float *x, *g;
    float *out, *center, *scale, *shift, *along, *rest, *near;
    double *sums;
    omp_team team;
} job;

INLINE int64_t width_of(const shape *s) { return s->per_line * s->c; }
INLINE int has_rest(const shape *s) { return s->lines * s->per_line < s->rows; }
INLINE int64_t groups_of(const shape *s) { return min(GROUPS, ceil_div(s->rows, GROUP_ROWS)); }

static shape shape_of(int64_t rows, int64_t c) {
    int64_t per_line = 1;
    while (per_line * c % LANES) per_line *= 2;
    return (shape){rows, c, per_line, rows / per_line};
}

/* Use torch's threads if there is enough work for more than one. */
static omp_team team_of(const shape *s, int threads, parallel_fn parallel) {
    return (omp_team){s->rows * s->c > 4 * BLOCK_FLOATS ? threads : 1, parallel};
}

/* Repeat the values of all channels for each row of a line; they may be the line's first row. */
static void tile_channels(const shape *s, const float *values, float *line) {
    for (int64_t i = values == line; i < s->per_line; i++) memcpy(line + i * s->c, values, 4 * s->c);
}

/* ---- sums ------------------------------------------------------------------------------------------------------ */

/* A vector as doubles, and doubles at any address. */
typedef double wide __attribute__((vector_size(8 * LANES)));
typedef double unaligned_wide __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
#define WIDE(v) __builtin_convertvector(v, wide)

INLINE void add_wide(double *sums, wide values) { *(unaligned_wide *)sums += values; }

/* Add d and d^2 of one vector of the input in the lines [first, end), with d = x - shift, to the double sums of its
 * position in the line, and make the mean of these lines the shift. */
INLINE void add_input_vector(const job *work, int64_t first, int64_t end, int64_t v, float *near, double *sums) {
    int64_t width = width_of(&work->s), i = first;
    vector shift = LOAD(near + v), a[2] = {{0}, {0}}, b[2] = {{0}, {0}};
    for (; i + 1 < end; i += 2)
        for (int64_t j = 0; j < 2; j++) {
            vector d = LOAD(work->x + (i + j) * width + v) - shift;
            a[j] += d;
            b[j] += d * d;
        }
    if (i < end) {
        vector d = LOAD(work->x + i * width + v) - shift;
        a[0] += d;
        b[0] += d * d;
    }
    double m = (double)(end - first);
    wide sum = WIDE(a[0]) + WIDE(a[1]), t = WIDE(shift) - WIDE(LOAD(work->center + v));
    add_wide(sums + v, sum + m * t);
    add_wide(sums + width + v, WIDE(b[0]) + WIDE(b[1]) + t * (2 * sum + m * t));
    STORE(near + v, shift + (a[0] + a[1]) * (1 / (float)m));
}

/* Start with the mean of the lines [first, end) as shift. */
INLINE void place_shift(const job *work, int64_t first, int64_t end, float *near) {
    int64_t width = width_of(&work->s);
    for (int64_t v = 0; v < width; v += LANES) {
        vector center = LOAD(work->center + v), sum = {0};
        for (int64_t i = first; i < end; i++) sum += LOAD(work->x + i * width + v) - center;
        STORE(near + v, center + sum * (1 / (float)(end - first)));
    }
}

static void add_input_lines(const job *work, int64_t first, int64_t end, float *near, double *sums) {
    int64_t width = width_of(&work->s), block = max(BLOCK_FLOATS / width + 1, FIRST_LINES);
    if (first < end) place_shift(work, first, min(end, first + FIRST_LINES), near);
    for (; first < end; first += block)
        for (int64_t v = 0; v < width; v += LANES)
            add_input_vector(work, first, min(first + block, end), v, near, sums);
}

/* The summed terms of a gradient: g and g d, with d = x - center. */
INLINE void terms(const int kind, const job *work, int64_t at, int64_t v, vector *a, vector *b) {
    vector d = LOAD(work->x + at) - LOAD(work->center + v);
    vector g = let_through(kind, d * LOAD(work->scale + v) + LOAD(work->shift + v), LOAD(work->g + at));
    *a += g;
    *b += g * d;
}

/* Add one vector of the lines [first, end) to the double sums of its position in the line. */
INLINE void add_vector(const int kind, const job *work, int64_t first, int64_t end, int64_t v, double *sums) {
    int64_t width = width_of(&work->s);
    vector a[2] = {{0}, {0}}, b[2] = {{0}, {0}};
    int64_t i = first;
    for (; i + 1 < end; i += 2) {
        terms(kind, work, i * width + v, v, &a[0], &b[0]);
        terms(kind, work, (i + 1) * width + v, v, &a[1], &b[1]);
    }
    if (i < end) terms(kind, work, i * width + v, v, &a[0], &b[0]);
    add_wide(sums + v, WIDE(a[0]) + WIDE(a[1]));
    add_wide(sums + width + v, WIDE(b[0]) + WIDE(b[1]));
}

INLINE void add_lines(const int kind, const job *work, int64_t first, int64_t end, double *sums) {
    int64_t width = width_of(&work->s), block = BLOCK_FLOATS / width + 1;
    for (; first < end; first += block)
        for (int64_t v = 0; v < width; v += LANES) add_vector(kind, work, first, min(first + block, end), v, sums);
}

/* Copy the rows after the last whole line into a padded line; the padding adds 0 to sums. One thread of a pass calls
 * this, so it may write to `rest`; it does not read the counters of the team, which other threads change. */
static job rest_of(const job *work) {
    int64_t width = width_of(&work->s), done = work->s.lines * width, left = work->s.rows * work->s.c - done;
    float *x = work->rest, *g = x + width, *out = g + width;
    memcpy(x, work->center, 4 * width);
    memset(g, 0, 4 * width);
    memcpy(x, work->x + done, 4 * left);
    if (work->g) memcpy(g, work->g + done, 4 * left);
    return (job){.s = work->s,
                 .activation = work->activation,
                 .x = x,
                 .g = work->g ? g : NULL,
                 .out = out,
                 .center = work->center,
                 .scale = work->scale,
                 .shift = work->shift,
                 .along = work->along};
}

static void add_lines_of(const job *work, int64_t first, int64_t end, float *near, double *sums) {
    if (!work->g) {
        add_input_lines(work, first, end, near, sums);
        return;
    }
    switch (work->activation) {
    case NONE: add_lines(NONE, work, first, end, sums); break;
    case RELU: add_lines(RELU, work, first, end, sums); break;
    case RELU6: add_lines(RELU6, work, first, end, sums); break;
    default: add_lines(SILU, work, first, end, sums);
    }
}

/* The shift of the input's last rows is the center, for which the padding adds 0. */
static void add_rest(const job *work, double *sums) {
    int64_t width = width_of(&work->s);
    job rest = rest_of(work);
    if (work->g) {
        add_lines_of(&rest, 0, 1, NULL, sums);
        return;
    }
    memcpy(rest.out, rest.center, 4 * width);
    for (int64_t v = 0; v < width; v += LANES) add_input_vector(&rest, 0, 1, v, rest.out, sums);
}

static void run_sums(void *argument) {
    job *work = argument;
    const shape *s = &work->s;
    int64_t groups = groups_of(s);
    for (int64_t i; (i = fetch_add(&work->team.next)) < groups;) {
        int64_t first = s->lines * i / groups, end = s->lines * (i + 1) / groups;
        double *sums = work->sums + 2 * i * width_of(s);
        memset(sums, 0, 16 * width_of(s));
        add_lines_of(work, first, end, work->near + i * width_of(s), sums);
        if (i == groups - 1 && has_rest(s)) add_rest(work, sums);
    }
}

/* Sum each channel over all groups and its positions in a line: all first sums, then all second. */
static void add_groups(job *work) {
    int64_t width = width_of(&work->s), c = work->s.c, groups = groups_of(&work->s);
    for (int64_t i = 1; i < groups; i++)
        for (int64_t j = 0; j < 2 * width; j++) work->sums[j] += work->sums[2 * i * width + j];
    for (int64_t i = c; i < width; i += c)
        for (int64_t j = 0; j < c; j++) {
            work->sums[j] += work->sums[i + j];
            work->sums[width + j] += work->sums[width + i + j];
        }
}

/* ---- results --------------------------------------------------------------------------------------------------- */

INLINE vector normalized(const int kind, const job *work, int64_t at, int64_t v) {
    vector y = (LOAD(work->x + at) - LOAD(work->center + v)) * LOAD(work->scale + v) + LOAD(work->shift + v);
    return activated(kind, y);
}

INLINE vector input_gradient(const int kind, const job *work, int64_t at, int64_t v) {
    vector d = LOAD(work->x + at) - LOAD(work->center + v), scale = LOAD(work->scale + v);
    vector g = let_through(kind, d * scale + LOAD(work->shift + v), LOAD(work->g + at));
    const float *along = work->along + v, *plain = along + width_of(&work->s);
    return scale * g - d * LOAD(along) - LOAD(plain);
}

INLINE void write_lines(const int kind, const job *work, int64_t first, int64_t end) {
    int64_t width = width_of(&work->s);
    if (work->g) {
        for (int64_t at = first * width; at < end * width; at += width)
            for (int64_t v = 0; v < width; v += LANES) STORE(work->out + at + v, input_gradient(kind, work, at + v, v));
    } else {
        for (int64_t at = first * width; at < end * width; at += width)
            for (int64_t v = 0; v < width; v += LANES) STORE(work->out + at + v, normalized(kind, work, at + v, v));
    }
}

static void write_lines_of(const job *work, int64_t first, int64_t end) {
    switch (work->activation) {
    case NONE: write_lines(NONE, work, first, end); break;
    case RELU: write_lines(RELU, work, first, end); break;
    case RELU6: write_lines(RELU6, work, first, end); break;
    default: write_lines(SILU, work, first, end);
    }
}

static void write_rest(const job *work) {
    int64_t width = width_of(&work->s), done = work->s.lines * width, left = work->s.rows * work->s.c - done;
    job rest = rest_of(work);
    write_lines_of(&rest, 0, 1);
    memcpy(work->out + done, rest.out, 4 * left);
}

static void run_results(void *argument) {
    job *work = argument;
    int64_t lines = work->s.lines, block = 2 * BLOCK_FLOATS / width_of(&work->s) + 1, blocks = ceil_div(lines, block);
    for (int64_t i; (i = fetch_add(&work->team.next)) <= blocks;)
        if (i < blocks)
            write_lines_of(work, i * block, min((i + 1) * block, lines));
        else if (has_rest(&work->s))
            write_rest(work);
}

/* Both passes of a gradient at once, block by block: with frozen statistics, dx does not depend on the sums. */
static void run_frozen_gradient(void *argument) {
    job *work = argument;
    const shape *s = &work->s;
    int64_t groups = groups_of(s), width = width_of(s), block = BLOCK_FLOATS / width + 1;
    for (int64_t i; (i = fetch_add(&work->team.next)) < groups;) {
        int64_t end = s->lines * (i + 1) / groups;
        double *sums = work->sums + 2 * i * width;
        memset(sums, 0, 16 * width);
        for (int64_t first = s->lines * i / groups; first < end; first += block) {
            add_lines_of(work, first, min(first + block, end), NULL, sums);
            write_lines_of(work, first, min(first + block, end));
        }
        if (i == groups - 1 && has_rest(s)) {
            add_rest(work, sums);
            write_rest(work);
        }
    }
}

/* Size of the sums, the shifts and eight lines, in bytes. Nothing that grows with the channels is on the stack: threads have small
 * ones. */
int64_t convolve_batch_norm_scratch(int64_t rows, int64_t c) {
    shape s = shape_of(rows, c);
    return (20 * groups_of(&s) + 4 * 8) * width_of(&s);
}

static void layout_scratch(job *work, char *scratch) {
    int64_t width = width_of(&work->s);
    work->sums = (double *)scratch;
    work->center = (float *)(scratch + 16 * groups_of(&work->s) * width);
    work->scale = work->center + width;
    work->shift = work->scale + width;
    work->along = work->shift + width;
    work->rest = work->along + 2 * width;
    work->near = work->rest + 3 * width;
}

/* Compute each channel's scale, and tile all constants over a line. */
static void place_constants(job *work, const float *mean, const float *r, const float *w, const float *b) {
    for (int64_t i = 0; i < work->s.c; i++) work->scale[i] = w[i] * r[i];
    tile_channels(&work->s, mean, work->center);
    tile_channels(&work->s, work->scale, work->scale);
    tile_channels(&work->s, b, work->shift);
}

/* Write the means, the unbiased variances and r of the batch. */
static void measure(job *work, double epsilon, float *stats) {
    int64_t rows = work->s.rows, c = work->s.c;
    tile_channels(&work->s, work->x, work->center);
    run_on_team(&work->team, run_sums, work);
    add_groups(work);
    for (int64_t i = 0; i < c; i++) {
        double off = work->sums[i] / rows, difference = work->sums[width_of(&work->s) + i] / rows - off * off;
        double variance = difference < 0 ? 0 : difference; /* keeps NaN */
        stats[i] = (float)(work->x[i] + off);
        stats[c + i] = (float)(variance * rows / (rows > 1 ? rows - 1 : 1));
        stats[2 * c + i] = (float)(1 / sqrt(variance + epsilon));
    }
}

/* `stats` has the means, the variances and r, one after the other. With frozen statistics the first two are given, else
 * this writes them. */
int convolve_batch_norm_forward(int64_t rows, int64_t c, int activation, int frozen, double epsilon, const float *x,
                                const float *w, const float *b, float *y, float *stats, char *scratch, int threads,
                                parallel_fn parallel) {
    job work = {.s = shape_of(rows, c), .activation = activation, .x = x, .out = y};
    work.team = team_of(&work.s, threads, parallel);
    layout_scratch(&work, scratch);
    if (!frozen) measure(&work, epsilon, stats);
    for (int64_t i = 0; frozen && i < c; i++) stats[2 * c + i] = (float)(1 / sqrt(stats[c + i] + epsilon));
    place_constants(&work, stats, stats + 2 * c, w, b);
    run_on_team(&work.team, run_results, &work);
    return 0;
}

int convolve_batch_norm_backward(int64_t rows, int64_t c, int activation, int frozen, const float *x, const float *g,
                                 const float *w, const float *b, const float *stats, float *dx, float *dw, float *db,
                                 char *scratch, int threads, parallel_fn parallel) {
    job work = {.s = shape_of(rows, c), .activation = activation, .x = x, .g = g, .out = dx};
    const float *r = stats + 2 * c;
    work.team = team_of(&work.s, threads, parallel);
    layout_scratch(&work, scratch);
    float *along = work.along, *plain = along + width_of(&work.s);
    place_constants(&work, stats, r, w, b);
    memset(along, 0, 8 * width_of(&work.s));
    run_on_team(&work.team, frozen ? run_frozen_gradient : run_sums, &work);
    add_groups(&work);
    for (int64_t i = 0; i < c; i++) {
        double sum = work.sums[i], dot = work.sums[width_of(&work.s) + i] * r[i];
        db[i] = (float)sum;
        dw[i] = (float)dot;
        plain[i] = (float)(w[i] * r[i] * sum / rows);
        along[i] = (float)(w[i] * r[i] * r[i] * dot / rows);
    }
    if (frozen) return 0;
    tile_channels(&work.s, along, along);
    tile_channels(&work.s, plain, plain);
    run_on_team(&work.team, run_results, &work);
    return 0;
}
