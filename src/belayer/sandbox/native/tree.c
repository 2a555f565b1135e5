/* Copies and fingerprints of the writable layer of an overlay (see sandbox/_overlay.py for its layout).
 *
 *   tree copy FROM TO LOWER FROM/upper → TO/upper, and what is needed of FROM/work/index → TO/work/index
 *   tree identify FOLDER    a number that changes with every change of what is in the folder
 *
 * A copy keeps everything that the overlay or a program can see: owners, modes, times, extended attributes (opaque
 * folders and redirects are such), whiteouts and other device nodes, holes, sockets, fifos, and hard links, also those
 * between a file and its entry in the index. It shares data where the file system can (FICLONE). Nobody may change FROM
 * meanwhile: its sandbox is frozen.
 *
 * The index has an entry for everything that was changed of LOWER, the image, named by the original's file handle. Kept
 * are those of files that have several names in the image: without its entry such a file would fall apart into two. The
 * others say where something is in the layer, by a handle that is another one in the copy; the kernel does without them,
 * and an entry that is a link to a file would count as one of its names (st_nlink) from the next mount on.
 */
#define _GNU_SOURCE
#include "belayer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#define FICLONE_ 0x40049409
#define BLOCK (1 << 20)

static char path[1 << 16]; /* of the entry in hand, relative to the top; for hard links and messages */
static size_t path_length;

static void die(const char *what) __attribute__((noreturn));
static void die(const char *what) {
    int number = errno;
    /* the errno first, for the caller; the sentence for people */
    fprintf(stderr, "%d %s %s: %s", number, what, path_length ? path : "the folder", strerror(number));
    fflush(stderr);
    _exit(70);
}

static size_t enter(const char *name) {
    size_t before = path_length, n = strlen(name);
    if (before + n + 2 > sizeof path) {
        errno = ENAMETOOLONG;
        die("cannot copy");
    }
    if (before) path[path_length++] = '/';
    memcpy(path + path_length, name, n + 1);
    path_length += n;
    return before;
}

static void leave(size_t before) {
    path_length = before;
    path[before] = 0;
}

static int open_dir(int at, const char *name) {
    /* O_NOATIME: looking must not change */
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NOATIME);
    if (fd < 0) die("cannot open");
    return fd;
}

static DIR *list(int fd) { /* takes the descriptor over */
    DIR *dir = fdopendir(fd);
    if (!dir) die("cannot list");
    return dir;
}

static struct dirent *next(DIR *dir) {
    for (;;) {
        errno = 0;
        struct dirent *entry = readdir(dir);
        if (!entry && errno) die("cannot list");
        if (!entry || (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))) return entry;
    }
}

/* -- hard links: (device, inode) of a source to the path of its copy ----------------------------------------------- */
struct link {
    dev_t device;
    ino_t inode;
    char *to;
};
static struct link *links;
static size_t n_links, links_size;
static int top;   /* descriptor of TO, to which the paths are relative */
static int lower; /* and of LOWER */

static struct link *link_of(const struct stat *st) {
    if (2 * (n_links + 1) > links_size) {
        size_t old_size = links_size;
        struct link *old = links;
        links_size = old_size ? 2 * old_size : 1 << 12;
        links = xmalloc(links_size * sizeof *links); /* zeroed */
        for (size_t i = 0; i < old_size; i++)
            if (old[i].to) {
                size_t at = old[i].inode * 0x9E3779B97F4A7C15ULL % links_size;
                while (links[at].to) at = (at + 1) % links_size;
                links[at] = old[i];
            }
        free(old);
    }
    size_t at = st->st_ino * 0x9E3779B97F4A7C15ULL % links_size;
    while (links[at].to && (links[at].inode != st->st_ino || links[at].device != st->st_dev)) at = (at + 1) % links_size;
    return &links[at];
}

static bool linked(const struct stat *st, int to, const char *name) {
    if (st->st_nlink < 2 || S_ISDIR(st->st_mode)) return false;
    struct link *known = link_of(st);
    if (known->to) {
        if (linkat(top, known->to, to, name, 0)) die("cannot link");
        return true;
    }
    *known = (struct link){st->st_dev, st->st_ino, strdup(path)};
    if (!known->to) die("no memory for");
    n_links++;
    return false;
}

/* -- one entry ----------------------------------------------------------------------------------------------------- */
/* `open_file`: a descriptor of the source, or -1. */
static void copy_attributes(int from, const char *name, int to, int open_file) {
    static char names[1 << 16], value[1 << 16];
    char source[320], target[320];
    snprintf(source, sizeof source, "/proc/self/fd/%d/%s", from, name);
    ssize_t n = open_file >= 0 ? flistxattr(open_file, names, sizeof names) : llistxattr(source, names, sizeof names);
    if (n < 0 && errno != ENOTSUP) die("cannot list the attributes of");
    if (n <= 0) return;
    snprintf(target, sizeof target, "/proc/self/fd/%d/%s", to, name);
    for (char *key = names; key < names + n; key += strlen(key) + 1) {
        ssize_t size = lgetxattr(source, key, value, sizeof value);
        if (size < 0) die("cannot read an attribute of");
        if (lsetxattr(target, key, value, size, 0)) die("cannot set an attribute of");
    }
}

