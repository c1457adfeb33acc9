/* Decode boxes of JPEGs with a libjpeg that is already loaded, and resize them: the rest is parsed, but neither
 * transformed nor converted, and nothing below the box is read.
 *
 * No header of libjpeg is needed. The structures below are the public part of its ABI 6.2; the library compares their
 * size and rejects any other ABI. An error or a warning ends decoding, and the caller decodes in another way.
 */
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "resize.h"

enum { ABI = 62, STATE_BYTES = 632, RGB = 2, FAST_TRANSFORM = 1, LINES = 4, TABLES = 12 };

typedef struct decoder decoder;

typedef struct {
    void (*error_exit)(decoder *);
    void (*emit_message)(decoder *, int level);
    void (*output_message)(decoder *);
    uint8_t others[512]; /* more than the library uses */
    jmp_buf failed;
} handlers;

struct decoder {
    handlers *error;
    void *memory, *progress, *client;
    int is_decoder, state;
    void *source;
    unsigned image_width, image_height;
    int num_components, color_space, out_color_space;
    unsigned scale_num, scale_denom;
    double gamma;
    int buffered, raw, transform, smooth_upsampling, smooth_blocks;
    int quantize, dither, two_pass, num_colors, passes[3];
    unsigned output_width, output_height;
    int out_color_components, output_components, lines_at_once, actual_colors;
    void *colormap;
    unsigned line;
    int input_scan;
    unsigned input_row;
    int output_scan;
    unsigned output_row;
    void *coefficient_bits;
    void *tables[TABLES]; /* quantization, Huffman */
};

/* Functions of the library, in the order of kernels/jpeg_region.py. */
typedef struct {
    handlers *(*std_error)(handlers *);
    void (*create)(decoder *, int abi, size_t bytes);
    void (*mem_src)(decoder *, const uint8_t *data, unsigned long length);
    int (*read_header)(decoder *, int require_image);
    int (*start)(decoder *);
    void (*crop)(decoder *, unsigned *left, unsigned *width);
    unsigned (*skip)(decoder *, unsigned lines);
    unsigned (*read)(decoder *, uint8_t **lines, unsigned count);
    void (*abort)(decoder *);
    void (*destroy)(decoder *);
} library;

/* Sizes in pixels of the scaled image. On return, `left` and `columns` are what was decoded, at least as requested. */
typedef struct {
    int64_t height, width, scale, top, left, rows, columns;
} region;

static void fail(decoder *from) { longjmp(from->error->failed, 1); }
static void fail_on_warning(decoder *from, int level) { if (level < 0) fail(from); }
static void ignore(decoder *from) { (void)from; }

static void open_image(const library *jpeg, decoder *from, const uint8_t *data, int64_t length, const region *part) {
    jpeg->mem_src(from, data, (unsigned long)length);
    jpeg->read_header(from, 1);
    from->out_color_space = RGB;
    from->scale_num = 1;
    from->scale_denom = (unsigned)part->scale;
    from->transform = FAST_TRANSFORM;
    from->smooth_upsampling = 0;
    jpeg->start(from);
    if (from->output_height != part->height || from->output_width != part->width) fail(from);
}

static void read_box(const library *jpeg, decoder *from, region *part, uint8_t *target, int64_t capacity) {
    unsigned left = (unsigned)part->left, columns = (unsigned)part->columns, top = (unsigned)part->top;
    unsigned end = top + (unsigned)part->rows;
    jpeg->crop(from, &left, &columns);
    int64_t stride = (int64_t)columns * CHANNELS;
    if (part->rows * stride > capacity) fail(from);
    if (top) jpeg->skip(from, top);
    while (from->line < end) {
        uint8_t *lines[LINES];
        unsigned count = end - from->line < LINES ? end - from->line : LINES;
        for (unsigned n = 0; n < count; n++) lines[n] = target + (from->line - top + n) * stride;
        jpeg->read(from, lines, count);
    }
    part->left = left;
    part->columns = columns;
}

/* A decoder for several images: libjpeg tests the CPU for each new one, which takes long in virtual machines. */
typedef struct {
    handlers error;
    union { decoder public; uint8_t bytes[STATE_BYTES]; } state;
} session;

/* Returns NULL if the library has another ABI. */
static decoder *open_decoder(const library *jpeg, session *memory) {
    memset(&memory->state, 0, sizeof memory->state);
    decoder *from = &memory->state.public;
    from->error = jpeg->std_error(&memory->error);
    memory->error.error_exit = fail;
    memory->error.emit_message = fail_on_warning;
    memory->error.output_message = ignore;
    if (setjmp(memory->error.failed)) {
        if (from->memory) jpeg->destroy(from);
        return NULL;
    }
    jpeg->create(from, ABI, sizeof memory->state);
    return from;
}

/* Returns 1 if the box cannot be decoded. No table of an image may be used for the next one. */
static int decode(const library *jpeg, decoder *from, const uint8_t *data, int64_t length, region *part,
                  uint8_t *target, int64_t capacity) {
    int failed = setjmp(from->error->failed);
    if (!failed) {
        open_image(jpeg, from, data, length, part);
        read_box(jpeg, from, part, target, capacity);
    }
    jpeg->abort(from);
    memset(from->tables, 0, sizeof from->tables);
    return failed;
}

/* Returns 1 if the box cannot be decoded. It must be inside the image. */
int convolve_decode_region(const library *jpeg, const uint8_t *data, int64_t length, region *part, uint8_t *target,
                           int64_t capacity) {
    session memory;
    decoder *from = open_decoder(jpeg, &memory);
    if (!from) return 1;
    int failed = decode(jpeg, from, data, length, part, target, capacity);
    jpeg->destroy(from);
    return failed;
}

/* An image, the box to decode, and the weights and the target to resize it; on return, whether that failed. */
typedef struct {
    const uint8_t *data;
    int64_t length;
    region part;
    const axis *across, *down;
    uint8_t *target;
    int64_t failed;
} crop;

/* Decode boxes one after the other into `pixels` and resize each. */
int convolve_decode_crops(const library *jpeg, crop *crops, int count, uint8_t *pixels, int64_t capacity) {
    session memory;
    decoder *from = open_decoder(jpeg, &memory);
    for (crop *one = crops; one < crops + count; one++) {
        int64_t left = one->part.left, columns = one->part.columns;
        one->failed = !from || decode(jpeg, from, one->data, one->length, &one->part, pixels, capacity);
        if (one->failed) continue;
        const uint8_t *box = pixels + (left - one->part.left) * CHANNELS;
        job work = {box, one->part.columns * CHANNELS, one->part.rows, columns, one->across, one->down, one->target};
        one->failed = resize_image(&work);
    }
    if (from) jpeg->destroy(from);
    return 0;
}
