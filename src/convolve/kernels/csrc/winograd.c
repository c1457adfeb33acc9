/* 3x3 convolutions of stride 1 and padding 1 over float32 images in NHWC, after Winograd (Lavin and Gray 2016).
 *
 * The image is cut into tiles of 4x4 outputs, which see 6x6 inputs d. With a filter w, and the matrices
 *
 *          | 4  0 -5  0  1  0 |         |  1/4    0    0  |
 *          | 0 -4 -4  1  1  0 |         | -1/6 -1/6 -1/6  |          | 1  1  1  1  1  0 |
 *   B^T =  | 0  4 -4 -1  1  0 |    G =  | -1/6  1/6 -1/6  |   A^T =  | 0  1 -1  2 -2  0 |
 *          | 0 -2 -1  2  1  0 |         | 1/24 1/12  1/6  |          | 0  1  1  4  4  0 |
 *          | 0  2 -1 -2  1  0 |         | 1/24 -1/12 1/6  |          | 0  1 -1  8 -8  1 |
 *          | 0  4  0 -5  0  1 |         |   0    0    1   |
 *
 *   output            y  = A^T [ (G w G^T) * (B^T d B) ] A               * is element by element, 36 products for 16
 *   filter's gradient dw = G^T [ (B^T d B) * (A dy A^T) ] G              outputs; the definition needs 144
 *
 * Summed over channels (or, for dw, over tiles), the products are 36 matrix products. The input's gradient is the
 * convolution of dy with the filters rotated by 180 degrees, which the strides of w express.
 *
 * Channels are grouped in panels of PANEL; transformed tiles are stored as [panel][tile][spot][PANEL], padded by one
 * spot, since rows a power of two apart would map to the same L1 cache set, and transformed filters u and the sums d of
 * their gradients as [spot][panel of outputs][inputs][PANEL]. The sums of a product always run in the same order, for
 * any number of threads and any block of tiles: an image has the same result in any batch.
 *
 * Threads share no tiles while they compute y. For dw, the tiles are divided into chunks, as many as the shape says;
 * each is summed by one thread, and the chunks are added in order. If d is too large for the cache of a core, there is
 * one chunk, whose blocks are transformed and multiplied by all threads together.
 *
 * Channel counts are multiples of HALF, and at least LANES: the last vector of a pixel may be half full.
 */
#include "simd.h"

#define HALF (LANES / 2)
#define PANEL (2 * LANES)
#define SPOTS 36
#define WIDE_ROWS 6                /* rows of a product with two vectors of columns, */
#define NARROW_ROWS 8              /* and with one: enough sums to hide the latency of an addition */
#define TILE ((SPOTS + 1) * PANEL) /* floats of one transformed tile in one panel */
#define BLOCK 64                   /* tiles computed together: as many as fit the L2 cache */
#define APART (BLOCK * TILE)       /* floats from panel to panel of a block */
#define AHEAD 3                    /* tiles from one that is transformed to the one that is fetched */
#define CHUNKS 16                  /* of the tiles, for the filters' gradient, maximum */
#define SHARED_FLOATS (160 * 1024) /* sums of a gradient from which all threads share one chunk */
#define MANY_FILTERS (32 * 32)     /* from which all threads transform them */
#define EACH(i, n) _Pragma("GCC unroll 6") for (int i = 0; i < n; i++)

/* With the floats from output to output of w, and from input to input, row to row and column to column. */
typedef struct {
    int64_t images, height, width, inputs, outputs;
    int64_t to_output, to_input, to_row, to_column;
} shape;

typedef struct {
    const shape *s;
    const float *x, *dy;
    float *y, *w, *sums, *scratch; /* w or dw; u or d */
    int64_t first, tiles;          /* tiles of this pass */
    int64_t chunks;                /* of a gradient; 0 forward */
    int adding;
    omp_team team;
} job;

INLINE int64_t panels(int64_t channels) { return ceil_div(channels, PANEL); }

/* Floats of a block of transformed tiles, inputs and outputs, plus one pixel of each. */
INLINE int64_t workspace_size(const shape *s) {
    return (panels(s->inputs) + panels(s->outputs)) * APART + s->inputs + s->outputs;
}