/* Owner before mode and attributes: a change of the owner clears the set-user-id bit and file capabilities. */
static void copy_metadata(int from, int to, const char *name, const struct stat *st) {
    if (fchownat(to, name, st->st_uid, st->st_gid, AT_SYMLINK_NOFOLLOW)) die("cannot set the owner of");
    if (!S_ISLNK(st->st_mode) && fchmodat(to, name, st->st_mode & 07777, 0)) die("cannot set the mode of");
    copy_attributes(from, name, to, -1);
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    if (utimensat(to, name, times, AT_SYMLINK_NOFOLLOW)) die("cannot set the times of");
}

static void copy_range(int in, int out, off_t at, off_t end) {
    static bool plain;
    static char *block;
    while (at < end) {
        ssize_t n = -1;
        if (!plain) {
            off_t from = at, to = at;
            n = copy_file_range(in, &from, out, &to, end - at, 0);
            if (n < 0 && (errno == EXDEV || errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS)) plain = true;
            else if (n < 0) die("cannot copy");
        }
        if (plain) {
            if (!block) block = xmalloc(BLOCK);
            n = pread(in, block, end - at < BLOCK ? end - at : BLOCK, at);
            for (ssize_t done = 0; done < n;) {
                ssize_t written = pwrite(out, block + done, n - done, at + done);
                if (written < 0) die("cannot write");
                done += written;
            }
        }
        if (n < 0) die("cannot read");
        if (n == 0) return; /* shorter than it was: impossible while frozen, and the size is set below */
        at += n;
    }
}

static void copy_file(int from, int to, const char *name, const struct stat *st) {
    static bool no_clones;
    int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NOATIME);
    int out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (in < 0 || out < 0) die("cannot open");
    bool done = !st->st_size;
    if (!done && !no_clones) {
        done = !ioctl(out, FICLONE_, in);
        no_clones = !done; /* this file system, or these two, cannot */
    }
    if (!done) {
        bool whole = st->st_blocks * 512 >= st->st_size;
        if (whole) copy_range(in, out, 0, st->st_size);
        else
            for (off_t at = 0; at < st->st_size;) {
                off_t data = lseek(in, at, SEEK_DATA);
                if (data < 0 && errno == ENXIO) break; /* a hole to the end */
                if (data < 0) data = at;               /* this file system does not know its holes */
                off_t hole = lseek(in, data, SEEK_HOLE);
                if (hole < 0) hole = st->st_size;
                copy_range(in, out, data, hole);
                at = hole;
            }
        if (!whole && ftruncate(out, st->st_size)) die("cannot set the size of");
    }
    /* as in copy_metadata, without looking the name up again and again: most files are plain ones of root's */
    if (st->st_uid || st->st_gid)
        if (fchown(out, st->st_uid, st->st_gid)) die("cannot set the owner of");
    if (fchmod(out, st->st_mode & 07777)) die("cannot set the mode of");
    copy_attributes(from, name, to, in);
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    if (futimens(out, times)) die("cannot set the times of");
    close(in);
    if (close(out)) die("cannot write");
}

/* Has the file that this entry of the index names more than one name in the image? The name is that of struct ovl_fb,
 * in hexadecimal digits: version, magic, length, flags, type, the file system's UUID, and the handle. */
static bool has_names(const char *name) {
    enum { HEAD = 21 };
    unsigned char data[HEAD + MAX_HANDLE_SZ];
    size_t n = strlen(name) / 2;
    if (strlen(name) % 2 || n <= HEAD || n > sizeof data) return false;
    for (size_t i = 0; i < n; i++)
        if (sscanf(name + 2 * i, "%2hhx", &data[i]) != 1) return false;
    if (data[1] != 0xfb || data[2] != n) return false;
    union {
        struct file_handle handle;
        char room[sizeof(struct file_handle) + MAX_HANDLE_SZ];
    } h = {.handle = {.handle_bytes = n - HEAD, .handle_type = data[4]}};
    memcpy(h.handle.f_handle, data + HEAD, n - HEAD);
    int fd = open_by_handle_at(lower, &h.handle, O_PATH | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ESTALE) return false;
        die("cannot find the original of");
    }
    struct stat st;
    if (fstat(fd, &st)) die("cannot look at the original of");
    close(fd);
    return st.st_nlink > 1;
}

