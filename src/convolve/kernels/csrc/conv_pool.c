/* Convolution, bias, 2x2 max-pool and ReLU in one pass, and their gradients in another; float32, channels last.
 *
 * Forward. The four sums bias + sum(w x) of each pool window are computed together, in registers, for a few vectors of
 * output channels. Only max(0, maximum) is written, with the index (0 to 3, row by row) of the pixel that had the
 * maximum, or 4 if ReLU zeroed it. Of equal values the first wins, and NaN wins over all, as in torch.
 *
 * Backward. The pool passes each gradient to one pixel of four, and ReLU passes only those of positive results. So
 *
 *     dw[c] = sum of g x(around its pixel)         over the windows of channel c that ReLU kept
 *     dx(around a pixel) = sum of g w[c]           over the channels whose maximum was this pixel
 *
 * are sums over lists of (offset, g), exact, with at most a quarter of the multiplications of a convolution. Lists are
 * made for as many images as fit the L1 cache.
 *
 * Images are copied into zero-padded memory. A window that extends over the edge (ceil_mode) reads its pixels twice,
 * which changes neither its maximum nor the index of the first maximum.
 *
 * Results do not depend on the number of threads: each image is computed by one thread, and weight gradients are summed
 * over groups of images whose number depends on the batch size only, then group by group.
 */
#include "conv_pool.h"

#define SUMS 13            /* vectors that one pass over a list accumulates */
#define COLUMN 7           /* kernel rows that one pass handles if a row is one vector */
#define WEIGHT_BYTES 12288 /* kernel rows used together: they and some pixels fit the L1 cache */

typedef int8_t bytes __attribute__((vector_size(LANES)));

#if defined(__AVX512F__) || defined(__x86_64__) && LANES < 16
#define HOLD(v) __asm__("" : "+v"(v)) /* keep in a register: gcc would reload it for each use */
#else
#define HOLD(v)
#endif


/* ---- forward --------------------------------------------------------------------------------------------------- */

/* Weights as [block of channels][kernel element][channel], then all biases; lanes without a channel are zero. */
static void pack_forward(const shape *s, const float *w, const float *bias, float *packed) {
    int64_t k = kernel_of(s), vectors = ceil_div(s->co, LANES), blocks = ceil_div(vectors, BLOCK);
    memset(packed, 0, 4 * lanes_of(s) * (k + 1));
    for (int64_t b = 0, first = 0; b < blocks; b++) {
        int64_t lanes = (vectors / blocks + (b < vectors % blocks)) * LANES;
        for (int64_t c = first; c < min(first + lanes, s->co); c++)
            for (int64_t i = 0; i < k; i++) packed[first * k + i * lanes + c - first] = w[c * k + i];
        first += lanes;
    }
    memcpy(packed + lanes_of(s) * k, bias, 4 * s->co);
}

/* Add `rows` kernel rows of `length` elements to the four sums of one window, for v vectors of channels. */
INLINE void add_rows(const int v, const float *x, const int32_t *at, int64_t row, int64_t length, int64_t rows,
                     const float *w, window sums) {
    const float *pixels[4] = {x + at[0], x + at[1], x + at[2], x + at[3]};
    window a;
    for (int p = 0; p < 4; p++)
        for (int i = 0; i < v; i++) a[p][i] = sums[p][i];
    for (int64_t k = 0; k < rows; k++)
        for (int64_t e = k * row; e < k * row + length; e++, w += v * LANES) {
            vector t[BLOCK];
            for (int i = 0; i < v; i++) {
                t[i] = LOAD(w + i * LANES);
                HOLD(t[i]);
            }
            for (int p = 0; p < 4; p++) {
                vector pixel = pixels[p][e] - (vector){0};
                for (int i = 0; i < v; i++) a[p][i] += pixel * t[i];
            }
        }
    for (int p = 0; p < 4; p++)
        for (int i = 0; i < v; i++) sums[p][i] = a[p][i];
}

/* Store a vector or its first `left` elements; a whole vector needs no function call. */
INLINE void store_some(void *to, const void *from, const size_t size, int64_t left) {
    if (left >= LANES)
        memcpy(to, from, LANES * size);
    else
        memcpy(to, from, (size_t)left * size);
}