/* Return a workspace that no other thread uses in this pass; its first pixel is zero. */
INLINE float *take_workspace(job *work) {
    const shape *s = work->s;
    float *v = work->scratch + fetch_add(&work->team.next_slot) * workspace_size(s);
    memset(v + (panels(s->inputs) + panels(s->outputs)) * APART, 0, 4 * max(s->inputs, s->outputs));
    return v;
}

/* Floats of u, and of the sums of one chunk. */
INLINE int64_t filters_size(const shape *s) { return SPOTS * panels(s->outputs) * s->inputs * PANEL; }

INLINE int64_t count_tiles(const shape *s) { return s->images * ceil_div(s->height, 4) * ceil_div(s->width, 4); }

/* A power of two that depends on the shape only, so that the sums run in the same order with any number of threads. */
INLINE int64_t count_chunks(const shape *s) {
    int64_t chunks = 1;
    if (filters_size(s) >= SHARED_FLOATS) return 1;
    while (chunks < CHUNKS && 4 * chunks * BLOCK <= count_tiles(s)) chunks *= 2;
    return chunks;
}

/* Multiply one line of a tile by the matrices above, in place. */
INLINE void times_bt(vector d[6]) {
    vector far = d[4] - 4 * d[2], odd = d[3] - 4 * d[1], near = d[4] - d[2], twice = 2 * (d[3] - d[1]);
    d[0] = 4 * d[0] - 5 * d[2] + d[4];
    d[5] = 4 * d[1] - 5 * d[3] + d[5];
    d[1] = far + odd;
    d[2] = far - odd;
    d[3] = near + twice;
    d[4] = near - twice;
}

INLINE void times_at(vector m[6]) {
    vector sum = m[1] + m[2], gap = m[1] - m[2], far = m[3] + m[4], gap_far = m[3] - m[4];
    m[0] = m[0] + sum + far;
    m[1] = gap + 2 * gap_far;
    m[2] = sum + 4 * far;
    m[3] = gap + 8 * gap_far + m[5];
}

INLINE void times_a(vector g[6]) {
    vector even = g[0] + g[2], odd = g[1] + g[3], far = g[0] + 4 * g[2], wide = 2 * g[1] + 8 * g[3];
    g[5] = g[3];
    g[1] = even + odd;
    g[2] = even - odd;
    g[3] = far + wide;
    g[4] = far - wide;
}

INLINE void times_g(vector w[6]) {
    vector even = w[0] * (1 / 24.0f) + w[2] * (1 / 6.0f), odd = w[1] * (1 / 12.0f);
    vector ends = (w[0] + w[2]) * (-1 / 6.0f), middle = w[1] * (1 / 6.0f);
    w[5] = w[2];
    w[0] = w[0] * (1 / 4.0f);
    w[1] = ends - middle;
    w[2] = ends + middle;
    w[3] = even + odd;
    w[4] = even - odd;
}

INLINE void times_gt(vector d[6]) {
    vector near = (d[1] + d[2]) * (1 / 6.0f), far = (d[3] + d[4]) * (1 / 6.0f);
    vector middle = (d[2] - d[1]) * (1 / 6.0f) + (d[3] - d[4]) * (1 / 12.0f);
    d[0] = d[0] * (1 / 4.0f) - near + far * (1 / 4.0f);
    d[1] = middle;
    d[2] = far - near + d[5];
}

/* Transform a line of 6 inputs or 4 gradients to 6 values. */
INLINE void widen(const int side, vector line[6]) {
    if (side == 6)
        times_bt(line);
    else
        times_a(line);
}

/* Addresses of side x side pixels of a tile, starting `before` pixels above and left of it; `outside` for pixels
 * outside the image. */
INLINE void find_pixels(const shape *s, int64_t tile, const int side, const int before, const float *x,
                        int64_t channels, const float *outside, const float **at) {
    int64_t across = ceil_div(s->width, 4), each = across * ceil_div(s->height, 4), place = tile % each;
    int64_t top = place / across * 4 - before, left = place % across * 4 - before;
    const float *corner = x + ((tile / each * s->height + top) * s->width + left) * channels;
    int inside = top >= 0 && left >= 0 && top + side <= s->height && left + side <= s->width;
    for (int i = 0; i < side; i++, corner += s->width * channels)
        EACH(j, side) {
            int seen = inside || (top + i >= 0 && top + i < s->height && left + j >= 0 && left + j < s->width);
            *at++ = seen ? corner + j * channels : outside;
        }
}

