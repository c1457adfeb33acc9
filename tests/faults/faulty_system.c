/* A libc with faults, loaded before the real one (LD_PRELOAD).

   arm(n, error)      the n-th file call from now on fails with this errno, or, with 0, is the last thing the process
                      does: it dies before the call is made. Calls are counted from 0.
   disarm()           no more faults; the number of file calls since arm().
   CLOCK_JUMPS=1      in the environment: the date of this machine jumps by years, back and forth, at every 5th look.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int armed, code;
static long fatal, seen;

void arm(long number, int error) { fatal = number; code = error; seen = 0; armed = 1; }
long disarm(void) { armed = 0; return seen; }

static int strikes(void) {
    if (!armed || seen++ != fatal) return 0;
    if (!code) kill(getpid(), SIGKILL);
    errno = code;
    return 1;
}

#define WRAP(type, name, parameters, arguments)                  \
    type name parameters {                                       \
        static type(*real) parameters;                           \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        return strikes() ? -1 : real arguments;                  \
    }

WRAP(ssize_t, read, (int file, void *data, size_t size), (file, data, size))
WRAP(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
WRAP(int, fsync, (int file), (file))
WRAP(int, rename, (const char *from, const char *to), (from, to))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(int, rmdir, (const char *path), (path))
WRAP(int, unlink, (const char *path), (path))
WRAP(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags))

#define WRAP_OPEN(name, parameters, arguments)                   \
    int name parameters {                                        \
        static int (*real)parameters;                            \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        va_list rest;                                            \
        va_start(rest, flags);                                   \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                            \
        return strikes() ? -1 : real arguments;                  \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))

static time_t shift(void) {
    static const int years[] = {0, 1, -10, 30, -1, 10, -30};
    static unsigned long looks;
    static int jumps = -1;
    if (jumps < 0) jumps = getenv("CLOCK_JUMPS") != NULL;
    return jumps ? years[looks++ / 5 % 7] * 365L * 86400L : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (place) *place = exact.tv_sec;
    return exact.tv_sec;
}
