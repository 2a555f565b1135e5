/* Stands between a container runtime and `criu swrk`, and stops a dump twice: when every process is frozen and none is
 * looked at yet, where the host may refuse; and when all images are written and every process is still frozen, where the
 * host takes its file-system snapshot. A runtime's own command offers no such moments: with --leave-running its processes
 * run on before it says that the dump is done.
 *
 *     gate HOST_SOCKET CRIU swrk FD        any other command of CRIU is only passed on
 *
 * It also takes the freezer cgroup out of the request: with it CRIU waits for ever for processes that are stopped (a job
 * after Ctrl-Z). Without it CRIU stops all processes by ptrace.
 *
 * At each stop one byte goes to HOST_SOCKET: 'f' frozen, 'd' dumped. The answer 'k' lets the dump go on, anything else
 * lets it fail.
 * Messages of the RPC: images/rpc.proto of CRIU. */
#define _GNU_SOURCE
#include "belayer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_MESSAGE (1 << 20)
#define MAX_FDS 16
#define OWN_FDS 900 /* our own descriptors stay clear of the caller's numbers */

struct packet {
    char *data;
    ssize_t size;
    int fds[MAX_FDS], n_fds;
};

static bool receive(int from, struct packet *p) { /* false at the end of the stream */
    char control[CMSG_SPACE(sizeof p->fds)];
    struct iovec part = {p->data, MAX_MESSAGE};
    struct msghdr head = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    do p->size = recvmsg(from, &head, MSG_CMSG_CLOEXEC);
    while (p->size < 0 && errno == EINTR);
    p->n_fds = 0;
    if (p->size <= 0 || head.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) return false;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&head); c; c = CMSG_NXTHDR(&head, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            p->n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(p->fds, CMSG_DATA(c), p->n_fds * sizeof(int));
        }
    return true;
}

static bool pass_on(int to, struct packet *p) {
    char control[CMSG_SPACE(sizeof p->fds)] = {0};
    struct iovec part = {p->data, p->size};
    struct msghdr head = {.msg_iov = &part, .msg_iovlen = 1};
    if (p->n_fds) {
        head.msg_control = control;
        head.msg_controllen = CMSG_SPACE(p->n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&head);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(p->n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), p->fds, p->n_fds * sizeof(int));
    }
    ssize_t n;
    do n = sendmsg(to, &head, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    for (int i = 0; i < p->n_fds; i++) close(p->fds[i]);
    return n == p->size;
}

/* CRIU looks up the folders of a request in the descriptor table of the process that made the socket, which is us now:
 * so our table gets the caller's folders, under the caller's numbers. */
static int mirror_folders(int caller) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(caller, SOL_SOCKET, SO_PEERCRED, &peer, &size)) return -1;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", peer.pid);
    int low = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), high = fcntl(low, F_DUPFD_CLOEXEC, OWN_FDS);
    close(low);
    DIR *list = high < 0 ? NULL : fdopendir(high);
    if (!list) return -1;
    struct dirent *entry;
    while ((entry = readdir(list))) {
        int number = atoi(entry->d_name);
        struct stat st;
        if (number < 3 || number == caller || fstatat(high, entry->d_name, &st, 0) || !S_ISDIR(st.st_mode)) continue;
        if (fcntl(number, F_GETFD) >= 0) continue; /* inherited from the caller, or one of ours */
        int fd = openat(high, entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0 && fd != number) {
            dup3(fd, number, O_CLOEXEC);
            close(fd);
        }
    }
    closedir(list);
    return 0;
}

static bool host_agrees(const char *socket_path, char stop) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(socket_path) >= sizeof address.sun_path) return false;
    strcpy(address.sun_path, socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char answer = 0;
    bool good = fd >= 0 && !connect(fd, (void *)&address, sizeof address) && write(fd, &stop, 1) == 1 &&
                read(fd, &answer, 1) == 1 && answer == 'k';
    close(fd);
    return good;
}

static char stop_of(const struct packet *p) { /* 0: none */
    /* criu_resp: type = NOTIFY comes first, the script's name is inside */
    if (p->size <= 2 || p->data[0] != 0x08 || p->data[1] != 0x06) return 0;
    if (memmem(p->data, p->size, "network-lock", 12)) return 'f';
    return memmem(p->data, p->size, "post-dump", 9) ? 'd' : 0;
}

