/* One command in a fresh process, and the supervisor that stands between it and init.
 *
 * The supervisor is the subreaper of the command, so that even double-forked descendants stay below it: when the command
 * is cancelled or runs out of time, everything that it started can be found and killed. When the command ends by itself
 * the supervisor leaves, and what the command left running belongs to init, like a background job after a login shell.
 */
#define _GNU_SOURCE
#include "belayer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int copy(int from, int to) {
    static char block[1 << 16];
    ssize_t n;
    while ((n = read(from, block, sizeof block)) > 0)
        for (ssize_t done = 0; done < n;) {
            ssize_t m = write(to, block + done, n - done);
            if (m < 0) return errno;
            done += m;
        }
    return n < 0 ? errno : 0;
}

static int fail(const char *path, int error) {
    dprintf(2, "%s: %s", path, strerror(error));
    return error ? error : 1;
}

/* The files that the host reads and writes; the exit code is the errno. Paths resolve inside the container's own root. */
static int builtin(char **argv) {
    const char *path = argv[1] ? argv[1] : "";
    struct stat st;
    if (!strcmp(argv[0], "stat")) return stat(path, &st) ? errno : 0;
    if (!strcmp(argv[0], "read")) {
        int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY); /* a fifo must not block, nor a tty be adopted */
        if (fd < 0 || fstat(fd, &st)) return fail(path, errno);
        if (S_ISDIR(st.st_mode)) return fail(path, EISDIR);
        if (!S_ISREG(st.st_mode)) return fail(path, EINVAL);
        int error = copy(fd, 1);
        return error ? fail(path, error) : 0;
    }
    if (!strcmp(argv[0], "write")) {
        mode_t mode = argv[2] ? strtoul(argv[2], NULL, 8) : 0644;
        for (char *slash = argv[1] + 1; *path && (slash = strchr(slash, '/')); slash++) {
            *slash = 0;
            if (mkdir(path, 0755) && errno != EEXIST) return fail(path, errno);
            *slash = '/';
        }
        int fd = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC | O_NOCTTY, mode);
        if (fd < 0 || fstat(fd, &st)) return fail(path, errno);
        if (!S_ISREG(st.st_mode)) return fail(path, EINVAL);
        int error = ftruncate(fd, 0) ? errno : copy(0, fd);
        if (!error && fchmod(fd, mode)) error = errno;
        if (close(fd) && !error) error = errno;
        return error ? fail(path, error) : 0;
    }
    if (!strcmp(argv[0], "pack")) return pack_main(argv);
    if (!strcmp(argv[0], "unpack")) return unpack_main(argv);
    return fail(argv[0], ENOSYS);
}

/* What the image sets stands in init's own environment, as BELAYER_ENV_NAME=VALUE: in its memory, so that restores keep it.
 * Of `envp`, entries with a leading "?" yield to it; the others override it. */
#define FROM_IMAGE "BELAYER_ENV_"
extern char **environ;

static char **find(char **list, char **end, const char *entry) {
    const char *equals = strchr(entry, '=');
    for (; equals && list < end; list++)
        if (!strncmp(*list, entry, equals + 1 - entry)) return list;
    return NULL;
}

char **with_image_env(char **envp) {
    size_t n = 0, length = strlen(FROM_IMAGE);
    for (char **e = environ; e && *e; e++) n++;
    for (char **e = envp; *e; e++) n++;
    char **all = xmalloc((n + 1) * sizeof *all), **end = all;
    for (char **e = environ; e && *e; e++)
        if (!strncmp(*e, FROM_IMAGE, length) && strchr(*e + length, '=')) *end++ = *e + length;
    for (char **e = envp; *e; e++) {
        char *entry = **e == '?' ? *e + 1 : *e, **same = find(all, end, entry);
        if (!same) *end++ = entry;
        else if (entry == *e) *same = entry;
    }
    return all;
}

static void run(const struct command *c) __attribute__((noreturn));
static void run(const struct command *c) {
    setsid();
    dup2(c->in, 0);
    dup2(c->out, 1);
    dup2(c->err, 2);
    syscall(SYS_close_range, 3, ~0U, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int s = 1; s < 32; s++) signal(s, SIG_DFL);
    if (!*c->cwd) { /* the default; a command that deleted its home must still be able to run the next one */
        const char *workdir = getenv("BELAYER_WORKDIR");
        if ((!workdir || chdir(workdir)) && chdir("/root") && chdir("/")) _exit(126);
    } else if (chdir(c->cwd)) {
        dprintf(2, "%s: %s\n", c->cwd, strerror(errno));
        _exit(126);
    }
    if (c->builtin) _exit(builtin(c->argv));
    execvpe(c->argv[0], c->argv, c->envp);
    dprintf(2, "%s: %s\n", c->argv[0], errno == ENOENT ? "command not found" : strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

void supervise(const struct command *c, int status_fd) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "belayer-run");
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM); /* init's order to kill everything */
    sigprocmask(SIG_SETMASK, &watched, NULL);
    signal(SIGCHLD, SIG_DFL);
    setsid();
    /* execvpe looks PATH up in its own environment */
    struct command command = *c;
    command.envp = with_image_env(c->envp);
    for (char **e = command.envp; *e; e++)
        if (!strncmp(*e, "PATH=", 5)) putenv(*e);
    pid_t main_pid = fork();
    if (main_pid == 0) run(&command);
    if (status_fd != 3) dup2(status_fd, 3);
    syscall(SYS_close_range, 4, ~0U, 0);
    for (int fd = 0; fd < 3; fd++) close(fd);
    struct outcome outcome = {-1, SIGKILL};
    if (main_pid < 0) {
        outcome = (struct outcome){126, 0};
        if (write(3, &outcome, sizeof outcome) < 0) _exit(1);
        _exit(1);
    }
    for (;;) {
        int signal_number = sigwaitinfo(&watched, NULL), status;
        if (signal_number == SIGTERM) {
            kill_children(3000);
            break;
        }
        pid_t pid;
        while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
            if (pid == main_pid) {
                outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
                outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
                goto ended;
            }
    }
ended:
    if (write(3, &outcome, sizeof outcome) < 0) _exit(1);
    _exit(0);
}
