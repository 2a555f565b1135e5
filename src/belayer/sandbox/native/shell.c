/* The persistent shell: bash on a terminal of the container's own, driven through two pipes.
 *
 * Commands go in and exit codes come out through pipes that no command inherits, so neither the terminal's echo nor a
 * command's output can be mistaken for the end of a command. The driver runs as PROMPT_COMMAND of an interactive bash:
 * after an interruption (SIGINT) bash drops what it ran, keeps its state, and comes back to the driver.
 *
 * Commands read from /dev/null: one that asks for input must fail at once and not wait for its timeout.
 *
 * When the exit code arrives, output may still be on its way through the terminal. Init then writes a fresh random token
 * to the terminal itself, behind everything the command wrote, and reads up to it.
 */
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define COMMAND_FD 198
#define STATUS_FD 199
#define PENDING_MAX 65536 /* output of background jobs between two commands */
#define TOKEN_BYTES 24

/* `jobs` makes bash forget finished jobs, as it does at a prompt, which is never reached here.
 * Two nested loops, so that a stray `break` in a command does not leave the driver. */
static const char driver[] =
    "_BLY_S=$?; export -n PROMPT_COMMAND; PS1= PS2=; unset HISTFILE MAILCHECK; "
    "_bly_status() { return \"$1\"; }; "
    "printf '%s %d\\n' \"${_BLY_N-}\" \"$_BLY_S\" >&199; "
    "while :; do while IFS= read -r -d '' -u 198 _BLY_N && IFS= read -r -d '' -u 198 _BLY_C; do "
    "_bly_status \"$_BLY_S\"; eval \"$_BLY_C\" </dev/null 198<&- 199>&-; _BLY_S=$?; jobs >/dev/null 2>&1; "
    "printf '%s %d\\n' \"$_BLY_N\" \"$_BLY_S\" >&199; "
    "done; _BLY_S=0; printf '%s 0\\n' \"$_BLY_N\" >&199; done";

static char prompt[sizeof driver + 32];
static char *environment[] = {
    "?PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "?HOME=/root", "?USER=root",
    "?SHELL=/bin/bash", "?LANG=C.UTF-8", "?TERM=dumb", "?PAGER=cat", "?GIT_PAGER=cat", "PS1=", prompt, NULL};

static void go_home(void) {
    const char *workdir = getenv("BELAYER_WORKDIR");
    if ((!workdir || chdir(workdir)) && chdir("/root") && chdir("/")) _exit(126);
}

static enum { NONE, STARTING, IDLE, RUNNING, SETTLING } state;
static int master = -1, slave = -1, commands = -1, statuses = -1;
static int at_master, at_commands, at_statuses;
pid_t shell_pid;
static uint64_t number;
static struct job *current;
static struct buf outgoing, incoming, pending, tail;
static unsigned char token[TOKEN_BYTES];
static size_t token_written;
static int exit_code;
static int64_t next_step;

bool shell_busy(void) { return current != NULL; }

static void plain_terminal(void) { /* a command may have left it in any mode */
    struct termios t;
    if (tcgetattr(slave, &t)) return;
    cfmakeraw(&t);
    t.c_lflag |= ISIG | ICANON;
    t.c_iflag |= ICRNL;
    tcsetattr(slave, TCSANOW, &t);
}

static void forget(void) {
    int *all[] = {&master, &slave, &commands, &statuses};
    for (int i = 0; i < 4; i++) {
        if (*all[i] >= 0) close(*all[i]);
        *all[i] = -1;
    }
    buf_free(&outgoing);
    buf_free(&incoming);
    buf_free(&tail);
    shell_pid = 0;
    state = NONE;
}