/* Fetch the pixels of a tile that the tile before it does not have, in time to transform it. */
INLINE void fetch_ahead(const shape *s, int64_t tile, const int side, const int before, const float *x,
                        int64_t channels) {
    int64_t across = ceil_div(s->width, 4), each = across * ceil_div(s->height, 4), place = tile % each;
    int64_t top = place / across * 4 - before, left = place % across * 4 + side - before - 4;
    const float *corner = x + ((tile / each * s->height + top) * s->width + left) * channels;
    for (int i = 0; i < side; i++, corner += s->width * channels)
        for (int64_t c = 0; c < 4 * channels; c += 16) __builtin_prefetch(corner + c);
}

/* The upper half of v, twice. */
INLINE vector upper_half(vector v) {
#if !defined(__clang__) && __GNUC__ < 12 /* has no __builtin_shufflevector */
    vector found = v;
    for (int i = 0; i < HALF; i++) found[i] = v[i + HALF];
    return found;
#elif LANES == 16
    return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7);
#else
    return __builtin_shufflevector(v, v, 2, 3, 2, 3);
#endif
}

/* A vector of the channels of a pixel, of which `left` are left; and only these are stored. */
INLINE vector load_channels(const float *p, int64_t left) {
    return left < LANES ? upper_half(LOAD(p - HALF)) : LOAD(p);
}

INLINE void store_channels(float *p, int64_t left, vector v) {
    if (left < LANES)
        memcpy(p, &v, 4 * HALF);
    else
        STORE(p, v);
}

/* Compute the 36 spots of a tile from its side x side pixels. */
INLINE void transform_tile(const int side, const float **at, int64_t channels, float *to) {
    for (int64_t c = 0; c < channels; c += LANES) {
        float *out = to + c / PANEL * APART + c % PANEL;
        vector line[6], half[6][6];
        for (int j = 0; j < side; j++) {
            EACH(i, side) line[i] = load_channels(at[side * i + j] + c, channels - c);
            widen(side, line);
            EACH(i, 6) half[i][j] = line[i];
        }
        for (int i = 0; i < 6; i++, out += 6 * PANEL) {
            EACH(j, side) line[j] = half[i][j];
            widen(side, line);
            EACH(j, 6) STORE(out + j * PANEL, line[j]);
        }
    }
}

/* B^T d B of one tile. */
static void transform_input(const float **at, int64_t channels, float *to) { transform_tile(6, at, channels, to); }

/* A dy A^T of one tile. */
static void transform_gradient(const float **at, int64_t channels, float *to) { transform_tile(4, at, channels, to); }

/* A^T m A of one tile. */
static void transform_output(const float *from, int64_t channels, const float **at) {
    for (int64_t c = 0; c < channels; c += LANES) {
        const float *in = from + c / PANEL * APART + c % PANEL;
        vector line[6], half[4][6];
        for (int j = 0; j < 6; j++) {
            EACH(i, 6) line[i] = LOAD(in + (6 * i + j) * PANEL);
            times_at(line);
            EACH(i, 4) half[i][j] = line[i];
        }
        for (int i = 0; i < 4; i++) {
            EACH(j, 6) line[j] = half[i][j];
            times_at(line);
            EACH(j, 4) store_channels((float *)at[4 * i + j] + c, channels - c, line[j]);
        }
    }
}

/* ---- filters --------------------------------------------------------------------------------------------------- */

/* Filters of LANES inputs and outputs: their nine values, or their gradients, as [place][input][output]. */
typedef float square[9][LANES][LANES];

