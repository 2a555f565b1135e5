/* Growable buffers, time, and small things that several roles need. */
#define _GNU_SOURCE
#include "belayer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void *xmalloc(size_t n) {
    void *p = calloc(1, n ? n : 1);
    if (!p) _exit(70);
    return p;
}

size_t buf_len(const struct buf *b) { return b->end - b->start; }
char *buf_head(const struct buf *b) { return b->data + b->start; }

char *buf_room(struct buf *b, size_t n) {
    if (b->start && (b->start == b->end || b->end + n > b->size)) {
        memmove(b->data, b->data + b->start, b->end - b->start);
        b->end -= b->start;
        b->start = 0;
    }
    if (b->end + n > b->size) {
        size_t size = b->size ? b->size : 4096;
        while (size < b->end + n) size *= 2;
        char *data = realloc(b->data, size);
        if (!data) _exit(70);
        b->data = data;
        b->size = size;
    }
    return b->data + b->end;
}

void buf_add(struct buf *b, const void *data, size_t n) {
    memcpy(buf_room(b, n), data, n);
    b->end += n;
}

void buf_drop(struct buf *b, size_t n) {
    b->start += n;
    if (b->start == b->end) b->start = b->end = 0;
    /* a buffer that once was big must not stay big: init lives as long as the rollout, and every page is dumped */
    if (b->start == b->end && b->size > 1 << 16) buf_free(b);
}

void buf_free(struct buf *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int set_nonblock(int fd) { return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = write(fd, text, strlen(text));
    int saved = errno;
    close(fd);
    errno = saved;
    return n == (ssize_t)strlen(text) ? 0 : -1;
}

/* Kill every child of the caller, and, since the caller is their subreaper, then their children, until none is left.
 * Returns 0 when none is left, -1 when some still are after `rounds_ms` (a fork bomb that outruns us). */
int kill_children(int rounds_ms) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    int64_t end = now_ns() + rounds_ms * 1000000LL;
    do {
        FILE *list = fopen(path, "re");
        if (!list) return -1;
        while (fscanf(list, "%15s", text) == 1) kill(atoi(text), SIGKILL);
        fclose(list);
        pid_t pid;
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) continue;
        if (pid < 0 && errno == ECHILD) return 0;
        usleep(300);
    } while (now_ns() < end);
    return -1;
}
