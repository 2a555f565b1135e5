/* One-off commands: their pipes, their supervisor, and the drains that outlive them.
 *
 * A command is over when its main process has ended, not when its output is closed: a background process that inherited
 * the pipe must not hang the caller. Such a pipe is read on and thrown away ("drained"), so that the background process
 * neither blocks nor dies of SIGPIPE.
 */
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define MAX_DRAINS 1024
#define GIVE_UP_NS 5000000000LL /* a supervisor that was told to kill everything gets this long */

static int drains[MAX_DRAINS], at_drain[MAX_DRAINS], n_drains;
static char block[1 << 16];

static void shut(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

int drain_add(int fd) {
    if (n_drains == MAX_DRAINS) {
        close(fd);
        return -1;
    }
    at_drain[n_drains] = -1;
    drains[n_drains++] = fd;
    return 0;
}

void drains_watch(void) {
    for (int i = 0; i < n_drains; i++) at_drain[i] = watch(drains[i], POLLIN);
}

void drains_handle(void) {
    for (int i = n_drains - 1; i >= 0; i--) {
        if (!ready(at_drain[i])) continue;
        ssize_t n = read(drains[i], block, sizeof block);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) continue;
        close(drains[i]);
        drains[i] = drains[--n_drains];
        at_drain[i] = at_drain[n_drains];
    }
}

void exec_start(struct job *j, const struct command *c) {
    int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, status[2] = {-1, -1};
    struct command command = *c;
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || pipe2(status, O_CLOEXEC)) goto failed;
    command.in = in[0];
    command.out = out[1];
    command.err = err[1];
    pid_t pid = fork();
    if (pid == 0) supervise(&command, status[1]);
    if (pid < 0) goto failed;
    close(in[0]);
    close(out[1]);
    close(err[1]);
    close(status[1]);
    j->supervisor = pid;
    j->in = in[1];
    j->out[0] = out[0];
    j->out[1] = err[0];
    j->status = status[0];
    set_nonblock(j->in);
    set_nonblock(j->out[0]);
    set_nonblock(j->out[1]);
    set_nonblock(j->status);
    return;
failed:;
    const char *text = strerror(errno);
    int *all[] = {in, out, err, status};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++)
            if (all[i][k] >= 0) close(all[i][k]);
    /* the container has used up its own processes or descriptors: an outcome of the commands that ran in it */
    job_output(j, 'e', "belayer: no process can be started: ", 36);
    job_output(j, 'e', text, strlen(text));
    job_finish(j, 126, 0);
}

void exec_watch(struct job *j) {
    bool room = !j->conn || buf_len(&j->conn->out) < HIGH_WATER;
    if (j->in >= 0 && !buf_len(&j->input) && j->input_ended) shut(&j->in);
    j->at_in = watch(j->in, buf_len(&j->input) ? POLLOUT : 0); /* POLLERR tells when nobody reads any more */
    for (int i = 0; i < 2; i++) j->at_out[i] = room ? watch(j->out[i], POLLIN) : -1;
    j->at_status = watch(j->status, POLLIN);
}

static void read_output(struct job *j, int i, size_t at_most) {
    while (at_most && j->out[i] >= 0) {
        ssize_t n = read(j->out[i], block, at_most < sizeof block ? at_most : sizeof block);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            shut(&j->out[i]);
            return;
        }
        job_output(j, i ? 'e' : 'o', block, n);
        at_most -= n;
    }
}

static void finish(struct job *j, struct outcome o) {
    for (int i = 0; i < 2; i++) {
        int waiting = 0; /* what was written before the end; more may come from background processes, for ever */
        if (j->out[i] >= 0 && !ioctl(j->out[i], FIONREAD, &waiting) && waiting > 0) read_output(j, i, waiting);
        char probe;
        if (j->out[i] >= 0 && read(j->out[i], &probe, 0) == 0) {
            struct pollfd end = {j->out[i], POLLIN, 0};
            if (poll(&end, 1, 0) == 1 && !(end.revents & POLLIN) && (end.revents & POLLHUP)) shut(&j->out[i]);
        }
        if (j->out[i] >= 0) drain_add(j->out[i]);
        j->out[i] = -1;
    }
    shut(&j->in);
    shut(&j->status);
    job_finish(j, o.exit_code, o.signal);
}

void exec_handle(struct job *j) {
    if (ready(j->at_in) & (POLLERR | POLLHUP)) {
        shut(&j->in);
        buf_free(&j->input);
    } else if (ready(j->at_in) & POLLOUT) {
        ssize_t n = write(j->in, buf_head(&j->input), buf_len(&j->input));
        if (n > 0) buf_drop(&j->input, n);
    }
    if (j->in < 0) buf_free(&j->input);
    for (int i = 0; i < 2; i++)
        if (ready(j->at_out[i])) read_output(j, i, sizeof block);
    if (ready(j->at_status)) {
        struct outcome o;
        ssize_t n = read(j->status, &o, sizeof o);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        /* no outcome: the command killed its own supervisor */
        finish(j, n == sizeof o ? o : (struct outcome){-1, SIGKILL});
    }
}

void exec_stop(struct job *j, uint32_t why) {
    if (j->killed || j->over) return;
    j->flags |= why;
    j->killed = true;
    j->give_up = now_ns() + GIVE_UP_NS;
    kill(j->supervisor, SIGTERM);
    kill(j->supervisor, SIGCONT); /* a command can stop its supervisor, which then would not even hear of this */
}

void exec_poll(struct job *j, int64_t now) {
    if (!j->killed) return;
    if (now < j->give_up) return wake_at(j->give_up);
    kill(j->supervisor, SIGKILL);
    finish(j, (struct outcome){-1, SIGKILL});
}