/* `from` is closed. `index`: only what `has_names`. */
static void copy_dir(int from, int to, bool index) {
    DIR *dir = list(from);
    struct dirent *entry;
    while ((entry = next(dir))) {
        const char *name = entry->d_name;
        struct stat st;
        size_t before = enter(name);
        if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW)) die("cannot look at");
        bool whiteout = S_ISCHR(st.st_mode) && st.st_rdev == 0;
        if (index && (S_ISDIR(st.st_mode) || whiteout || !has_names(name))) {
            leave(before);
            continue;
        }
        if (!linked(&st, to, name)) {
            if (S_ISDIR(st.st_mode)) {
                if (mkdirat(to, name, 0700)) die("cannot make");
                int out = open_dir(to, name);
                copy_dir(open_dir(from, name), out, index);
                close(out);
            } else if (S_ISREG(st.st_mode)) {
                copy_file(from, to, name, &st);
            } else if (S_ISLNK(st.st_mode)) {
                static char target[1 << 16];
                ssize_t n = readlinkat(from, name, target, sizeof target - 1);
                if (n < 0) die("cannot read");
                target[n] = 0;
                if (symlinkat(target, to, name)) die("cannot make");
            } else if (mknodat(to, name, st.st_mode & (S_IFMT | 0700), st.st_rdev)) {
                die("cannot make");
            }
            if (!S_ISREG(st.st_mode)) copy_metadata(from, to, name, &st);
        }
        leave(before);
    }
    closedir(dir);
}

static void copy_part(int from, int to, const char *name, bool index) {
    size_t before = enter(name);
    struct stat st;
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW)) {
        if (!index || errno != ENOENT) die("cannot look at");
    } else {
        if (mkdirat(to, name, 0700)) die("cannot make");
        int out = open_dir(to, name);
        copy_dir(open_dir(from, name), out, index);
        close(out);
        /* the attributes of the index itself bind it to the folder that it was made for */
        if (!index) copy_metadata(from, to, name, &st);
    }
    leave(before);
}

static void copy_tree(const char *source, const char *target, const char *image) {
    int from = open(source, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from < 0) die("cannot open");
    lower = open(image, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lower < 0) die("cannot open the image below");
    top = open(target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (top < 0) die("cannot open");
    copy_part(from, top, "upper", false);
    enter("work");
    int work = openat(from, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (work < 0 || mkdirat(top, "work", 0700)) die("cannot open or make");
    int new_work = openat(top, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (new_work < 0) die("cannot open");
    copy_part(work, new_work, "index", true);
}

/* -- fingerprint --------------------------------------------------------------------------------------------------- */
static uint64_t sums[2], entries, bytes;

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdULL;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ x >> 33;
}

static uint64_t hash(uint64_t seed, const void *data, size_t n) {
    const unsigned char *p = data;
    uint64_t value = seed ^ 0xcbf29ce484222325ULL;
    for (size_t i = 0; i < n; i++) value = (value ^ p[i]) * 0x100000001b3ULL;
    return mix(value);
}

static void identify(int at, uint64_t parent) {
    DIR *dir = list(at);
    struct dirent *entry;
    while ((entry = next(dir))) {
        struct stat st;
        size_t before = enter(entry->d_name);
        if (fstatat(at, entry->d_name, &st, AT_SYMLINK_NOFOLLOW)) die("cannot look at");
        bool folder = S_ISDIR(st.st_mode);
        uint64_t facts[] = {st.st_ino,          st.st_mode,         st.st_uid,          st.st_gid,          st.st_nlink,
                            st.st_rdev,         folder ? 0 : st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec,
                            st.st_ctim.tv_sec, st.st_ctim.tv_nsec};
        uint64_t own = hash(parent, entry->d_name, strlen(entry->d_name));
        /* summed, so that the order in which a folder is listed does not matter */
        sums[0] += hash(own, facts, sizeof facts);
        sums[1] += hash(~own, facts, sizeof facts);
        entries++;
        if (S_ISREG(st.st_mode)) bytes += st.st_size;
        if (folder) identify(open_dir(at, entry->d_name), own);
        leave(before);
    }
    closedir(dir);
}

int tree_main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody waits for what a killed driver had begun */
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) { /* one folder in another, thousands deep */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    umask(0);
    if (argc == 5 && !strcmp(argv[1], "copy")) {
        copy_tree(argv[2], argv[3], argv[4]);
        return 0;
    }
    if (argc == 3 && !strcmp(argv[1], "identify")) {
        int fd = open(argv[2], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) die("cannot open");
        identify(fd, 0);
        printf("%016llx%016llx %llu %llu\n", (unsigned long long)sums[0], (unsigned long long)sums[1],
               (unsigned long long)entries, (unsigned long long)bytes);
        return 0;
    }
    fprintf(stderr, "%d tree copy FROM TO LOWER | tree identify FOLDER", EINVAL);
    return 64;
}
