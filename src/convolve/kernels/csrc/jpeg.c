/* Read many JPEG files, or JPEGs inside larger files, and their image sizes, in one call.
 *
 * Only plain JPEGs are accepted: readable, fitting into memory, with valid markers up to the pixels, gray or three
 * colors of 8 bits, without EXIF data (which may rotate the image). The caller reads all others, so no errors are
 * reported here.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define EXIF_TAG "Exif\0"     /* with the terminating zero of a C string: six bytes */
#define EXIF_SEARCH_BYTES 4096 /* as in data/image_io.py */

enum { FRAME_FIRST = 0xC0, FRAME_LAST = 0xC2, HUFFMAN = 0xC4, START = 0xD8, SCAN = 0xDA, QUANTIZATION = 0xDB,
       RESTART = 0xDD, APP_FIRST = 0xE0, APP_LAST = 0xEF, COMMENT = 0xFE };

/* Location of an image; a negative length means the whole file. */
typedef struct {
    int64_t file, offset, length;
} extent;

/* Its location in memory; a length of zero means that it was not accepted. */
typedef struct {
    int64_t start, length, height, width;
} jpeg;

/* Return the number of bytes read; zero if they are incomplete or do not fit. */
static int64_t read_extent(const char *path, const extent *from, uint8_t *target, int64_t capacity) {
    int64_t size = from->length < 0 ? capacity : from->length;
    if (size > capacity) return 0;
    int handle = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (handle < 0) return 0;
    int64_t count = pread(handle, target, (size_t)size, (off_t)from->offset);
    close(handle);
    int complete = from->length < 0 ? count < capacity : count == size;
    return count > 0 && complete ? count : 0;
}

static int has_exif(const uint8_t *data, int64_t length) {
    const uint8_t *end = data + (length < EXIF_SEARCH_BYTES ? length : EXIF_SEARCH_BYTES);
    for (; end - data >= (int64_t)sizeof EXIF_TAG; data++) {
        data = memchr(data, EXIF_TAG[0], (size_t)(end - data) - sizeof EXIF_TAG + 1);
        if (!data) return 0;
        if (!memcmp(data, EXIF_TAG, sizeof EXIF_TAG)) return 1;
    }
    return 0;
}

static int is_harmless(int marker) {
    return marker == HUFFMAN || marker == QUANTIZATION || marker == RESTART || marker == COMMENT ||
           (marker >= APP_FIRST && marker <= APP_LAST);
}

/* Parse the first frame header: its length, bits, height, width, number of colors, three bytes for each. */
static int read_frame(const uint8_t *frame, int64_t length, jpeg *result) {
    if (result->height || length < 8) return 0;
    int colors = frame[7];
    result->height = frame[3] << 8 | frame[4];
    result->width = frame[5] << 8 | frame[6];
    int known = frame[2] == 8 && (colors == 1 || colors == 3) && length == 8 + 3 * colors;
    return known && result->height && result->width;
}

/* Follow the markers up to the first scan. Returns zero for anything unusual. */
static int read_header(const uint8_t *data, int64_t length, jpeg *result) {
    if (length < 2 || data[0] != 0xFF || data[1] != START) return 0;
    for (int64_t at = 2; at + 4 <= length;) {
        int marker = data[at + 1];
        const uint8_t *segment = data + at + 2;
        int64_t size = segment[0] << 8 | segment[1];
        if (data[at] != 0xFF || size < 2 || at + 2 + size > length) return 0;
        if (marker == SCAN) return result->height > 0;
        if (marker >= FRAME_FIRST && marker <= FRAME_LAST) {
            if (!read_frame(segment, size, result)) return 0;
        } else if (!is_harmless(marker)) {
            return 0;
        }
        at += 2 + size;
    }
    return 0;
}

/* `paths` are concatenated, each terminated by a zero; images are concatenated in `memory`. */
int convolve_read_jpegs(const char *paths, const extent *extents, int count, uint8_t *memory, int64_t capacity,
                        jpeg *result) {
    int64_t used = 0;
    for (int n = 0; n < count; n++, paths += strlen(paths) + 1) {
        uint8_t *data = memory + used;
        int64_t length = read_extent(paths, extents + n, data, capacity - used);
        result[n] = (jpeg){.start = used};
        if (!read_header(data, length, result + n) || has_exif(data, length)) continue;
        result[n].length = length;
        used += length;
    }
    return 0;
}