static bool start(void) {
    int command_pipe[2], status_pipe[2];
    struct winsize size = {.ws_row = 50, .ws_col = 200};
    if (openpty(&master, &slave, NULL, NULL, &size)) {
        master = slave = -1;
        return false;
    }
    fcntl(master, F_SETFD, FD_CLOEXEC);
    fcntl(slave, F_SETFD, FD_CLOEXEC);
    plain_terminal();
    if (pipe2(command_pipe, O_CLOEXEC) || pipe2(status_pipe, O_CLOEXEC)) return false;
    commands = command_pipe[1];
    statuses = status_pipe[0];
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        ioctl(slave, TIOCSCTTY, 0);
        for (int fd = 0; fd < 3; fd++) dup2(slave, fd);
        dup2(command_pipe[0], COMMAND_FD);
        dup2(status_pipe[1], STATUS_FD);
        syscall(SYS_close_range, 3, COMMAND_FD - 1, 0);
        syscall(SYS_close_range, STATUS_FD + 1, ~0U, 0);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        for (int s = 1; s < 32; s++) signal(s, SIG_DFL);
        go_home();
        snprintf(prompt, sizeof prompt, "PROMPT_COMMAND=%s", driver);
        execle("/bin/bash", "bash", "--noprofile", "--norc", "--noediting", "-i", (char *)NULL, with_image_env(environment));
        _exit(127);
    }
    close(command_pipe[0]);
    close(status_pipe[1]);
    if (pid < 0) return false;
    shell_pid = pid;
    set_nonblock(master);
    /* init's own open file: O_NONBLOCK on the one that bash inherited would make bash's terminal non-blocking too */
    int own = open(ptsname(master), O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    close(slave);
    slave = own;
    set_nonblock(commands);
    set_nonblock(statuses);
    state = STARTING;
    number = 0;
    return true;
}

static void send_current(void) {
    char head[32];
    plain_terminal();
    int n = snprintf(head, sizeof head, "%llu", (unsigned long long)++number) + 1;
    buf_add(&outgoing, head, n);
    buf_add(&outgoing, buf_head(&current->script), buf_len(&current->script));
    buf_add(&outgoing, "", 1);
    if (buf_len(&pending)) job_output(current, 'o', buf_head(&pending), buf_len(&pending));
    buf_free(&pending);
    state = RUNNING;
}

void shell_start_job(struct job *j) {
    current = j;
    if (state == IDLE) return send_current();
    if (state == NONE && !start()) {
        const char text[] = "belayer: no shell can be started\n";
        forget();
        current = NULL;
        job_output(j, 'o', text, sizeof text - 1);
        job_finish(j, 126, 0);
    }
}

static void finish(int code, int signal_number) {
    struct job *j = current;
    current = NULL;
    if (j) job_finish(j, code, signal_number);
}

/* -- output and exit codes ----------------------------------------------------------------------------------------- */
static void emit(const char *data, size_t n) {
    if (current && state >= RUNNING) return job_output(current, 'o', data, n);
    if (buf_len(&pending) + n > PENDING_MAX) buf_drop(&pending, buf_len(&pending));
    if (n <= PENDING_MAX) buf_add(&pending, data, n);
}

static void settled(void) {
    state = IDLE;
    finish(exit_code, 0);
}

static void write_token(void) {
    while (token_written < TOKEN_BYTES) {
        ssize_t n = write(slave, token + token_written, TOKEN_BYTES - token_written);
        if (n <= 0) return;
        token_written += n;
    }
}

static void take_output(const char *data, size_t n) {
    if (state != SETTLING) return emit(data, n);
    buf_add(&tail, data, n);
    char *found = memmem(buf_head(&tail), buf_len(&tail), token, TOKEN_BYTES);
    if (found) {
        size_t before = found - buf_head(&tail);
        emit(buf_head(&tail), before);
        buf_drop(&tail, before + TOKEN_BYTES);
        settled();
        if (buf_len(&tail)) emit(buf_head(&tail), buf_len(&tail));
        buf_free(&tail);
    } else if (buf_len(&tail) > TOKEN_BYTES) {
        size_t safe = buf_len(&tail) - TOKEN_BYTES;
        emit(buf_head(&tail), safe);
        buf_drop(&tail, safe);
    }
}

