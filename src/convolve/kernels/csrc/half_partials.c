/* Convolutions and matrix products with a 16-bit accumulator, and their gradients; channels last.
 *
 * The arithmetic of one result, a dot product of length K in chunks of 16:
 *
 *     acc = 0
 *     for each chunk:  for each of its products:  acc = acc + a_i b_i     in float32
 *                      acc = round16(acc)
 *     result = acc + 0                                                   -0 becomes 0
 *
 * Operands are rounded to 16 bits first, which changes nothing if they are on the grid. A product of two fp16 numbers is
 * exact in float32, so fused and separate operations have the same bits. That is not true of bf16, whose products can
 * leave the range of float32: this file is compiled with -DBF16 and without contraction for it.
 *
 * The order of products is
 *
 *     y    row, column of the filter, input channel
 *     dx   row, column of the filter rotated by 180 degrees, output channel
 *     dw   row, column of the output, image
 *
 * A product with padding is a product with zero. A chunk of zeros changes no accumulator, so it is skipped if all other
 * operands are finite. Rows of results are ordered by their place in the image first, which makes most chunks of padding
 * common to a whole tile: a 3x3 filter on an image of one pixel then costs one ninth.
 *
 * Stochastic rounding takes the random bits of rounding.h, with one key for each chunk and the index of the result in
 * memory. Results do not depend on the number of threads, the vector width or the division into tiles.
 */
#include "simd.h"
#include "rounding.h"

#define CHUNK 16
#define CHUNKS 16                /* in a block of products */
#define DEPTH (CHUNK * CHUNKS)   /* products in a block */
#define TILE (LANES == 16 ? 8 : 4) /* rows of results in registers */
#define STRIP (2 * LANES)        /* columns of results in registers */
#define BLOCK (8 * TILE)         /* rows of a piece of work */
#define STRIPS 4                 /* strips of a piece of work */
#define EXPONENT 0x7F800000u

#ifdef BF16
#define LARGEST LARGEST_BF16
#define NEAREST(m) nearest_bf16(m)
#define STOCHASTIC(m, h) stochastic_bf16(m, h)
#else
#define LARGEST LARGEST_FP16
#define NEAREST(m) nearest_fp16(m)
#define STOCHASTIC(m, h) stochastic_fp16(m, h)
#endif

/* Images, input, output, filter, stride, padding, dilation, groups. */
typedef struct {
    int64_t n, h, w, c, oh, ow, oc, kh, kw, sh, sw, ph, pw, dh, dw, groups;
} shape;

/* Which pixel of a source image meets a tap of the filter for a pixel of the result, or -1 if none:
 * rows[i * kh + p] and columns[j * kw + q]. Channels are those of all groups. */
typedef struct {
    int64_t n, h, w, c, oh, ow, oc, kh, kw, groups;
    int32_t *rows, *columns;
} correlation;

typedef struct {
    omp_team team;
    correlation at;
    const float *source, *filters, *gradient;
    float *out, *packed, *workspaces;
    const uint64_t *keys; /* of chunks; NULL: round to nearest */
    int clamped, turned;
    uint32_t not_finite;
} job;

INLINE int64_t pad(int64_t size, int64_t unit) { return ceil_div(size, unit) * unit; }
INLINE int64_t taps(const correlation *at) { return at->kh * at->kw; }
INLINE int64_t pixels(const correlation *at) { return at->n * at->oh * at->ow; }
INLINE int64_t source_channels(const correlation *at) { return at->c / at->groups; }
INLINE int64_t result_channels(const correlation *at) { return at->oc / at->groups; }

/* ---- rounding -------------------------------------------------------------------------------------------------- */

INLINE float round_bits(uint32_t u, uint32_t m, uint32_t r, uint32_t limit) {
    r = r > LARGEST ? limit : r;
    r = m > EXPONENT ? m : r;
    return float_of(r | (u & 0x80000000u));
}

/* Round operands to nearest. Returns whether one of them is infinite or NaN. */
static uint32_t round_operands(float *x, int64_t count, int clamped) {
    uint32_t limit = clamped ? LARGEST : EXPONENT, found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t u = bits_of(x[i]), m = u & 0x7FFFFFFFu;
        x[i] = round_bits(u, m, NEAREST(m), limit);
        found |= (bits_of(x[i]) & EXPONENT) == EXPONENT;
    }
    return found;
}

