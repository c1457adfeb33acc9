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
 * convolution of dy with the filters rotated by 180 degrees. The caller transforms the filters.
 *
 * Channels are grouped in panels of PANEL; transformed tiles are stored as [panel][tile][spot][PANEL], padded by one
 * spot, since rows a power of two apart would map to the same L1 cache set. The sums of a product always run in the
 * same order, for any number of threads and any block of tiles: an image has the same result in any batch.
 *
 * Channel counts are multiples of LANES.
 */
#include "simd.h"

#define PANEL (2 * LANES)
#define SPOTS 36
#define ROWS 6
#define TILE ((SPOTS + 1) * PANEL) /* floats of one transformed tile in one panel */
#define BLOCK 63                   /* tiles computed together: as many as fit the L2 cache */
#define APART (BLOCK * TILE)       /* floats from panel to panel of a block */
#define EACH(i, n) _Pragma("GCC unroll 6") for (int i = 0; i < n; i++)

typedef struct {
    int64_t images, height, width, inputs, outputs;
} shape;

typedef struct {
    const shape *s;
    const float *x, *u, *dy;
    float *y, *d, *scratch;
    int64_t first, tiles; /* tiles of this pass */
    int adding;
    omp_team team;
} job;

INLINE int64_t panels(int64_t channels) { return ceil_div(channels, PANEL); }

/* Floats of a block of transformed tiles, inputs and outputs, plus one pixel of each. */
INLINE int64_t workspace_size(const shape *s) {
    return (panels(s->inputs) + panels(s->outputs)) * APART + s->inputs + s->outputs;
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

/* Compute the 36 spots of a tile from its side x side pixels. */
INLINE void transform_tile(const int side, const float **at, int64_t channels, float *to) {
    for (int64_t c = 0; c < channels; c += LANES) {
        float *out = to + c / PANEL * APART + c % PANEL;
        vector line[6], half[6][6];
        for (int j = 0; j < side; j++) {
            EACH(i, side) line[i] = LOAD(at[side * i + j] + c);
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
            EACH(j, 4) STORE((float *)at[4 * i + j] + c, line[j]);
        }
    }
}

/* A product whose sums stay in registers, for 1 to ROWS rows and one or two vectors of columns. */
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
    else FOR_ROWS(rows, 1, call, __VA_ARGS__)

/* c[rows][n vectors] = a[rows][depth] b[depth][n vectors] for tiles as rows. */
INLINE void product(const int rows, const int n, int64_t depth, const float *a, const float *b, float *c) {
    vector sum[ROWS][2] = {0};
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
    for (int64_t c = 0; c < s->outputs; c += PANEL, u += s->inputs * PANEL, m += APART)
        for (int64_t r = 0; r < rows; r += ROWS) {
            int64_t some = min(rows - r, ROWS), wide = s->outputs - c > LANES;
            FOR_SIZES(some, wide, product, s->inputs, v + r * TILE, u, m + r * TILE);
        }
}

/* Compute y from x and transformed filters u, block by block; each thread uses a separate part of the scratch. */
static void run_forward(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    float *v = work->scratch + fetch_add(&work->team.next_slot) * workspace_size(s), *m = v + panels(s->inputs) * APART;
    float *zeros = m + panels(s->outputs) * APART, *waste = zeros + s->inputs;
    const float *at[SPOTS];
    memset(zeros, 0, 4 * s->inputs);
    for (int64_t first; (first = fetch_add(&work->team.next) * BLOCK) < work->tiles;) {
        int64_t rows = min(work->tiles - first, BLOCK);
        for (int64_t t = 0; t < rows; t++) {
            find_pixels(s, first + t, 6, 1, work->x, s->inputs, zeros, at);
            transform_input(at, s->inputs, v + t * TILE);
        }
        for (int i = 0; i < SPOTS; i++)
            multiply(s, rows, v + i * PANEL, work->u + i * panels(s->outputs) * s->inputs * PANEL, m + i * PANEL);
        for (int64_t t = 0; t < rows; t++) {
            find_pixels(s, first + t, 4, 0, work->y, s->outputs, waste, at);
            transform_output(m + t * TILE, s->outputs, at);
        }
    }
}

/* d[rows][n vectors] (+)= a^T b over `depth` tiles, both in one panel. */
INLINE void deep_product(const int rows, const int n, int64_t depth, const float *a, const float *b, float *d,
                         int adding) {
    vector sum[ROWS][2] = {0};
    if (adding)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < n; v++) sum[r][v] = LOAD(d + r * PANEL + v * LANES);
    for (int64_t k = 0; k < depth; k++, a += TILE, b += TILE)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < n; v++) sum[r][v] += a[r] * LOAD(b + v * LANES);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < n; v++) STORE(d + r * PANEL + v * LANES, sum[r][v]);
}