/* Write max(0, maximum) of each window and its index; `left` channels remain to be written. */
INLINE void finish(const int v, window sums, int64_t left, float *y, int8_t *argmax) {
    for (int i = 0; i < v; i++, left -= LANES) {
        vector best = sums[0][i];
        bitmask chosen = {0};
        for (int p = 1; p < 4; p++) {
            vector one = sums[p][i];
            bitmask more = (one > best) | (one != one);
            best = blend(more, one, best);
            chosen = (chosen & ~more) | (more & p);
        }
        chosen = (chosen & ~(best <= 0)) | ((best <= 0) & CLOSED);
        best = blend(best < 0, (vector){0}, best);
        bytes narrow = __builtin_convertvector(chosen, bytes);
        store_some(y + i * LANES, &best, 4, left);
        if (argmax) store_some(argmax + i * LANES, &narrow, 1, left);
    }
}

/* One block of channels of one image. If the weights are large, all windows use some kernel rows before the next
 * rows. */
INLINE void run_block(const int v, const shape *s, workspace *ws, const float *w, const float *bias, int64_t left,
                      float *y, int8_t *argmax) {
    int64_t length = s->kw * s->ci, row = row_of(s), step = max(1, WEIGHT_BYTES / (length * v * LANES * 4));
    for (int64_t k = 0; k < s->kh; k += step)
        for (int64_t cell = 0; cell < windows_of(s); cell++) {
            int64_t rows = min(step, s->kh - k);
            window begun;
            vector(*sums)[BLOCK] = step < s->kh ? ws->windows[cell] : begun;
            for (int i = 0; !k && i < v; i++)
                sums[0][i] = sums[1][i] = sums[2][i] = sums[3][i] = LOAD(bias + i * LANES);
            const float *some = w + k * length * v * LANES;
            add_rows(v, ws->images + k * row, ws->pixels + 4 * cell, row, length, rows, some, sums);
            if (k + rows == s->kh) finish(v, sums, left, y + cell * s->co, argmax ? argmax + cell * s->co : NULL);
        }
}

static void run_image(const job *work, int64_t image, workspace *ws) {
    const shape *s = work->s;
    int64_t k = kernel_of(s), vectors = ceil_div(s->co, LANES), blocks = ceil_div(vectors, BLOCK);
    const float *bias = work->packed + lanes_of(s) * k;
    copy_in(s, 1, work->x + image * s->h * s->w * s->ci, ws->images);
    for (int64_t b = 0, first = 0; b < blocks; b++) {
        int64_t v = vectors / blocks + (b < vectors % blocks), out = image * windows_of(s) * s->co + first;
        const float *w = work->packed + first * k;
        int8_t *argmax = work->argmax ? work->argmax + out : NULL;
#define CASE(V) case V: run_block(V, s, ws, w, bias + first, s->co - first, work->y + out, argmax); break;
        switch (v) {
            CASE(1) CASE(2) CASE(3)
#if LANES == 16
            CASE(4) CASE(5) CASE(6)
#endif
        }
#undef CASE
        first += v * LANES;
    }
}

static void run_forward(void *argument) {
    job *work = argument;
    workspace ws;
    acquire_workspace(work, &ws);
    for (int64_t i; (i = fetch_add(&work->team.next)) < work->s->n;) run_image(work, i, &ws);
}

/* `argmax` may be NULL if no gradients are needed. */
int convolve_conv_pool_forward(const shape *s, const float *x, const float *w, const float *bias, float *y,
                               int8_t *argmax, char *scratch, int threads, parallel_fn parallel) {
    job work = {.s = s, .x = x, .y = y, .argmax = argmax, .team = {s->n > 1 ? threads : 1, parallel}};
    layout_scratch(&work, scratch);
    pack_forward(s, w, bias, work.packed);
    run_on_team(&work.team, run_forward, &work);
    return 0;
}

/* ---- backward -------------------------------------------------------------------------------------------------- */

