/* Whole folders into and out of a container. Runs inside it, as a command's main process, so no path of the container is
 * ever resolved on the host.
 *
 * Both directions speak of entries, one after the other, ended by an entry `e`; numbers are little-endian:
 *     u8 kind, u32 mode, u64 mtime (s), u32 length of the path, u64 length of the content, path, content
 * kinds: d folder, f file, l symbolic link and h hard link (content: where to), s left out (out only). Paths are relative.
 */
#define _GNU_SOURCE
#include "belayer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_PATH 65536

struct __attribute__((packed)) entry {
    uint8_t kind;
    uint32_t mode;
    uint64_t mtime;
    uint32_t path;
    uint64_t size;
};

static char block[1 << 16];

static int fail(const char *path, int error) {
    dprintf(2, "%s: %s", path, strerror(error));
    return error ? error : EIO;
}

/* -- out ----------------------------------------------------------------------------------------------------------- */
static uint64_t bytes_left, entries_left;
static dev_t device; /* other file systems, /proc and the like, are left out */

static int put(const void *data, size_t n) {
    for (const char *p = data; n;) {
        ssize_t m = write(1, p, n);
        if (m < 0 && errno == EINTR) continue;
        if (m < 0) return errno;
        p += m;
        n -= m;
    }
    return 0;
}

static int put_head(char kind, const struct stat *st, const char *path, uint64_t size) {
    struct entry e = {kind, st->st_mode & 07777, st->st_mtime < 0 ? 0 : st->st_mtime, strlen(path), size};
    if (!entries_left || size > bytes_left) return EFBIG;
    entries_left--;
    bytes_left -= size;
    int error = put(&e, sizeof e);
    return error ? error : put(path, e.path);
}

static int put_file(int fd, const struct stat *st, const char *path) {
    uint64_t left = st->st_size; /* what it is longer or shorter by now is cut off or filled up */
    int error = put_head('f', st, path, left);
    while (!error && left) {
        ssize_t n = read(fd, block, left < sizeof block ? left : sizeof block);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) memset(block, 0, n = left < sizeof block ? left : sizeof block);
        error = put(block, n);
        left -= n;
    }
    return error;
}

static int pack(int folder, char *path, size_t length);