/* Copy a square of so many inputs and outputs from or to w, in whose lines neighbors of either side are adjacent. */
INLINE void copy_square(const int reading, const shape *s, int64_t inputs, int64_t outputs, float *w, square near) {
    for (int64_t k = 0; k < outputs; k++)
        for (int i = 0; i < 9; i++) {
            float *line = w + k * s->to_output + i / 3 * s->to_row + i % 3 * s->to_column;
            for (int64_t e = 0; e < inputs; e++)
                if (reading)
                    near[i][e][k] = line[e * s->to_input];
                else
                    line[e * s->to_input] = near[i][e][k];
        }
}

/* u = G w G^T for a square; `apart` floats from spot to spot. */
INLINE void transform_filters(square near, int64_t inputs, int64_t apart, float *u) {
    for (int64_t e = 0; e < inputs; e++, u += PANEL) {
        vector line[6], half[6][3];
        for (int j = 0; j < 3; j++) {
            EACH(i, 3) line[i] = LOAD(near[3 * i + j][e]);
            times_g(line);
            EACH(i, 6) half[i][j] = line[i];
        }
        for (int i = 0; i < 6; i++) {
            EACH(j, 3) line[j] = half[i][j];
            times_g(line);
            EACH(j, 6) STORE(u + (6 * i + j) * apart, line[j]);
        }
    }
}

/* dw = G^T d G for a square, with d summed over the chunks. */
INLINE void transform_sums(const float *d, int64_t inputs, int64_t apart, int64_t chunks, square near) {
    for (int64_t e = 0; e < inputs; e++, d += PANEL) {
        vector line[6], half[3][6];
        for (int j = 0; j < 6; j++) {
            for (int i = 0; i < 6; i++) {
                const float *at = d + (6 * i + j) * apart;
                line[i] = LOAD(at);
                for (int64_t k = 1; k < chunks; k++) line[i] += LOAD(at + k * SPOTS * apart);
            }
            times_gt(line);
            EACH(i, 3) half[i][j] = line[i];
        }
        for (int i = 0; i < 3; i++) {
            EACH(j, 6) line[j] = half[i][j];
            times_gt(line);
            EACH(j, 3) STORE(near[3 * i + j][e], line[j]);
        }
    }
}

/* Compute u from w, or dw from d, square by square. */
static void run_filters(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    int64_t apart = filters_size(s) / SPOTS, across = ceil_div(s->inputs, LANES);
    square near = {0};
    for (int64_t i; (i = fetch_add(&work->team.next)) < across * ceil_div(s->outputs, LANES);) {
        int64_t input = i % across * LANES, output = i / across * LANES;
        int64_t inputs = min(s->inputs - input, LANES), outputs = min(s->outputs - output, LANES);
        float *sums = work->sums + (output / PANEL * s->inputs + input) * PANEL + output % PANEL;
        float *w = work->w + output * s->to_output + input * s->to_input;
        if (work->chunks) {
            transform_sums(sums, inputs, apart, work->chunks, near);
            copy_square(0, s, inputs, outputs, w, near);
        } else {
            copy_square(1, s, inputs, outputs, w, near);
            transform_filters(near, inputs, apart, sums);
        }
    }
}

static void run_on_filters(job *work) {
    omp_team team = work->team;
    if (work->s->inputs * work->s->outputs < MANY_FILTERS) work->team.threads = 1;
    run_on_team(&work->team, run_filters, work);
    work->team = team;
}

/* ---- products -------------------------------------------------------------------------------------------------- */

INLINE int64_t count_rows(int64_t left, int wide) { return min(left, wide ? WIDE_ROWS : NARROW_ROWS); }

/* A product whose sums stay in registers, for one or two vectors of columns. */
#define FOR_ROWS(rows, n, call, ...)                \
    switch (rows) {                                 \
    case 1: call(1, n, __VA_ARGS__); break;         \
    case 2: call(2, n, __VA_ARGS__); break;         \
    case 3: call(3, n, __VA_ARGS__); break;         \
    case 4: call(4, n, __VA_ARGS__); break;         \
    case 5: call(5, n, __VA_ARGS__); break;         \
    default: call(6, n, __VA_ARGS__);               \
    }
#define FOR_SIZES(rows, wide, call, ...)            \
    if (wide) FOR_ROWS(rows, 2, call, __VA_ARGS__)  \
    else if (rows == 8) call(8, 1, __VA_ARGS__);    \
    else if (rows == 7) call(7, 1, __VA_ARGS__);    \
    else FOR_ROWS(rows, 1, call, __VA_ARGS__)

