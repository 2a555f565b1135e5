/* PID 1 of the container: connections, framing, reaping.
 *
 * One connection carries one request; its closing by the host cancels what it asked for. A frame is
 *     u32 length of the payload (little-endian), u8 type, payload
 * Requests:  P ping · F fence · X exec · S shell · i input data · I end of input
 * Answers:   p state · o output · e error output · x result · E refusal
 * The init closes the connection itself after the last frame, so that when the host has read the end of the stream, no
 * connection is left inside and the container can be dumped.
 *
 * Only processes outside the container's pid namespace are served: for them SO_PEERCRED shows pid 0.
 */
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_FRAME (64u << 20)
#define MAX_CONNS 128

struct job *jobs[128];
int n_jobs;

static struct conn *conns[MAX_CONNS];
static int n_conns;
static struct pollfd table[2048];
static int n_table;
static int64_t wake;

int watch(int fd, short events) {
    if (fd < 0 || n_table == (int)(sizeof table / sizeof *table)) return -1;
    table[n_table] = (struct pollfd){fd, events, 0};
    return n_table++;
}

short ready(int index) { return index < 0 ? 0 : table[index].revents; }

void wake_at(int64_t when) {
    if (when && when < wake) wake = when;
}

void reply(struct conn *c, char type, const void *data, size_t n) {
    if (!c || c->dead) return;
    uint32_t length = n;
    char head[5];
    memcpy(head, &length, 4);
    head[4] = type;
    buf_add(&c->out, head, 5);
    buf_add(&c->out, data, n);
}

void refuse(struct conn *c, enum error_code code, const char *text) {
    char data[256];
    uint32_t number = code;
    size_t n = strlen(text);
    if (n > sizeof data - 4) n = sizeof data - 4;
    memcpy(data, &number, 4);
    memcpy(data + 4, text, n);
    reply(c, 'E', data, 4 + n);
    c->finished = true;
}

void job_output(struct job *j, char type, const char *data, size_t n) {
    j->last_output = now_ns();
    size_t room = j->sent < j->limit ? j->limit - j->sent : 0, keep = n < room ? n : room;
    if (keep) reply(j->conn, type, data, keep);
    j->sent += keep;
    if (keep < n) {
        j->dropped += n - keep;
        j->flags |= TRUNCATED;
    }
}

void job_finish(struct job *j, int exit_code, int signal_number) {
    struct __attribute__((packed)) {
        int32_t exit_code, signal;
        uint32_t flags;
        uint64_t dropped, wall_us;
    } result = {exit_code, signal_number, j->flags, j->dropped, (uint64_t)(now_ns() - j->started) / 1000};
    if (j->conn) {
        reply(j->conn, 'x', &result, sizeof result);
        j->conn->finished = true;
        j->conn->job = NULL;
    }
    j->conn = NULL;
    j->over = true;
}

/* -- connections --------------------------------------------------------------------------------------------------- */
static void conn_accept(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct ucred peer = {.pid = -1};
        socklen_t size = sizeof peer;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) || peer.pid != 0 || n_conns == MAX_CONNS) {
            close(fd);
            continue;
        }
        struct conn *c = xmalloc(sizeof *c);
        c->fd = fd;
        conns[n_conns++] = c;
    }
}

static void conn_read(struct conn *c) {
    ssize_t n = read(c->fd, buf_room(&c->in, 1 << 16), 1 << 16);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        c->dead = true;
        return;
    }
    c->in.end += n;
    while (buf_len(&c->in) >= 5) {
        uint32_t length;
        memcpy(&length, buf_head(&c->in), 4);
        if (length > MAX_FRAME) {
            c->dead = true;
            return;
        }
        if (buf_len(&c->in) < 5 + (size_t)length) return;
        request(c, buf_head(&c->in)[4], buf_head(&c->in) + 5, length);
        buf_drop(&c->in, 5 + length);
    }
}

static void conn_write(struct conn *c) {
    while (buf_len(&c->out)) {
        ssize_t n = send(c->fd, buf_head(&c->out), buf_len(&c->out), MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            if (errno != EAGAIN) c->dead = true;
            return;
        }
        buf_drop(&c->out, n);
    }
    if (c->finished) c->dead = true;
}

