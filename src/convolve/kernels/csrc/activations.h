/* Activations of a vector y, and the gradient of y from the gradient g of the result. Selected by number.
 *
 *     relu     y if y > 0, else 0               g if y > 0, else 0
 *     relu6    6 if y > 6, else relu            g if 0 < y < 6, else 0
 *     silu     y s  with  s = 1 / (1 + e^-y)    g s (1 + y (1 - s))
 *
 * e^x is 2^n e^r with n = x / ln 2, rounded, and e^r as its series up to r^7: |r| is below 0.35, so the truncation
 * error is less than half a unit in the last place. NaN stays NaN.
 */
#include "simd.h"

enum { NONE, RELU, SILU, RELU6 };

#define MOST 6.0f /* of relu6 */

#define MAX_EXPONENT 87.0f
#define TO_INTEGER 12582912.0f /* 1.5 x 2^23: adding this to a float rounds it to an integer */
#define LN2 0.693359375f       /* few digits, so n times it is exact; the rest of ln 2 is below */
#define LN2_REST -2.12194440e-4f

INLINE vector exponential(vector x) {
    for (int i = 0; i < LANES; i++) x[i] = x[i] > MAX_EXPONENT ? MAX_EXPONENT : x[i];
    for (int i = 0; i < LANES; i++) x[i] = x[i] < -MAX_EXPONENT ? -MAX_EXPONENT : x[i];
    vector shifted = x * 1.44269504f + TO_INTEGER, n = shifted - TO_INTEGER;
    vector r = x - n * LN2 - n * LN2_REST;
    vector sum = r * (1 / 5040.0f) + 1 / 720.0f;
    sum = sum * r + 1 / 120.0f;
    sum = sum * r + 1 / 24.0f;
    sum = sum * r + 1 / 6.0f;
    sum = sum * r + 1 / 2.0f;
    sum = sum * r + 1;
    sum = sum * r + 1;
    return sum * (vector)(((bitmask)shifted << 23) + 0x3F800000);
}

INLINE vector activated(const int kind, vector y) {
    if (kind == RELU) return mask(~(y <= 0), y);
    if (kind == SILU) return y / (1 + exponential(-y));
    if (kind == RELU6) return blend(y > MOST, (vector){0} + MOST, mask(~(y <= 0), y));
    return y;
}

INLINE vector let_through(const int kind, vector y, vector g) {
    if (kind == RELU) return mask(~(y <= 0), g);
    if (kind == SILU) {
        vector s = 1 / (1 + exponential(-y));
        return g * (s * (1 + y * (1 - s)));
    }
    if (kind == RELU6) return mask(~((y <= 0) | (y >= MOST)), g);
    return g;
}