/* c[rows][n vectors] = a[rows][depth] b[depth][n vectors] for tiles as rows. */
INLINE void product(const int rows, const int n, int64_t depth, const float *a, const float *b, float *c) {
    vector sum[NARROW_ROWS][2] = {0};
    for (int64_t k = 0; k < depth; k += PANEL, a += APART) {
        int64_t end = min(depth - k, PANEL);
        for (int64_t i = 0; i < end; i++, b += PANEL)
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < n; v++) sum[r][v] += a[r * TILE + i] * LOAD(b + v * LANES);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < n; v++) STORE(c + r * TILE + v * LANES, sum[r][v]);
}

/* m = v u for one spot: `rows` tiles by all outputs. */
static void multiply(const shape *s, int64_t rows, const float *v, const float *u, float *m) {
    for (int64_t c = 0; c < s->outputs; c += PANEL, u += s->inputs * PANEL, m += APART) {
        int wide = s->outputs - c > LANES;
        for (int64_t r = 0, some; r < rows; r += some) {
            some = count_rows(rows - r, wide);
            FOR_SIZES(some, wide, product, s->inputs, v + r * TILE, u, m + r * TILE);
        }
    }
}

/* Compute y from x and transformed filters u, block by block; each thread uses a separate part of the scratch. */
static void run_forward(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    float *v = take_workspace(work), *m = v + panels(s->inputs) * APART;
    float *zeros = m + panels(s->outputs) * APART, *waste = zeros + s->inputs;
    const float *at[SPOTS];
    for (int64_t first; (first = fetch_add(&work->team.next) * BLOCK) < work->tiles;) {
        int64_t rows = min(work->tiles - first, BLOCK);
        for (int64_t t = 0; t < rows; t++) {
            fetch_ahead(s, first + t + AHEAD, 6, 1, work->x, s->inputs);
            find_pixels(s, first + t, 6, 1, work->x, s->inputs, zeros, at);
            transform_input(at, s->inputs, v + t * TILE);
        }
        for (int i = 0; i < SPOTS; i++)
            multiply(s, rows, v + i * PANEL, work->sums + i * (filters_size(s) / SPOTS), m + i * PANEL);
        for (int64_t t = 0; t < rows; t++) {
            fetch_ahead(s, first + t + AHEAD, 4, 0, work->y, s->outputs);
            find_pixels(s, first + t, 4, 0, work->y, s->outputs, waste, at);
            transform_output(m + t * TILE, s->outputs, at);
        }
    }
}

/* d[rows][n vectors] (+)= a^T b over `depth` tiles, both in one panel. */
INLINE void deep_product(const int rows, const int n, int64_t depth, const float *a, const float *b, float *d,
                         int adding) {
    vector sum[NARROW_ROWS][2] = {0};
    if (adding)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < n; v++) sum[r][v] = LOAD(d + r * PANEL + v * LANES);
    for (int64_t k = 0; k < depth; k++, a += TILE, b += TILE)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < n; v++) sum[r][v] += a[r] * LOAD(b + v * LANES);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < n; v++) STORE(d + r * PANEL + v * LANES, sum[r][v]);
}

/* Transform one tile of x and dy, at position t of a block. */
static void transform_pair(const job *work, int64_t tile, int64_t t, float *v) {
    const shape *s = work->s;
    float *z = v + panels(s->inputs) * APART;
    const float *zeros = z + panels(s->outputs) * APART, *at[SPOTS];
    fetch_ahead(s, tile + AHEAD, 6, 1, work->x, s->inputs);
    fetch_ahead(s, tile + AHEAD, 4, 0, work->dy, s->outputs);
    find_pixels(s, tile, 6, 1, work->x, s->inputs, zeros, at);
    transform_input(at, s->inputs, v + t * TILE);
    find_pixels(s, tile, 4, 0, work->dy, s->outputs, zeros, at);
    transform_gradient(at, s->outputs, z + t * TILE);
}

