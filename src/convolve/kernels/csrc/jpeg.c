/* Reading of many JPEG files, or JPEGs inside larger files, by one call that looks up their sizes as well.
 *
 * Only what is plain is taken: a file that can be read and fits, whose markers follow one another as they should up to
 * the pixels, gray or three colors of 8 bits, not turned by a camera's note. The caller reads everything else itself,
 * so no error has to be told from here.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define NOTE "Exif\0"      /* with the zero that ends every string in C: six bytes */
#define NOTE_WITHIN 4096   /* as in decode.py */

enum { FRAME_FIRST = 0xC0, FRAME_LAST = 0xC2, HUFFMAN = 0xC4, START = 0xD8, SCAN = 0xDA, QUANTA = 0xDB, RESTART = 0xDD,
       NOTES_FIRST = 0xE0, NOTES_LAST = 0xEF, COMMENT = 0xFE };

/* Where a picture lies; a length below zero means the whole file. */
typedef struct {
    int64_t file, offset, length;
} place;

/* Where it is in memory now; a length of zero means that it was not taken. */
typedef struct {
    int64_t start, length, height, width;
} jpeg;

/* The number of bytes; zero where they are not all there or do not fit. */
static int64_t read_place(const char *path, const place *from, uint8_t *target, int64_t room) {
    int64_t wanted = from->length < 0 ? room : from->length;
    if (wanted > room) return 0;
    int handle = open(path, O_RDONLY | O_CLOEXEC);
    if (handle < 0) return 0;
    int64_t count = pread(handle, target, (size_t)wanted, (off_t)from->offset);
    close(handle);
    int complete = from->length < 0 ? count < room : count == wanted;
    return count > 0 && complete ? count : 0;
}

static int has_note(const uint8_t *data, int64_t length) {
    const uint8_t *end = data + (length < NOTE_WITHIN ? length : NOTE_WITHIN);
    for (; end - data >= (int64_t)sizeof NOTE; data++) {
        data = memchr(data, NOTE[0], (size_t)(end - data) - sizeof NOTE + 1);
        if (!data) return 0;
        if (!memcmp(data, NOTE, sizeof NOTE)) return 1;
    }
    return 0;
}

static int is_harmless(int marker) {
    return marker == HUFFMAN || marker == QUANTA || marker == RESTART || marker == COMMENT ||
           (marker >= NOTES_FIRST && marker <= NOTES_LAST);
}

/* The first frame header: its length, bits, height, width, number of colors, three bytes for each. */
static int read_frame(const uint8_t *frame, int64_t length, jpeg *found) {
    if (found->height || length < 8) return 0;
    int colors = frame[7];
    found->height = frame[3] << 8 | frame[4];
    found->width = frame[5] << 8 | frame[6];
    int known = frame[2] == 8 && (colors == 1 || colors == 3) && length == 8 + 3 * colors;
    return known && found->height && found->width;
}

/* Follows the markers up to the first scan; zero for anything unusual. */
static int read_header(const uint8_t *data, int64_t length, jpeg *found) {
    if (length < 2 || data[0] != 0xFF || data[1] != START) return 0;
    for (int64_t at = 2; at + 4 <= length;) {
        int marker = data[at + 1];
        const uint8_t *segment = data + at + 2;
        int64_t size = segment[0] << 8 | segment[1];
        if (data[at] != 0xFF || size < 2 || at + 2 + size > length) return 0;
        if (marker == SCAN) return found->height > 0;
        if (marker >= FRAME_FIRST && marker <= FRAME_LAST) {
            if (!read_frame(segment, size, found)) return 0;
        } else if (!is_harmless(marker)) {
            return 0;
        }
        at += 2 + size;
    }
    return 0;
}

/* `paths` follow one another, each ended by a zero; pictures follow one another in `memory`. */
int convolve_read_jpegs(const char *paths, const place *places, int count, uint8_t *memory, int64_t room, jpeg *found) {
    int64_t used = 0;
    for (int n = 0; n < count; n++, paths += strlen(paths) + 1) {
        uint8_t *data = memory + used;
        int64_t length = read_place(paths, places + n, data, room - used);
        found[n] = (jpeg){.start = used};
        if (!read_header(data, length, found + n) || has_note(data, length)) continue;
        found[n].length = length;
        used += length;
    }
    return 0;
}
