/* Batch norm in training, with an activation behind it if asked for, and its gradients; float32, channels last.
 *
 * The arithmetic, for the n values x of one channel, with weight w and bias b:
 *
 *     mean = sum(x) / n      variance = sum((x - mean)^2) / n      r = 1 / sqrt(variance + epsilon)
 *     y = (x - mean) w r + b,  then the activation
 *
 * and for a gradient g of y, as the activation lets it through (y is computed again for that, nothing is kept):
 *
 *     db = sum(g)      dw = r sum(g (x - mean))      dx = w r (g - db / n - (x - mean) r dw / n)
 *
 * Squares are taken about the first value of the channel, which is near its mean if anything is: nothing cancels.
 *
 * Memory is seen as rows of channels. Some rows make a line, so many that a line is a whole number of vectors; each
 * vector of a line then has the same channels in all lines. Sums run in float over a block of lines, in double over the
 * blocks of a group, then over the groups in their order. Groups follow from the number of rows, so results do not
 * depend on the number of threads.
 */
#include "activations.h"

#include <math.h>

#define BLOCK_FLOATS 4096 /* of each tensor: a block stays in the first cache while its vectors are walked down */
#define GROUP_ROWS 64     /* of a group, at least */
#define GROUPS 16         /* at most */

/* Rows, channels; rows of a line; whole lines. */
typedef struct {
    int64_t rows, c, per_line, lines;
} shape;

/* `center`, `scale` and `shift` hold values for a whole line; `sums` two lines of doubles for each group. */
typedef struct {
    shape s;
    int activation;
    const float *x, *g;
    float *out, *center, *scale, *shift, *along;
    double *sums;
    crew crew;
} job;

INLINE int64_t width_of(const shape *s) { return s->per_line * s->c; }
INLINE int has_rest(const shape *s) { return s->lines * s->per_line < s->rows; }
INLINE int64_t groups_of(const shape *s) { return least(GROUPS, over(s->rows, GROUP_ROWS)); }

static shape shape_of(int64_t rows, int64_t c) {
    int64_t per_line = 1;
    while (per_line * c % LANES) per_line *= 2;
    return (shape){rows, c, per_line, rows / per_line};
}

/* Torch's threads, where there is work for more than one. */
static crew crew_of(const shape *s, int threads, parallel_fn parallel) {
    return (crew){s->rows * s->c > 4 * BLOCK_FLOATS ? threads : 1, parallel};
}

/* The values of all channels, as often as a line has rows. */
static void spread(const shape *s, const float *values, float *line) {
    for (int64_t i = 0; i < s->per_line; i++) memcpy(line + i * s->c, values, 4 * s->c);
}

/* ---- sums ------------------------------------------------------------------------------------------------------ */

#define INPUT -1 /* beside the activations: no gradient */

/* What is added up: of the input alone d and d^2, of a gradient g and g d, with d = x - center. */
INLINE void terms(const int kind, const job *work, int64_t at, int64_t v, vector *a, vector *b) {
    vector d = LOAD(work->x + at) - LOAD(work->center + v), g = d;
    if (kind != INPUT) g = let_through(kind, d * LOAD(work->scale + v) + LOAD(work->shift + v), LOAD(work->g + at));
    *a += g;
    *b += g * d;
}

/* One vector of the lines [first, end), added to the double sums of its place in a line. */
INLINE void add_vector(const int kind, const job *work, int64_t first, int64_t end, int64_t v, double *sums) {
    int64_t width = width_of(&work->s);
    vector a[2] = {{0}, {0}}, b[2] = {{0}, {0}};
    int64_t i = first;
    for (; i + 1 < end; i += 2) {
        terms(kind, work, i * width + v, v, &a[0], &b[0]);
        terms(kind, work, (i + 1) * width + v, v, &a[1], &b[1]);
    }
    if (i < end) terms(kind, work, i * width + v, v, &a[0], &b[0]);
    for (int64_t j = 0; j < LANES; j++) {
        sums[v + j] += (double)a[0][j] + a[1][j];
        sums[width + v + j] += (double)b[0][j] + b[1][j];
    }
}

INLINE void add_lines(const int kind, const job *work, int64_t first, int64_t end, double *sums) {
    int64_t width = width_of(&work->s), block = BLOCK_FLOATS / width + 1;
    for (; first < end; first += block)
        for (int64_t v = 0; v < width; v += LANES) add_vector(kind, work, first, least(first + block, end), v, sums);
}

/* Rows that fill no line, in a line of their own, of three in `memory`; beyond them, nothing that adds to a sum. */
static job rest_of(const job *work, float *memory) {
    int64_t width = width_of(&work->s), done = work->s.lines * width, left = work->s.rows * work->s.c - done;
    float *x = memory, *g = x + width, *out = g + width;
    memcpy(x, work->center, 4 * width);
    memset(g, 0, 4 * width);
    memcpy(x, work->x + done, 4 * left);
    if (work->g) memcpy(g, work->g + done, 4 * left);
    job rest = *work;
    rest.x = x, rest.g = work->g ? g : NULL, rest.out = out;
    return rest;
}