/* out[i] += sum over the list of g * base[at + i * stride ...], for v vectors. */
INLINE void add_list(const int v, int64_t stride, int64_t n, const item *list, const float *base, float *out) {
    vector a[SUMS];
    for (int i = 0; i < v; i++) a[i] = LOAD(out + i * LANES);
    for (int64_t j = 0; j < n; j++) {
        const float *p = base + list[j].at;
        vector g = list[j].g - (vector){0};
        for (int i = 0; i < v; i++) a[i] += g * LOAD(p + i * stride);
    }
    for (int i = 0; i < v; i++) STORE(out + i * LANES, a[i]);
}

/* The same for a number of vectors known at run time: those of one line, or one from each of several rows. */
#define CASE(V) case V: add_list(V, stride, n, list, base, out); break;
static void add_line(int64_t vectors, int64_t n, const item *list, const float *base, float *out) {
    const int64_t stride = LANES;
    for (; vectors > SUMS; vectors -= SUMS, base += SUMS * LANES, out += SUMS * LANES)
        add_list(SUMS, stride, n, list, base, out);
    switch (vectors) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13)
    }
}

static void add_column(int64_t rows, int64_t stride, int64_t n, const item *list, const float *base, float *out) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) }
}
#undef CASE

/* Append the gradients of one window to the lists of their channels. */
static void list_by_channel(const shape *s, const int32_t at[4], const float *g, const int8_t *argmax, int64_t cells,
                            workspace *ws) {
    int32_t begin[CLOSED + 1] = {at[0], at[1], at[2], at[3], 0};
    for (int64_t c = 0; c < s->co; c++) {
        ws->by_channel[c * cells + ws->counts[c]] = (item){begin[argmax[c]], g[c]};
        ws->counts[c] += argmax[c] < CLOSED;
    }
}

/* Sort the gradients of one window by pixel; those that ReLU zeroed come last, after all ends. Five 12-bit counters
 * are packed in one register: in memory, each update would wait for the one before. */
static void list_by_pixel(const shape *s, const float *g, const int8_t *argmax, item *list, int32_t ends[4]) {
    uint64_t next = 0;
    int32_t line = (int32_t)line_of(s);
    for (int64_t c = 0; c < s->co; c++) next += 1ull << 12 * argmax[c];
    next *= 0x1001001001000ull;
    for (int32_t c = 0; c < s->co; c++) {
        list[next >> 12 * argmax[c] & 4095] = (item){c * line, g[c]};
        next += 1ull << 12 * argmax[c];
    }
    for (int p = 0; p < 4; p++) ends[p] = next >> 12 * p & 4095;
}

static void make_lists(const job *work, int64_t first, int64_t count, workspace *ws) {
    const shape *s = work->s;
    int64_t inner = windows_of(s), cells = count * inner;
    memset(ws->counts, 0, 4 * s->co);
    for (int64_t cell = 0; cell < cells; cell++) {
        const float *g = work->g + (first * inner + cell) * s->co;
        const int8_t *argmax = work->argmax + (first * inner + cell) * s->co;
        list_by_channel(s, ws->pixels + 4 * cell, g, argmax, cells, ws);
        if (work->dx) list_by_pixel(s, g, argmax, ws->by_pixel + cell * s->co, ws->ends + 4 * cell);
    }
}

/* Add the weight and bias gradients of some images, which are already padded, to the sums of a group. */
static void add_weights(const shape *s, int64_t count, const workspace *ws, float *dw, float *db) {
    int64_t line = line_of(s), cells = count * windows_of(s), row = row_of(s);
    for (int64_t c = 0; c < s->co; c++) {
        const item *list = ws->by_channel + c * cells;
        int64_t n = ws->counts[c];
        float *out = dw + c * s->kh * line, total = 0;
        for (int64_t i = 0; i < n; i++) total += list[i].g;
        db[c] += total;
        if (line == LANES && s->kh <= COLUMN)
            add_column(s->kh, row, n, list, ws->images, out);
        else
            for (int64_t k = 0; k < s->kh; k++) add_line(line / LANES, n, list, ws->images + k * row, out + k * line);
    }
}

/* Input gradients of some images, padded; `packed` has a line for each kernel row and channel. Neighboring pixels
 * overlap and would wait for each other, so all first pixels of windows come before all second ones. */