/* -- the request, as much of protobuf as it takes ------------------------------------------------------------------ */
struct field {
    uint64_t number, kind;
    const unsigned char *start, *body, *end; /* body: of kind 2, the bytes inside */
};

static const unsigned char *get_number(const unsigned char *p, const unsigned char *end, uint64_t *value) {
    *value = 0;
    for (int shift = 0; p && p < end && shift < 64; shift += 7) {
        *value |= (uint64_t)(*p & 127) << shift;
        if (!(*p++ & 128)) return p;
    }
    return NULL;
}

static bool next_field(const unsigned char **at, const unsigned char *end, struct field *f) { /* false: end, or no field */
    uint64_t key, length = 0;
    f->start = *at;
    const unsigned char *p = *at < end ? get_number(*at, end, &key) : NULL;
    if (!p) return false;
    f->number = key >> 3;
    f->kind = key & 7;
    f->body = p;
    if (f->kind == 0) p = get_number(p, end, &length);
    else if (f->kind == 2 && (p = get_number(p, end, &length))) f->body = p;
    else if (f->kind != 2) length = f->kind == 1 ? 8 : 4;
    if (p && f->kind) p = length <= (uint64_t)(end - p) ? p + length : NULL;
    f->end = *at = p;
    return p != NULL;
}

static void put_number(struct buf *b, uint64_t value) {
    for (; value > 127; value >>= 7) buf_add(b, (char[]){(char)(value | 128)}, 1);
    buf_add(b, (char[]){(char)value}, 1);
}

static void without_freezer(struct packet *p) {
    enum { OPTIONS = 2, FREEZE_CGROUP = 44 };
    const unsigned char *at = (unsigned char *)p->data, *end = at + p->size;
    struct buf out = {0}, inner = {0};
    struct field f, option;
    while (next_field(&at, end, &f)) {
        if (f.number != OPTIONS || f.kind != 2) {
            buf_add(&out, f.start, f.end - f.start);
            continue;
        }
        const unsigned char *in = f.body;
        while (next_field(&in, f.end, &option))
            if (option.number != FREEZE_CGROUP) buf_add(&inner, option.start, option.end - option.start);
        if (in != f.end) goto done; /* not what we think it is: leave it alone */
        put_number(&out, OPTIONS << 3 | 2);
        put_number(&out, buf_len(&inner));
        buf_add(&out, buf_head(&inner), buf_len(&inner));
    }
    if (at == end) {
        memcpy(p->data, buf_head(&out), buf_len(&out)); /* never longer than it was */
        p->size = buf_len(&out);
    }
done:
    buf_free(&out);
    buf_free(&inner);
}

int gate_main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "gate HOST_SOCKET CRIU ...\n");
        return 64;
    }
    if (argc != 5 || strcmp(argv[3], "swrk")) {
        execv(argv[2], argv + 2);
        return 71;
    }
    int caller = atoi(argv[4]), pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return 71;
    int criu = fcntl(pair[0], F_DUPFD_CLOEXEC, OWN_FDS), theirs = fcntl(pair[1], F_DUPFD_CLOEXEC, OWN_FDS);
    close(pair[0]);
    close(pair[1]);
    if (criu < 0 || theirs < 0) return 71;
    pid_t pid = fork();
    if (pid == 0) {
        dup2(theirs, caller); /* without FD_CLOEXEC */
        execv(argv[2], argv + 2);
        _exit(71);
    }
    close(theirs);
    if (pid < 0 || mirror_folders(caller)) return 71;
    struct packet p = {.data = xmalloc(MAX_MESSAGE)};
    struct pollfd ends[2] = {{caller, POLLIN, 0}, {criu, POLLIN, 0}};
    for (bool open = true; open;) {
        if (poll(ends, 2, -1) < 0 && errno != EINTR) break;
        if (open && ends[1].revents) {
            open = receive(criu, &p);
            char stop = open ? stop_of(&p) : 0;
            if (stop && !host_agrees(argv[1], stop)) {
                static char refusal[] = {0x08, 0x06, 0x18, 0x00}; /* criu_req: type = NOTIFY, notify_success = false */
                struct packet no = {.data = refusal, .size = sizeof refusal};
                open = pass_on(criu, &no);
            } else if (open) {
                open = pass_on(caller, &p);
            }
        }
        if (open && ends[0].revents) {
            open = receive(caller, &p);
            if (open) without_freezer(&p);
            open = open && pass_on(criu, &p);
        }
    }
    close(criu);
    int status;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 71;
}