/* Round the accumulators of a tile after a chunk; `first` has the index of the first result of each row. */
INLINE void round_tile(const int stochastic, float *acc, uint64_t key, const uint32_t *first, uint32_t limit) {
    uint32_t a = (uint32_t)key, b = (uint32_t)(key >> 32);
    for (int r = 0; r < TILE; r++)
        for (uint32_t j = 0; j < STRIP; j++) {
            float *x = acc + r * STRIP + j;
            uint32_t u = bits_of(*x), m = u & 0x7FFFFFFFu;
            *x = round_bits(u, m, stochastic ? STOCHASTIC(m, hash(first[r] + j, a, b)) : NEAREST(m), limit);
        }
}

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

/* Add a chunk of products, a [TILE][CHUNK] and b [CHUNK][STRIP], to the accumulators of a tile. */
INLINE void multiply_chunk(const float *a, const float *b, float *acc) {
    vector sum[TILE][2];
    for (int r = 0; r < TILE; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = LOAD(acc + r * STRIP + v * LANES);
    for (int k = 0; k < CHUNK; k++) {
        vector left = LOAD(b + k * STRIP), right = LOAD(b + k * STRIP + LANES);
        for (int r = 0; r < TILE; r++) {
            sum[r][0] += a[r * CHUNK + k] * left;
            sum[r][1] += a[r * CHUNK + k] * right;
        }
    }
    for (int r = 0; r < TILE; r++)
        for (int v = 0; v < 2; v++) STORE(acc + r * STRIP + v * LANES, sum[r][v]);
}

/* Add those chunks of a block whose bits in `active` are set. */
INLINE void multiply_block(const int stochastic, const job *work, const float *a, const float *b, uint32_t active,
                           int64_t chunk, const uint32_t *first, float *acc) {
    uint32_t limit = work->clamped ? LARGEST : EXPONENT;
    for (; active; active &= active - 1) {
        int i = __builtin_ctz(active);
        multiply_chunk(a + i * TILE * CHUNK, b + i * CHUNK * STRIP, acc);
        round_tile(stochastic, acc, stochastic ? work->keys[chunk + i] : 0, first, limit);
    }
}

static void multiply_to_nearest(const job *work, const float *a, const float *b, uint32_t active, int64_t chunk,
                                const uint32_t *first, float *acc) {
    multiply_block(0, work, a, b, active, chunk, first, acc);
}

static void multiply_stochastically(const job *work, const float *a, const float *b, uint32_t active, int64_t chunk,
                                    const uint32_t *first, float *acc) {
    multiply_block(1, work, a, b, active, chunk, first, acc);
}

/* Multiply one tile of rows by one strip of columns; `rows` has the index of the first result of each row. */
static void multiply(const job *work, const float *a, const float *b, uint32_t active, int64_t chunk,
                     const uint32_t *rows, int64_t column, float *acc) {
    uint32_t first[TILE];
    for (int r = 0; r < TILE; r++) first[r] = rows[r] + (uint32_t)column;
    (work->keys ? multiply_stochastically : multiply_to_nearest)(work, a, b, active, chunk, first, acc);
}

static void copy_out(const float *acc, int64_t columns, float *to) {
    for (int64_t j = 0; j < columns; j++) to[j] = acc[j] + 0.0f;
}

/* All chunks of a block of `products`, as bits. */
INLINE uint32_t all_chunks(int64_t products) { return (1u << ceil_div(products, CHUNK)) - 1; }

/* The chunks of a block that contain some products. */
INLINE uint32_t chunks_of(int64_t begin, int64_t end) {
    return all_chunks(end) & ~((1u << begin / CHUNK) - 1);
}

/* ---- results from gathered rows: y from x, dx from the gradient of y --------------------------------------------- */

INLINE int64_t depth_of_rows(const correlation *at) { return pad(taps(at) * source_channels(at), CHUNK); }
INLINE int64_t strips_of_rows(const correlation *at) { return ceil_div(result_channels(at), STRIP); }

/* Pack the filters of one group and strip as [depth][STRIP]. */
static void pack_strip(job *work, int64_t unit) {
    const correlation *at = &work->at;
    int64_t strips = strips_of_rows(at), group = unit / strips, first = unit % strips * STRIP;
    int64_t c = source_channels(at), oc = result_channels(at), products = taps(at) * c, depth = depth_of_rows(at);
    int64_t columns = min(STRIP, oc - first);
    float *to = work->packed + unit * depth * STRIP;
    uint32_t found = 0;
    for (int64_t start = 0; start < depth; start += CHUNK, to += CHUNK * STRIP) {
        int64_t count = min(CHUNK, products - start);
        if (count < CHUNK || columns < STRIP) memset(to, 0, 4 * CHUNK * STRIP);
        if (work->turned) {
            for (int64_t k = 0; k < count; k++) {
                int64_t tap = taps(at) - 1 - (start + k) / c, channel = group * c + (start + k) % c;
                memcpy(to + k * STRIP, work->filters + (channel * taps(at) + tap) * oc + first, 4 * columns);
            }
        } else {
            for (int64_t j = 0; j < columns; j++) {
                const float *from = work->filters + (group * oc + first + j) * products + start;
                for (int64_t k = 0; k < count; k++) to[k * STRIP + j] = from[k];
            }
        }
        found |= round_operands(to, CHUNK * STRIP, work->clamped);
    }
    if (found) __atomic_fetch_or(&work->not_finite, 1, __ATOMIC_RELAXED);
}

static void pack_filters(void *argument) {
    job *work = argument;
    for (int64_t i; (i = fetch_add(&work->team.next)) < work->at.groups * strips_of_rows(&work->at);)
        pack_strip(work, i);
}

/* Gather products [start, start + count) of a row; returns the chunks that are not padding. */
static uint32_t gather(const correlation *at, const float *source, int64_t row, int64_t start, int64_t count,
                       float *to) {
    int64_t c = source_channels(at), place = row / at->n;
    const float *image = source + row % at->n * at->h * at->w * at->c;
    const int32_t *rows = at->rows + place / at->ow * at->kh, *columns = at->columns + place % at->ow * at->kw;
    uint32_t active = 0;
    for (int64_t done = 0; done < count;) {
        int64_t tap = (start + done) / c, channel = (start + done) % c, length = min(c - channel, count - done);
        int32_t i = rows[tap / at->kw], j = columns[tap % at->kw];
        if (i >= 0 && j >= 0) {
            memcpy(to + done, image + (i * at->w + j) * at->c + channel, 4 * length);
            active |= chunks_of(done, done + length);
        } else {
            memset(to + done, 0, 4 * length);
        }
        done += length;
    }
    memset(to + count, 0, 4 * (pad(count, CHUNK) - count));
    return active;
}

/* Pack a block of rows and products as [tile][chunk][TILE][CHUNK]; `active` has the chunks of each tile. */
static void pack_rows(const job *work, const float *source, int64_t row, int64_t rows, int64_t start, float *to,
                      uint32_t *active) {
    int64_t count = min(DEPTH, taps(&work->at) * source_channels(&work->at) - start);
    float line[DEPTH];
    memset(to, 0, 4 * pad(rows, TILE) * DEPTH);
    memset(active, 0, sizeof(uint32_t) * BLOCK / TILE);
    for (int64_t r = 0; r < rows; r++) {
        float *tile = to + r / TILE * TILE * DEPTH + r % TILE * CHUNK;
        active[r / TILE] |= gather(&work->at, source, row + r, start, count, line);
        round_operands(line, pad(count, CHUNK), work->clamped);
        for (int64_t i = 0; i < ceil_div(count, CHUNK); i++)
            memcpy(tile + i * TILE * CHUNK, line + i * CHUNK, 4 * CHUNK);
    }
    if (work->not_finite)
        for (int64_t i = 0; i < BLOCK / TILE; i++) active[i] = all_chunks(count);
}

/* Index of the first result of a row, for a group. */
INLINE int64_t place_of_row(const correlation *at, int64_t row, int64_t group) {
    int64_t pixel = row % at->n * at->oh * at->ow + row / at->n;
    return pixel * at->oc + group * result_channels(at);
}

static void compute_rows(const job *work, float *workspace, int64_t group, int64_t row, int64_t strip) {
    const correlation *at = &work->at;
    int64_t rows = min(BLOCK, pixels(at) - row), strips = min(STRIPS, strips_of_rows(at) - strip);
    int64_t tiles = ceil_div(rows, TILE), depth = depth_of_rows(at);
    float *block = workspace, *acc = workspace + BLOCK * DEPTH;
    const float *source = work->source + group * source_channels(at);
    uint32_t active[BLOCK / TILE], first[BLOCK] = {0};
    for (int64_t r = 0; r < rows; r++) first[r] = (uint32_t)place_of_row(at, row + r, group);
    memset(acc, 0, 4 * tiles * strips * TILE * STRIP);
    for (int64_t start = 0; start < depth; start += DEPTH) {
        pack_rows(work, source, row, rows, start, block, active);
        for (int64_t s = 0; s < strips; s++) {
            const float *b = work->packed + ((group * strips_of_rows(at) + strip + s) * depth + start) * STRIP;
            for (int64_t i = 0; i < tiles; i++)
                multiply(work, block + i * TILE * DEPTH, b, active[i], start / CHUNK, first + i * TILE,
                         (strip + s) * STRIP, acc + (s * tiles + i) * TILE * STRIP);
        }
    }
    for (int64_t s = 0; s < strips; s++)
        for (int64_t r = 0; r < rows; r++) {
            int64_t column = (strip + s) * STRIP;
            copy_out(acc + (s * tiles + r / TILE) * TILE * STRIP + r % TILE * STRIP,
                     min(STRIP, result_channels(at) - column), work->out + place_of_row(at, row + r, group) + column);
        }
}

INLINE float *acquire_workspace(job *work, int64_t size) {
    return work->workspaces + fetch_add(&work->team.next_slot) * size;
}

/* Floats in the workspace of a thread, for either kind of results. */
INLINE int64_t workspace_size(void) { return max(BLOCK, STRIPS * STRIP) * DEPTH + BLOCK * STRIPS * STRIP; }

static void run_rows(void *argument) {
    job *work = argument;
    const correlation *at = &work->at;
    float *workspace = acquire_workspace(work, workspace_size());
    int64_t blocks = ceil_div(pixels(at), BLOCK), across = ceil_div(strips_of_rows(at), STRIPS);
    for (int64_t i; (i = fetch_add(&work->team.next)) < at->groups * across * blocks;)
        compute_rows(work, workspace, i / (across * blocks), i % blocks * BLOCK, i / blocks % across * STRIPS);
}

/* ---- gradients of filters: rows are output channels, columns taps and input channels ----------------------------- */

INLINE int64_t depth_of_filters(const correlation *at) { return pad(pixels(at), CHUNK); }
INLINE int64_t tiles_of_filters(const correlation *at) { return ceil_div(result_channels(at), TILE); }
INLINE int64_t columns_of_filters(const correlation *at) { return taps(at) * source_channels(at); }

/* Pack the gradient of one group and tile as [chunk][TILE][CHUNK]. */
static void pack_tile(job *work, int64_t unit) {
    const correlation *at = &work->at;
    int64_t tiles = tiles_of_filters(at), group = unit / tiles, channel = unit % tiles * TILE;
    int64_t rows = min(TILE, result_channels(at) - channel), depth = depth_of_filters(at);
    float *to = work->packed + unit * depth * TILE;
    uint32_t found = 0;
    for (int64_t start = 0; start < depth; start += CHUNK, to += TILE * CHUNK) {
        int64_t count = min(CHUNK, pixels(at) - start);
        memset(to, 0, 4 * TILE * CHUNK);
        for (int64_t k = 0; k < count; k++) {
            const float *from = work->gradient + place_of_row(at, start + k, group) + channel;
            for (int64_t r = 0; r < rows; r++) to[r * CHUNK + k] = from[r];
        }
        found |= round_operands(to, TILE * CHUNK, work->clamped);
    }
    if (found) __atomic_fetch_or(&work->not_finite, 1, __ATOMIC_RELAXED);
}

static void pack_gradient(void *argument) {
    job *work = argument;
    for (int64_t i; (i = fetch_add(&work->team.next)) < work->at.groups * tiles_of_filters(&work->at);)
        pack_tile(work, i);
}

/* Pack pixels [start, start + count) of some columns as [DEPTH][STRIP]; returns the chunks that are not padding. */
static uint32_t pack_columns(const job *work, const float *source, int64_t column, int64_t start, float *to) {
    const correlation *at = &work->at;
    int64_t c = source_channels(at), columns = min(STRIP, columns_of_filters(at) - column);
    int64_t count = min(DEPTH, pixels(at) - start);
    uint32_t active = 0;
    memset(to, 0, 4 * pad(count, CHUNK) * STRIP);
    for (int64_t done = 0; done < columns;) {
        int64_t tap = (column + done) / c, channel = (column + done) % c, length = min(c - channel, columns - done);
        for (int64_t k = 0; k < count; k++) {
            int64_t place = (start + k) / at->n, image = (start + k) % at->n;
            int32_t i = at->rows[place / at->ow * at->kh + tap / at->kw];
            int32_t j = at->columns[place % at->ow * at->kw + tap % at->kw];
            if (i < 0 || j < 0) continue;
            memcpy(to + k * STRIP + done, source + ((image * at->h + i) * at->w + j) * at->c + channel, 4 * length);
            active |= 1u << k / CHUNK;
        }
        done += length;
    }
    round_operands(to, pad(count, CHUNK) * STRIP, work->clamped);
    return work->not_finite ? all_chunks(count) : active;
}

static void compute_filters(const job *work, float *workspace, int64_t group, int64_t tile, int64_t strip) {
    const correlation *at = &work->at;
    int64_t all = columns_of_filters(at), depth = depth_of_filters(at);
    int64_t tiles = min(BLOCK / TILE, tiles_of_filters(at) - tile), strips = min(STRIPS, ceil_div(all, STRIP) - strip);
    float *block = workspace, *acc = workspace + STRIPS * STRIP * DEPTH;
    const float *source = work->source + group * source_channels(at);
    int64_t row = group * result_channels(at) + tile * TILE, rows = min(tiles * TILE, (group + 1) * result_channels(at) - row);
    uint32_t first[BLOCK];
    for (int64_t r = 0; r < BLOCK; r++) first[r] = (uint32_t)((row + r) * all);
    memset(acc, 0, 4 * tiles * strips * TILE * STRIP);
    for (int64_t start = 0; start < depth; start += DEPTH)
        for (int64_t s = 0; s < strips; s++) {
            uint32_t active = pack_columns(work, source, (strip + s) * STRIP, start, block);
            for (int64_t i = 0; i < tiles; i++) {
                const float *a = work->packed + ((group * tiles_of_filters(at) + tile + i) * depth + start) * TILE;
                multiply(work, a, block, active, start / CHUNK, first + i * TILE, (strip + s) * STRIP,
                         acc + (s * tiles + i) * TILE * STRIP);
            }
        }
    for (int64_t s = 0; s < strips; s++)
        for (int64_t r = 0; r < rows; r++) {
            int64_t column = (strip + s) * STRIP;
            copy_out(acc + (s * tiles + r / TILE) * TILE * STRIP + r % TILE * STRIP, min(STRIP, all - column),
                     work->out + (row + r) * all + column);
        }
}

static void run_filters(void *argument) {
    job *work = argument;
    const correlation *at = &work->at;
    float *workspace = acquire_workspace(work, workspace_size());
    int64_t blocks = ceil_div(tiles_of_filters(at), BLOCK / TILE);
    int64_t across = ceil_div(ceil_div(columns_of_filters(at), STRIP), STRIPS);
    for (int64_t i; (i = fetch_add(&work->team.next)) < at->groups * across * blocks;)
        compute_filters(work, workspace, i / (across * blocks), i % blocks * (BLOCK / TILE), i / blocks % across * STRIPS);
}

/* ---- interface ------------------------------------------------------------------------------------------------- */

/* The pixel of the input that tap p meets at pixel i of the output. */
INLINE int32_t forward_source(int64_t i, int64_t p, int64_t stride, int64_t padding, int64_t dilation, int64_t size) {
    int64_t at = i * stride - padding + p * dilation;
    return at >= 0 && at < size ? (int32_t)at : -1;
}

/* The pixel of the output whose tap k - 1 - p meets pixel i of the input. */
INLINE int32_t backward_source(int64_t i, int64_t p, int64_t k, int64_t stride, int64_t padding, int64_t dilation,
                               int64_t size) {
    int64_t at = i + padding - (k - 1 - p) * dilation;
    return at >= 0 && at % stride == 0 && at / stride < size ? (int32_t)(at / stride) : -1;
}

static correlation forward_of(const shape *s, int32_t *tables) {
    correlation at = {s->n, s->h, s->w, s->c, s->oh, s->ow, s->oc, s->kh, s->kw, s->groups, tables, tables + s->oh * s->kh};
    for (int64_t i = 0; i < s->oh * s->kh; i++)
        at.rows[i] = forward_source(i / s->kh, i % s->kh, s->sh, s->ph, s->dh, s->h);
    for (int64_t i = 0; i < s->ow * s->kw; i++)
        at.columns[i] = forward_source(i / s->kw, i % s->kw, s->sw, s->pw, s->dw, s->w);
    return at;
}

static correlation backward_of(const shape *s, int32_t *tables) {
    correlation at = {s->n, s->oh, s->ow, s->oc, s->h, s->w, s->c, s->kh, s->kw, s->groups, tables, tables + s->h * s->kh};
    for (int64_t i = 0; i < s->h * s->kh; i++)
        at.rows[i] = backward_source(i / s->kh, i % s->kh, s->kh, s->sh, s->ph, s->dh, s->oh);
    for (int64_t i = 0; i < s->w * s->kw; i++)
        at.columns[i] = backward_source(i / s->kw, i % s->kw, s->kw, s->sw, s->pw, s->dw, s->ow);
    return at;
}

INLINE int64_t table_size(const shape *s) { return pad(max(s->oh, s->h) * s->kh + max(s->ow, s->w) * s->kw, LANES); }

/* Floats of the packed operand: filters for y or dx, the gradient for dw. */
static int64_t packed_size(const shape *s) {
    int64_t c = s->c / s->groups, oc = s->oc / s->groups, taps = s->kh * s->kw;
    int64_t y = pad(taps * c, CHUNK) * pad(oc, STRIP), dx = pad(taps * oc, CHUNK) * pad(c, STRIP);
    return s->groups * max(max(y, dx), pad(s->n * s->oh * s->ow, CHUNK) * pad(oc, TILE));
}

/* Bytes of scratch for either pass. */
int64_t convolve_half_partials_scratch(const shape *s, int threads) {
    return 4 * (table_size(s) + packed_size(s) + threads * workspace_size());
}

static job set_up(const shape *s, float *scratch, int clamped, int threads, parallel_fn parallel) {
    float *packed = scratch + table_size(s);
    return (job){.team = {.threads = threads, .parallel = parallel},
                 .packed = packed,
                 .workspaces = packed + packed_size(s),
                 .clamped = clamped};
}

static void run(job *work, void (*pack)(void *), void (*compute)(void *)) {
    work->not_finite = 0;
    run_on_team(&work->team, pack, work);
    run_on_team(&work->team, compute, work);
}

/* Compute y from x and the filters w, [oc][kh][kw][c / groups]; `keys` has one for each chunk, or is NULL. */
int convolve_half_partials_forward(const shape *s, const float *x, const float *w, float *y, const uint64_t *keys,
                                   int clamped, float *scratch, int threads, parallel_fn parallel) {
    job work = set_up(s, scratch, clamped, threads, parallel);
    work.at = forward_of(s, (int32_t *)scratch);
    work.source = x, work.filters = w, work.out = y, work.keys = keys;
    run(&work, pack_filters, run_rows);
    return 0;
}

/* Compute dx and dw, unless they are NULL, from x, w and the gradient g of y; each has keys, or NULL. */
int convolve_half_partials_backward(const shape *s, const float *x, const float *w, const float *g, float *dx,
                                    float *dw, const uint64_t *dx_keys, const uint64_t *dw_keys, int clamped,
                                    float *scratch, int threads, parallel_fn parallel) {
    job work = set_up(s, scratch, clamped, threads, parallel);
    if (dx) {
        work.at = backward_of(s, (int32_t *)scratch);
        work.source = g, work.filters = w, work.out = dx, work.keys = dx_keys, work.turned = 1;
        run(&work, pack_filters, run_rows);
    }
    if (dw) {
        work.at = forward_of(s, (int32_t *)scratch);
        work.source = x, work.gradient = g, work.out = dw, work.keys = dw_keys;
        run(&work, pack_gradient, run_filters);
    }
    return 0;
}
