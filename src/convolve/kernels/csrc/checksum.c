/* Checksums of memory: for each block the sum of its 32-bit words modulo 2^32. A sum has the same value in any order. */
#include <stdint.h>

void convolve_checksum(const uint32_t *const *blocks, const int64_t *lengths, int64_t count, uint32_t *sums) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t sum = 0;
        for (int64_t j = 0; j < lengths[i]; j++)
            sum += blocks[i][j];
        sums[i] = sum;
    }
}