static void read_master(void) {
    char block[1 << 14];
    ssize_t n;
    while ((n = read(master, block, sizeof block)) > 0) {
        take_output(block, n);
        if (state == SETTLING) write_token();
        if (current && current->conn && buf_len(&current->conn->out) > HIGH_WATER) return;
    }
}

static void take_status(uint64_t of, int code) {
    if (state == STARTING) {
        state = IDLE;
        if (current) send_current();
        return;
    }
    if (state != RUNNING || of != number) return; /* a second report after an interruption */
    exit_code = code;
    state = SETTLING;
    plain_terminal();
    if (getrandom(token, sizeof token, 0) != sizeof token) _exit(70);
    for (int i = 0; i < TOKEN_BYTES; i++) token[i] |= 0x80; /* no control characters of the terminal */
    token_written = 0;
    next_step = now_ns() + 2000000000LL;
    write_token();
}

static void read_statuses(void) {
    char block[512];
    ssize_t n = read(statuses, block, sizeof block);
    if (n <= 0) return;
    buf_add(&incoming, block, n);
    char *line;
    while ((line = memchr(buf_head(&incoming), '\n', buf_len(&incoming)))) {
        *line = 0;
        char *text = buf_head(&incoming), *space = strrchr(text, ' ');
        size_t length = line - text + 1;
        if (space) take_status(strtoull(text, NULL, 10), atoi(space + 1));
        buf_drop(&incoming, length);
    }
}

void shell_watch(void) {
    bool room = !current || !current->conn || buf_len(&current->conn->out) < HIGH_WATER;
    at_master = room ? watch(master, POLLIN) : -1;
    at_commands = buf_len(&outgoing) ? watch(commands, POLLOUT) : -1;
    at_statuses = watch(statuses, POLLIN);
}

void shell_handle(void) {
    if (ready(at_master)) read_master();
    if (ready(at_commands)) {
        ssize_t n = write(commands, buf_head(&outgoing), buf_len(&outgoing));
        if (n > 0) buf_drop(&outgoing, n);
    }
    if (ready(at_statuses) & POLLIN) read_statuses();
}

/* -- interruption -------------------------------------------------------------------------------------------------- */
static void kill_foreground(int signal_number) {
    pid_t group = 0;
    if (ioctl(master, TIOCGPGRP, &group)) group = 0;
    if (group > 1 && group != shell_pid) kill(-group, signal_number);
}

void shell_stop(struct job *j, uint32_t why) {
    if (j->over || j->killed) return;
    j->flags |= why;
    j->killed = true;
    j->stage = 0;
    next_step = now_ns();
}

void shell_tick(int64_t now) {
    if (!current) return;
    if (state == SETTLING) {
        write_token();
        if (now >= next_step) settled(); /* a background job floods the terminal: do without the rest */
        else wake_at(next_step);
        return;
    }
    if (!current->killed) return;
    if (now < next_step) return wake_at(next_step);
    switch (current->stage++) {
    case 0: /* like Ctrl-C: bash drops the whole command line, loops included, and keeps its state */
        kill_foreground(SIGINT);
        if (state == RUNNING) kill(shell_pid, SIGINT);
        next_step = now + 300000000LL;
        break;
    case 1:
    case 2:
        kill_foreground(SIGKILL);
        if (state == RUNNING) kill(shell_pid, SIGINT);
        next_step = now + 800000000LL; /* a busy machine, not a stubborn shell */
        break;
    default: /* the shell itself does not listen: a new one takes its place, and the result says so */
        kill_foreground(SIGKILL);
        kill(shell_pid, SIGKILL);
        next_step = now + 1000000000LL;
    }
    wake_at(next_step);
}

void shell_reaped(pid_t pid, int status) {
    (void)pid;
    if (master >= 0) read_master();
    if (statuses >= 0) read_statuses();
    if (current) {
        current->flags |= SHELL_ENDED;
        if (state == SETTLING) finish(exit_code, 0);
        else finish(WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    }
    forget();
}
