/* A replacement of GOMP_parallel with plain threads, which ThreadSanitizer understands; an OpenMP library has barriers
 * that it cannot see. */
#include <pthread.h>

#define MOST_THREADS 16

typedef struct {
    void (*function)(void *);
    void *argument;
} call;

static void *run(void *data) {
    call *work = data;
    work->function(work->argument);
    return 0;
}

void parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags) {
    pthread_t team[MOST_THREADS];
    call work = {function, argument};
    unsigned started = 0;
    (void)flags;
    while (started + 1 < threads && started < MOST_THREADS && !pthread_create(team + started, 0, run, &work))
        started++;
    function(argument);
    while (started)
        pthread_join(team[--started], 0);
}