static void add_lines_of(const job *work, int64_t first, int64_t end, double *sums) {
    switch (work->g ? work->activation : INPUT) {
    case INPUT: add_lines(INPUT, work, first, end, sums); break;
    case NONE: add_lines(NONE, work, first, end, sums); break;
    case RELU: add_lines(RELU, work, first, end, sums); break;
    default: add_lines(SILU, work, first, end, sums);
    }
}

static void add_rest(const job *work, double *sums) {
    float memory[3 * width_of(&work->s)];
    job rest = rest_of(work, memory);
    add_lines_of(&rest, 0, 1, sums);
}

static void run_sums(void *given) {
    job *work = given;
    const shape *s = &work->s;
    int64_t groups = groups_of(s);
    for (int64_t i; (i = take(&work->crew.next)) < groups;) {
        int64_t first = s->lines * i / groups, end = s->lines * (i + 1) / groups;
        double *sums = work->sums + 2 * i * width_of(s);
        memset(sums, 0, 16 * width_of(s));
        add_lines_of(work, first, end, sums);
        if (i == groups - 1 && has_rest(s)) add_rest(work, sums);
    }
}

/* The sums of each channel over all groups and the places that it has in a line: all first sums, then all second. */
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
    default: write_lines(SILU, work, first, end);
    }
}

static void write_rest(const job *work) {
    int64_t width = width_of(&work->s), done = work->s.lines * width, left = work->s.rows * work->s.c - done;
    float memory[3 * width];
    job rest = rest_of(work, memory);
    write_lines_of(&rest, 0, 1);
    memcpy(work->out + done, rest.out, 4 * left);
}

static void run_results(void *given) {
    job *work = given;
    int64_t lines = work->s.lines, block = 2 * BLOCK_FLOATS / width_of(&work->s) + 1, blocks = over(lines, block);
    for (int64_t i; (i = take(&work->crew.next)) <= blocks;)
        if (i < blocks)
            write_lines_of(work, i * block, least((i + 1) * block, lines));
        else if (has_rest(&work->s))
            write_rest(work);
}

/* Room for the sums and five lines, in bytes. */
int64_t convolve_batch_norm_scratch(int64_t rows, int64_t c) {
    shape s = shape_of(rows, c);
    return (16 * groups_of(&s) + 4 * 5) * width_of(&s);
}

static void settle_in(job *work, char *scratch) {
    int64_t width = width_of(&work->s);
    work->sums = (double *)scratch;
    work->center = (float *)(scratch + 16 * groups_of(&work->s) * width);
    work->scale = work->center + width;
    work->shift = work->scale + width;
    work->along = work->shift + width;
}

/* Each channel's factor, and all constants spread over lines. */
static void place_constants(job *work, const float *mean, const float *r, const float *w, const float *b) {
    float scale[work->s.c];
    for (int64_t i = 0; i < work->s.c; i++) scale[i] = w[i] * r[i];
    spread(&work->s, mean, work->center);
    spread(&work->s, scale, work->scale);
    spread(&work->s, b, work->shift);
}

/* `found` becomes the means, the unbiased variances and r, one after the other. */
int convolve_batch_norm_forward(int64_t rows, int64_t c, int activation, double epsilon, const float *x, const float *w,
                                const float *b, float *y, float *found, char *scratch, int threads,
                                parallel_fn parallel) {
    job work = {.s = shape_of(rows, c), .activation = activation, .x = x, .out = y};
    work.crew = crew_of(&work.s, threads, parallel);
    settle_in(&work, scratch);
    spread(&work.s, x, work.center);
    share(&work.crew, run_sums, &work);
    add_groups(&work);
    for (int64_t i = 0; i < c; i++) {
        double off = work.sums[i] / rows, variance = work.sums[width_of(&work.s) + i] / rows - off * off;
        found[i] = (float)(x[i] + off);
        found[c + i] = (float)(variance * rows / (rows > 1 ? rows - 1 : 1));
        found[2 * c + i] = (float)(1 / sqrt(variance + epsilon));
    }
    place_constants(&work, found, found + 2 * c, w, b);
    share(&work.crew, run_results, &work);
    return 0;
}

int convolve_batch_norm_backward(int64_t rows, int64_t c, int activation, const float *x, const float *g,
                                 const float *w, const float *b, const float *found, float *dx, float *dw, float *db,
                                 char *scratch, int threads, parallel_fn parallel) {
    job work = {.s = shape_of(rows, c), .activation = activation, .x = x, .g = g, .out = dx};
    const float *r = found + 2 * c;
    float along[c], plain[c];
    work.crew = crew_of(&work.s, threads, parallel);
    settle_in(&work, scratch);
    place_constants(&work, found, r, w, b);
    share(&work.crew, run_sums, &work);
    add_groups(&work);
    for (int64_t i = 0; i < c; i++) {
        double sum = work.sums[i], dot = work.sums[width_of(&work.s) + i] * r[i];
        db[i] = (float)sum;
        dw[i] = (float)dot;
        plain[i] = (float)(w[i] * r[i] * sum / rows);
        along[i] = (float)(w[i] * r[i] * r[i] * dot / rows);
    }
    spread(&work.s, along, work.along);
    spread(&work.s, plain, work.along + width_of(&work.s));
    share(&work.crew, run_results, &work);
    return 0;
}