/* d (+)= v^T z of a block, one panel of inputs at one spot: the smallest part of it that is not shared. */
static void multiply_deep(const shape *s, int64_t place, int64_t tiles, const float *v, float *d, int adding) {
    int64_t groups = panels(s->inputs), spot = place / groups, group = place % groups;
    int64_t rows = min(s->inputs - group * PANEL, PANEL);
    const float *a = v + group * APART + spot * PANEL, *b = v + groups * APART + spot * PANEL;
    d += (spot * panels(s->outputs) * s->inputs + group * PANEL) * PANEL;
    for (int64_t c = 0; c < s->outputs; c += PANEL, b += APART, d += s->inputs * PANEL) {
        int wide = s->outputs - c > LANES;
        for (int64_t r = 0, some; r < rows; r += some) {
            some = count_rows(rows - r, wide);
            FOR_SIZES(some, wide, deep_product, tiles, a + r, b, d + r * PANEL, adding);
        }
    }
}

/* Sum d of one chunk after the other. */
static void run_chunks(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    float *v = take_workspace(work);
    for (int64_t i; (i = fetch_add(&work->team.next)) < work->chunks;) {
        int64_t start = work->tiles * i / work->chunks, end = work->tiles * (i + 1) / work->chunks;
        for (int64_t first = start; first < end; first += BLOCK) {
            int64_t tiles = min(end - first, BLOCK);
            for (int64_t t = 0; t < tiles; t++) transform_pair(work, first + t, t, v);
            for (int64_t place = 0; place < SPOTS * panels(s->inputs); place++)
                multiply_deep(s, place, tiles, v, work->sums + i * filters_size(s), first > start);
        }
    }
}

/* The two passes over a block that all threads share. */
static void run_transforms(void *argument) {
    job *work = argument;
    for (int64_t t; (t = fetch_add(&work->team.next)) < work->tiles;)
        transform_pair(work, work->first + t, t, work->scratch);
}

static void run_deep_products(void *argument) {
    job *work = argument;
    for (int64_t place; (place = fetch_add(&work->team.next)) < SPOTS * panels(work->s->inputs);)
        multiply_deep(work->s, place, work->tiles, work->scratch, work->sums, work->adding);
}

static void sum_shared_blocks(job *work) {
    int64_t tiles = work->tiles;
    take_workspace(work);
    for (; work->first < tiles; work->first += BLOCK, work->adding = 1) {
        work->tiles = min(tiles - work->first, BLOCK);
        run_on_team(&work->team, run_transforms, work);
        run_on_team(&work->team, run_deep_products, work);
    }
}

/* Channel counts are multiples of this. */
int convolve_winograd_half(void) { return HALF; }

/* Scratch memory for either pass, in bytes. Columns of a panel beyond the channels are multiplied too. Their values
 * change no result, but must start as zeros: denormal numbers are slow. */
int64_t convolve_winograd_scratch(const shape *s, int threads) {
    return 4 * (threads * workspace_size(s) + count_chunks(s) * filters_size(s));
}

/* Compute y from x and the filters w. */
int convolve_winograd_forward(const shape *s, const float *x, float *w, float *y, float *scratch, int threads,
                              parallel_fn parallel) {
    job work = {.s = s, .x = x, .w = w, .y = y, .scratch = scratch, .team = {threads, parallel}};
    work.sums = scratch + threads * workspace_size(s);
    work.tiles = count_tiles(s);
    run_on_filters(&work);
    run_on_team(&work.team, run_forward, &work);
    return 0;
}

/* Compute dw, with the strides of w. */
int convolve_winograd_backward(const shape *s, const float *x, const float *dy, float *dw, float *scratch, int threads,
                               parallel_fn parallel) {
    job work = {.s = s, .x = x, .dy = dy, .w = dw, .scratch = scratch, .team = {threads, parallel}};
    work.sums = scratch + threads * workspace_size(s);
    work.tiles = count_tiles(s);
    work.chunks = count_chunks(s);
    if (!work.tiles)
        memset(work.sums, 0, 4 * filters_size(s));
    else if (work.chunks > 1)
        run_on_team(&work.team, run_chunks, &work);
    else
        sum_shared_blocks(&work);
    run_on_filters(&work);
    return 0;
}
