/* Resize images that are decoded already; the arithmetic is in resize.h. */
#include "resize.h"

/* Returns 1 if memory allocation fails. */
int convolve_resize(const job *jobs, int count) {
    for (const job *work = jobs; work < jobs + count; work++)
        if (resize_image(work)) return 1;
    return 0;
}