static void conn_close(int i) {
    struct conn *c = conns[i];
    conns[i] = conns[--n_conns];
    if (c->job) {
        struct job *j = c->job;
        j->conn = NULL;
        if (j->shell) shell_stop(j, 0);
        else exec_stop(j, 0);
    }
    close(c->fd);
    buf_free(&c->in);
    buf_free(&c->out);
    free(c);
}

static void job_free(int i) {
    struct job *j = jobs[i];
    jobs[i] = jobs[--n_jobs];
    buf_free(&j->input);
    buf_free(&j->script);
    free(j);
}

static void check_time(int64_t now) {
    for (int i = 0; i < n_jobs; i++) {
        struct job *j = jobs[i];
        uint32_t why = j->deadline && now >= j->deadline               ? TIMED_OUT
                       : j->quiet && now >= j->last_output + j->quiet ? TIMED_OUT | WAS_QUIET
                                                                       : 0;
        if (why && !j->killed && !j->over) {
            if (j->shell) shell_stop(j, why);
            else exec_stop(j, why);
        }
        if (!j->shell && !j->over) exec_poll(j, now);
        if (!j->killed && !j->over) {
            wake_at(j->deadline);
            if (j->quiet) wake_at(j->last_output + j->quiet);
        }
    }
    shell_tick(now);
}

static void on_signal(int signal_number) { (void)signal_number; }

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        if (pid == shell_pid) shell_reaped(pid, status);
}

int init_main(void) {
    prctl(PR_SET_NAME, "belayer-init");
    /* the pipes of other commands and of their supervisors must not be open to whoever looks into /proc/PID/fd: an exit
     * code could be forged, another command's output taken. Inherited by supervisors, and ends at exec */
    prctl(PR_SET_DUMPABLE, 0);
    fcntl(LISTEN_FD, F_SETFD, FD_CLOEXEC);
    set_nonblock(LISTEN_FD);
    if (requests_begin()) return 70;
    sigset_t blocked, before;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    sigdelset(&before, SIGCHLD);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGCHLD, &action, NULL);
    signal(SIGPIPE, SIG_IGN);

    for (;;) {
        int at_conn[MAX_CONNS];
        wake = INT64_MAX;
        n_table = 0;
        check_time(now_ns());
        int at_listener = watch(LISTEN_FD, POLLIN);
        int polled = n_conns;
        for (int i = 0; i < n_conns; i++) {
            struct conn *c = conns[i];
            bool full = c->job && buf_len(&c->job->input) > HIGH_WATER;
            at_conn[i] = watch(c->fd, (full ? 0 : POLLIN) | POLLRDHUP | (buf_len(&c->out) ? POLLOUT : 0));
        }
        for (int i = 0; i < n_jobs; i++)
            if (!jobs[i]->shell) exec_watch(jobs[i]);
        shell_watch();
        drains_watch();
        struct timespec timeout = {0}, *limit = NULL;
        if (wake != INT64_MAX) {
            int64_t left = wake - now_ns();
            if (left < 0) left = 0;
            timeout = (struct timespec){left / 1000000000, left % 1000000000};
            limit = &timeout;
        }
        int n = ppoll(table, n_table, limit, &before);
        reap();
        if (n > 0) {
            for (int i = 0; i < n_jobs; i++)
                if (!jobs[i]->shell && !jobs[i]->over) exec_handle(jobs[i]);
            shell_handle();
            drains_handle();
            for (int i = 0; i < polled; i++) {
                short events = ready(at_conn[i]);
                if (events & POLLIN) conn_read(conns[i]);
                else if (events & (POLLRDHUP | POLLHUP | POLLERR)) conns[i]->dead = true;
            }
            if (ready(at_listener)) conn_accept(LISTEN_FD);
        }
        for (int i = 0; i < n_conns; i++)
            if (!conns[i]->dead && (buf_len(&conns[i]->out) || conns[i]->finished)) conn_write(conns[i]);
        for (int i = n_conns - 1; i >= 0; i--)
            if (conns[i]->dead) conn_close(i);
        for (int i = n_jobs - 1; i >= 0; i--)
            if (jobs[i]->over) job_free(i);
    }
}
