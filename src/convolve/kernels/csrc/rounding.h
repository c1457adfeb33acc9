/* Rounding of one float32, as the integer of its bits without the sign, onto the grid of fp16 or bf16.
 *
 * Nearest, ties to even. fp16 keeps 10 of the 23 mantissa bits, bf16 keeps 7; adding half a step (minus one, plus one
 * if the last kept bit is odd) to the integer of the bits, and clearing the rest, rounds all normal values; the carry
 * into the exponent is correct. bf16 has the exponents of float32, so this holds for its subnormals too. Below 2^-14
 * fp16 has the fixed spacing 2^-24, which is that of float32 in [0.5, 1): adding and subtracting 0.75 rounds there.
 *
 * Stochastic. The same, with uniform random bits in place of the half step: a value is rounded up with a probability
 * equal to its distance from the grid point below. In fp16's subnormal range the distance is compared with a 31-bit
 * number.
 *
 * The random bits h of an element are a hash of two words of a key and its index.
 */
#include <stdint.h>
#include <string.h>

#define LARGEST_FP16 0x477FE000u
#define LARGEST_BF16 0x7F7F0000u

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* a if `mask` is all ones, b if it is zero: compilers vectorize this, but branch on `?:`. */
static inline uint32_t blend_bits(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
static inline uint32_t is_small(uint32_t m) { return (uint32_t)-((int32_t)m < 0x38800000); }

static inline uint32_t hash(uint32_t i, uint32_t a, uint32_t b) {
    uint32_t h = i * 0x9E3779B9u + a;
    h ^= h >> 16;
    h *= 0x7FEB352Du;
    h ^= h >> 15;
    h += b;
    h *= 0x846CA68Bu;
    return h ^ (h >> 16);
}

static inline uint32_t nearest_fp16(uint32_t m) {
    uint32_t normal = (m + 0xFFFu + ((m >> 13) & 1u)) & ~0x1FFFu;
    uint32_t small = bits_of((float_of(m) + 0.75f) - 0.75f);
    return blend_bits(is_small(m), small, normal);
}

static inline uint32_t nearest_bf16(uint32_t m) { return (m + 0x7FFFu + ((m >> 16) & 1u)) & ~0xFFFFu; }

static inline uint32_t stochastic_fp16(uint32_t m, uint32_t h) {
    uint32_t normal = (m + (h >> 19)) & ~0x1FFFu;
    float scaled = float_of(m & is_small(m)) * 16777216.0f;
    int32_t below = (int32_t)scaled;
    int32_t bar = (int32_t)((scaled - (float)below) * 2147483648.0f);
    int32_t up = (int32_t)(h >> 1) < bar;
    uint32_t small = bits_of((float)(below + up) * 5.9604644775390625e-8f);
    return blend_bits(is_small(m), small, normal);
}

static inline uint32_t stochastic_bf16(uint32_t m, uint32_t h) { return (m + (h >> 16)) & ~0xFFFFu; }