/* Transform the tiles of one block of x and dy. */
static void run_transforms(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    float *v = work->scratch, *z = v + panels(s->inputs) * APART;
    const float *zeros = z + panels(s->outputs) * APART, *at[SPOTS];
    for (int64_t t; (t = fetch_add(&work->team.next)) < work->tiles;) {
        find_pixels(s, work->first + t, 6, 1, work->x, s->inputs, zeros, at);
        transform_input(at, s->inputs, v + t * TILE);
        find_pixels(s, work->first + t, 4, 0, work->dy, s->outputs, zeros, at);
        transform_gradient(at, s->outputs, z + t * TILE);
    }
}

/* d (+)= v^T z of a block, one panel of inputs at one spot at a time. */
static void run_deep_products(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    int64_t groups = panels(s->inputs);
    for (int64_t place; (place = fetch_add(&work->team.next)) < SPOTS * groups;) {
        int64_t spot = place / groups, group = place % groups, rows = min(s->inputs - group * PANEL, PANEL);
        const float *a = work->scratch + group * APART + spot * PANEL;
        const float *b = work->scratch + groups * APART + spot * PANEL;
        float *d = work->d + (spot * panels(s->outputs) * s->inputs + group * PANEL) * PANEL;
        for (int64_t c = 0; c < s->outputs; c += PANEL, b += APART, d += s->inputs * PANEL)
            for (int64_t r = 0; r < rows; r += ROWS) {
                int64_t some = min(rows - r, ROWS), wide = s->outputs - c > LANES;
                FOR_SIZES(some, wide, deep_product, work->tiles, a + r, b, d + r * PANEL, work->adding);
            }
    }
}

static int64_t count_tiles(const shape *s) { return s->images * ceil_div(s->height, 4) * ceil_div(s->width, 4); }

/* Channels per panel in u and d. */
int convolve_winograd_panel(void) { return PANEL; }

/* Scratch memory for either pass, in bytes. Columns of a panel beyond the channels are multiplied too. Their values
 * change no result, but must start as zeros: denormal numbers are slow. */
int64_t convolve_winograd_scratch(const shape *s, int threads) { return 4 * threads * workspace_size(s); }

/* Compute y from x and the transformed filters u, [spot][panel of outputs][inputs][PANEL]. */
int convolve_winograd_forward(const shape *s, const float *x, const float *u, float *y, float *scratch, int threads,
                              parallel_fn parallel) {
    job work = {.s = s, .x = x, .u = u, .y = y, .scratch = scratch, .team = {threads, parallel}};
    work.tiles = count_tiles(s);
    run_on_team(&work.team, run_forward, &work);
    return 0;
}

/* Compute d, [spot][panel of outputs][inputs][PANEL], from which the caller computes the filters' gradient. Runs
 * block by block: a block's transforms are still in the cache when they are multiplied. */
int convolve_winograd_backward(const shape *s, const float *x, const float *dy, float *d, float *scratch, int threads,
                               parallel_fn parallel) {
    job work = {.s = s, .x = x, .dy = dy, .d = d, .scratch = scratch, .team = {threads, parallel}};
    int64_t tiles = count_tiles(s), sides = panels(s->inputs) + panels(s->outputs);
    memset(scratch + sides * APART, 0, 4 * max(s->inputs, s->outputs));
    if (!tiles) memset(d, 0, 4 * SPOTS * panels(s->outputs) * s->inputs * PANEL);
    for (; work.first < tiles; work.first += BLOCK, work.adding = 1) {
        work.tiles = min(tiles - work.first, BLOCK);
        run_on_team(&work.team, run_transforms, &work);
        run_on_team(&work.team, run_deep_products, &work);
    }
    return 0;
}
