/* Decode a box of a JPEG with a libjpeg that is already loaded: the rest is parsed, but neither transformed nor
 * converted, and nothing below the box is read.
 *
 * No header of libjpeg is needed. The structures below are the public part of its ABI 6.2; the library compares their
 * size and rejects any other ABI. An error or a warning ends decoding, and the caller decodes in another way.
 */
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ABI = 62, STATE_BYTES = 632, RGB = 2, FAST_TRANSFORM = 1, CHANNELS = 3, LINES = 4 };

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

/* Returns 1 if the box cannot be decoded. It must be inside the image. */
int convolve_decode_region(const library *jpeg, const uint8_t *data, int64_t length, region *part, uint8_t *target,
                           int64_t capacity) {
    handlers error;
    union { decoder public; uint8_t bytes[STATE_BYTES]; } state;
    memset(&state, 0, sizeof state);
    decoder *from = &state.public;
    from->error = jpeg->std_error(&error);
    error.error_exit = fail;
    error.emit_message = fail_on_warning;
    error.output_message = ignore;
    int failed = setjmp(error.failed);
    if (!failed) {
        jpeg->create(from, ABI, sizeof state);
        open_image(jpeg, from, data, length, part);
        read_box(jpeg, from, part, target, capacity);
    }
    if (from->memory) jpeg->destroy(from);
    return failed;
}