static void add_inputs(const shape *s, int64_t count, const workspace *ws, const float *packed) {
    int64_t line = line_of(s), cells = count * windows_of(s), row = row_of(s);
    memset(ws->images, 0, 4 * count * size_of(s));
    for (int64_t k = 0; k < s->kh; k++)
        for (int p = 0; p < 4; p++)
            for (int64_t cell = 0; cell < cells; cell++) {
                const int32_t *ends = ws->ends + 4 * cell;
                int64_t begin = p ? ends[p - 1] : 0, n = ends[p] - begin;
                const item *list = ws->by_pixel + cell * s->co + begin;
                float *out = ws->images + ws->pixels[4 * cell + p] + k * row;
                if (n) add_line(line / LANES, n, list, packed + k * s->co * line, out);
            }
}

static void run_group(const job *work, int64_t group, workspace *ws) {
    const shape *s = work->s;
    int64_t each = group_of(s), some = some_of(s), size = s->h * s->w * s->ci, end = min((group + 1) * each, s->n);
    float *dw = work->sums + group * sums_size(s), *db = dw + s->kh * line_of(s) * s->co;
    memset(dw, 0, 4 * sums_size(s));
    memset(ws->images + some * size_of(s), 0, 4 * LANES);
    for (int64_t first = group * each; first < end; first += some) {
        int64_t count = min(some, end - first);
        make_lists(work, first, count, ws);
        copy_in(s, count, work->x + first * size, ws->images);
        add_weights(s, count, ws, dw, db);
        if (!work->dx) continue;
        add_inputs(s, count, ws, work->packed);
        copy_out(s, count, ws->images, work->dx + first * size);
    }
}

static void run_backward(void *argument) {
    job *work = argument;
    int64_t groups = ceil_div(work->s->n, group_of(work->s));
    workspace ws;
    acquire_workspace(work, &ws);
    for (int64_t i; (i = fetch_add(&work->team.next)) < groups;) run_group(work, i, &ws);
}

/* Sum over all groups in order, one output channel at a time. */
static void run_total(void *argument) {
    job *work = argument;
    const shape *s = work->s;
    int64_t groups = ceil_div(s->n, group_of(s)), line = line_of(s), length = s->kw * s->ci;
    for (int64_t c; (c = fetch_add(&work->team.next)) < s->co;) {
        float *first = work->sums + c * s->kh * line, *bias = work->sums + s->kh * line * s->co + c;
        for (int64_t i = 1; i < groups; i++) {
            const float *more = first + i * sums_size(s);
            for (int64_t e = 0; e < s->kh * line; e++) first[e] += more[e];
            *bias += bias[i * sums_size(s)];
        }
        for (int64_t k = 0; k < s->kh; k++) memcpy(work->dw + (c * s->kh + k) * length, first + k * line, 4 * length);
        work->db[c] = *bias;
    }
}

/* Weights as [kernel row][channel][element], each line padded with zeros. */
static void pack_backward(const shape *s, const float *w, float *packed) {
    int64_t line = line_of(s), length = s->kw * s->ci;
    memset(packed, 0, 4 * s->kh * s->co * line);
    for (int64_t k = 0; k < s->kh; k++)
        for (int64_t c = 0; c < s->co; c++)
            memcpy(packed + (k * s->co + c) * line, w + (c * s->kh + k) * length, 4 * length);
}

/* `dx` may be NULL if the input's gradient is not needed. */
int convolve_conv_pool_backward(const shape *s, const float *x, const float *w, const float *g, int8_t *argmax,
                                float *dx, float *dw, float *db, char *scratch, int threads, parallel_fn parallel) {
    job work = {.s = s, .x = x, .g = g, .argmax = argmax, .dx = dx, .dw = dw, .db = db};
    work.team = (omp_team){s->n > 1 ? threads : 1, parallel};
    layout_scratch(&work, scratch);
    if (dx) pack_backward(s, w, work.packed);
    run_on_team(&work.team, run_backward, &work);
    run_on_team(&work.team, run_total, &work);
    return 0;
}