static int pack_one(int folder, const char *name, char *path, size_t length) {
    struct stat st;
    /* a program that runs meanwhile may replace anything: what is opened is looked at, and links are never followed */
    int fd = openat(folder, name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return 0;
    if (fd < 0) {
        if (fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : errno;
        if (!S_ISLNK(st.st_mode)) return put_head('s', &st, path, 0); /* a socket, a device */
        ssize_t n = readlinkat(folder, name, block, sizeof block);
        if (n < 0) return errno == ENOENT || errno == EINVAL ? 0 : errno;
        int error = put_head('l', &st, path, n);
        return error ? error : put(block, n);
    }
    int error = fstat(fd, &st) ? errno : 0;
    if (!error && st.st_dev != device) error = put_head('s', &st, path, 0);
    else if (!error && S_ISREG(st.st_mode)) error = put_file(fd, &st, path);
    else if (!error && S_ISDIR(st.st_mode)) {
        error = put_head('d', &st, path, 0);
        if (!error) return pack(fd, path, length);
    } else if (!error) error = put_head('s', &st, path, 0);
    close(fd);
    return error;
}

static int pack(int folder, char *path, size_t length) { /* closes `folder` */
    DIR *list = fdopendir(folder);
    if (!list) {
        int error = errno;
        close(folder);
        return error;
    }
    int error = 0;
    struct dirent *entry;
    while (!error && (entry = readdir(list))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        size_t n = strlen(entry->d_name), more = length ? length + 1 : 0;
        if (more + n + 1 > MAX_PATH) error = ENAMETOOLONG;
        else {
            if (length) path[length] = '/';
            memcpy(path + more, entry->d_name, n + 1);
            error = pack_one(folder, entry->d_name, path, more + n);
            path[length] = 0;
        }
    }
    closedir(list);
    return error;
}

/* pack PATH BYTES ENTRIES */
int pack_main(char **argv) {
    if (!argv[1] || !argv[2] || !argv[3]) return EINVAL;
    bytes_left = strtoull(argv[2], NULL, 10);
    entries_left = strtoull(argv[3], NULL, 10);
    char *path = xmalloc(MAX_PATH);
    struct stat st;
    int fd = open(argv[1], O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), error;
    if (fd < 0 || fstat(fd, &st)) return fail(argv[1], errno);
    device = st.st_dev;
    if (S_ISDIR(st.st_mode)) error = pack(fd, path, 0);
    else error = S_ISREG(st.st_mode) ? put_file(fd, &st, "") : EINVAL;
    struct entry end = {.kind = 'e'};
    if (!error) error = put(&end, sizeof end);
    return error ? fail(argv[1], error) : 0;
}

/* -- in ------------------------------------------------------------------------------------------------------------ */
static int get(void *data, size_t n) {
    for (char *p = data; n;) {
        ssize_t m = read(0, p, n);
        if (m < 0 && errno == EINTR) continue;
        if (m <= 0) return m ? errno : EPIPE;
        p += m;
        n -= m;
    }
    return 0;
}

/* A descriptor of the folder that `path` is in, and `*name`, its last part. No link on the way. */
static int open_parent(int top, char *path, char **name) {
    char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    if (!**name || !strcmp(*name, ".") || !strcmp(*name, "..")) {
        errno = EINVAL;
        return -1;
    }
    if (slash) *slash = 0;
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    int fd = syscall(SYS_openat2, top, slash ? path : ".", &how, sizeof how);
    if (slash) *slash = '/';
    return fd;
}

/* Archives need not list the folders that their files are in. */
static void make_parents(int top, char *path) {
    char *name;
    for (char *slash = path; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        int parent = open_parent(top, path, &name);
        if (parent >= 0) mkdirat(parent, name, 0755); /* what fails here fails again, visibly, in open_parent */
        if (parent >= 0) close(parent);
        *slash = '/';
    }
}

static int clear(int parent, const char *name) { return unlinkat(parent, name, 0) && errno != ENOENT ? errno : 0; }

static int take_file(int parent, const char *name, const struct entry *e) {
    int error = clear(parent, name);
    int fd = error ? -1 : openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return error ? error : errno;
    for (uint64_t left = e->size; !error && left;) {
        size_t n = left < sizeof block ? left : sizeof block;
        error = get(block, n);
        for (size_t done = 0; !error && done < n;) {
            ssize_t m = write(fd, block + done, n - done);
            if (m < 0 && errno != EINTR) error = errno;
            else if (m > 0) done += m;
        }
        left -= n;
    }
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = e->mtime}};
    if (!error && (fchmod(fd, e->mode & 07777) || futimens(fd, times))) error = errno;
    if (close(fd) && !error) error = errno;
    return error;
}

static int take(int top, const struct entry *e, char *path) {
    char *name, *other;
    int parent = open_parent(top, path, &name), error = 0;
    if (parent < 0 && errno == ENOENT) {
        make_parents(top, path);
        parent = open_parent(top, path, &name);
    }
    if (parent < 0) return errno;
    if (e->kind == 'd') {
        if (mkdirat(parent, name, 0755) && errno != EEXIST) error = errno;
        int fd = error ? -1 : openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (!error && (fd < 0 || fchmod(fd, e->mode & 07777))) error = errno;
        if (fd >= 0) close(fd);
    } else if (e->kind == 'f') {
        error = take_file(parent, name, e);
    } else {
        char *target = xmalloc(e->size + 1);
        error = get(target, e->size);
        if (!error) error = clear(parent, name);
        if (!error && e->kind == 'l' && symlinkat(target, parent, name)) error = errno;
        if (!error && e->kind == 'h') {
            int from = open_parent(top, target, &other);
            if (from < 0 || linkat(from, other, parent, name, 0)) error = errno;
            if (from >= 0) close(from);
        }
        free(target);
    }
    close(parent);
    return error;
}

/* unpack FOLDER: made if need be, with what lies above it */
int unpack_main(char **argv) {
    char *path = xmalloc(MAX_PATH), *folder = argv[1];
    if (!folder) return EINVAL;
    for (char *slash = folder + 1; *folder && (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(folder, 0755) && errno != EEXIST) return fail(folder, errno);
        *slash = '/';
    }
    if (mkdir(folder, 0755) && errno != EEXIST) return fail(folder, errno);
    int top = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (top < 0) return fail(folder, errno);
    for (;;) {
        struct entry e;
        int error = get(&e, sizeof e);
        if (!error && e.kind == 'e') return 0;
        if (!error && (e.path >= MAX_PATH || !strchr("dflh", e.kind) || (e.kind != 'f' && e.size >= MAX_PATH))) error = EINVAL;
        if (!error) error = get(path, e.path);
        if (error) return fail(folder, error);
        path[e.path] = 0;
        if ((error = take(top, &e, path))) return fail(path, error);
    }
}
