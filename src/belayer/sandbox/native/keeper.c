/* The keeper: one per run, a child of the driver in its own session.
 *
 * It starts helpers on request, is the subreaper of everything they leave (restored containers), reaps it, and when the
 * driver goes away, for whatever reason, kills all containers of the run within milliseconds, removes their cgroups and
 * unmounts the sandbox store if it was the last user. It leaves when the driver closes its end of the socket, or when the
 * driver dies (a process that the driver forked may still hold a copy of that end).
 *
 * Requests and answers are datagrams on one SOCK_SEQPACKET socket:
 *   request   u32 id, then arguments, each ended by NUL; descriptors sent along become 10, 11, … in the helper
 *   request   u32 id alone: kill that helper
 *   answer    u32 id, i32 wait status, then what the helper printed
 */
#define _GNU_SOURCE
#include "belayer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_HELPERS 64
#define MAX_OUTPUT 16384

struct helper {
    pid_t pid;
    uint32_t id;
    int output;
};

static int driver_fd = -1;
static struct helper helpers[MAX_HELPERS];
static int n_helpers;
static char message[1 << 17];

static void answer(uint32_t id, int status, int output) {
    static char reply[8 + MAX_OUTPUT];
    memcpy(reply, &id, 4);
    memcpy(reply + 4, &status, 4);
    ssize_t n = output >= 0 ? read(output, reply + 8, MAX_OUTPUT) : 0;
    if (n < 0) n = 0;
    if (output >= 0) close(output);
    /* a driver that went away is noticed by the read side */
    if (send(driver_fd, reply, 8 + n, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET) _exit(71);
}

static void start(char *request, size_t size, const int *fds, int n_fds) {
    uint32_t id;
    memcpy(&id, request, 4);
    char *argv[256];
    int argc = 0;
    for (char *p = request + 4; p < request + size && argc < 255; p += strlen(p) + 1) argv[argc++] = p;
    argv[argc] = NULL;
    int output[2];
    if (n_helpers == MAX_HELPERS || !argc || pipe2(output, O_CLOEXEC | O_NONBLOCK)) {
        answer(id, 71 << 8, -1);
        return;
    }
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == 1) _exit(0);
        /* ignored signals would stay ignored in the helper; CRIU ends a process of its own with SIGTERM and waits for it */
        for (int s = 1; s < 32; s++) signal(s, SIG_DFL);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        setpgid(0, 0); /* not a session of its own: it would leave the keeper's scheduling group */
        int high[16], null = open("/dev/null", O_RDONLY);
        for (int i = 0; i < n_fds; i++) high[i] = fcntl(fds[i], F_DUPFD, 100);
        dup2(null, 0);
        int writer = fcntl(output[1], F_DUPFD, 100);
        fcntl(writer, F_SETFL, fcntl(writer, F_GETFL) & ~O_NONBLOCK);
        dup2(writer, 1);
        dup2(writer, 2);
        for (int i = 0; i < n_fds; i++) dup2(high[i], PASSED_FD + i);
        close_range(3, PASSED_FD - 1, 0);
        close_range(PASSED_FD + n_fds, ~0U, 0);
        execv(argv[0], argv);
        dprintf(2, "cannot run %s: %s", argv[0], strerror(errno));
        _exit(71);
    }
    close(output[1]);
    if (pid < 0) {
        answer(id, 71 << 8, output[0]);
        return;
    }
    helpers[n_helpers++] = (struct helper){pid, id, output[0]};
}

static void stop_helper(void) {
    uint32_t id;
    memcpy(&id, message, 4);
    for (int i = 0; i < n_helpers; i++)
        if (helpers[i].id == id) kill(-helpers[i].pid, SIGKILL); /* it leads a group of its own */
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < n_helpers; i++)
            if (helpers[i].pid == pid) {
                answer(helpers[i].id, status, helpers[i].output);
                helpers[i] = helpers[--n_helpers];
                break;
            }
}

static int receive(void) { /* 0 when the driver is gone */
    int fds[16], n_fds = 0;
    char control[CMSG_SPACE(sizeof fds)];
    struct iovec part = {message, sizeof message - 1};
    struct msghdr head = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(driver_fd, &head, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) return 1;
    if (n <= 0) return 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&head); c; c = CMSG_NXTHDR(&head, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(c), n_fds * sizeof(int));
        }
    message[n] = 0;
    if (n > 4) start(message, n, fds, n_fds);
    else if (n == 4) stop_helper();
    for (int i = 0; i < n_fds; i++) close(fds[i]);
    return 1;
}

/* Kill everything in the cgroup `dir` and below: at once where the kernel can, else process by process. */
static void kill_cgroup(const char *dir) {
    char path[4096];
    snprintf(path, sizeof path, "%s/cgroup.kill", dir);
    if (!write_file(path, "1")) return;
    snprintf(path, sizeof path, "%s/cgroup.procs", dir);
    FILE *list = fopen(path, "re");
    if (!list) return;
    int pid;
    while (fscanf(list, "%d", &pid) == 1)
        if (pid > 1) kill(pid, SIGKILL);
    fclose(list);
}

static void each_cgroup(const char *dir, void (*act)(const char *)) {
    DIR *list = opendir(dir);
    if (!list) return;
    struct dirent *entry;
    while ((entry = readdir(list)))
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.') {
            char path[4096];
            int n = snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
            if (n < (int)sizeof path) each_cgroup(path, act);
        }
    closedir(list);
    act(dir);
}

static void remove_cgroup(const char *dir) { rmdir(dir); }

static void on_child(int signal_number) { (void)signal_number; /* only to interrupt ppoll */ }

/* keeper --driver SOCKET_FD PID [--cgroup DIR]... [--store USERS_FD MOUNT_LOCK MOUNT_POINT] */
int keeper_main(int argc, char **argv) {
    char **cgroups = xmalloc(sizeof(char *) * (argc + 1)), *mount_lock = NULL, *mount_point = NULL;
    int n_cgroups = 0, users = -1, driver = -1;
    for (int i = 1; i + 1 < argc; i++) {
        if (!strcmp(argv[i], "--cgroup")) {
            cgroups[n_cgroups++] = argv[++i];
        } else if (!strcmp(argv[i], "--driver") && i + 2 < argc) {
            driver_fd = atoi(argv[++i]);
            /* a forked child of the driver may keep our socket open after the driver's death */
            driver = syscall(SYS_pidfd_open, atoi(argv[++i]), 0);
        } else if (!strcmp(argv[i], "--store") && i + 3 < argc) {
            users = atoi(argv[++i]);
            mount_lock = argv[++i];
            mount_point = argv[++i];
        }
    }
    if (driver_fd < 0 || driver < 0) return 64;
    fcntl(driver_fd, F_SETFD, FD_CLOEXEC);
    if (users >= 0) fcntl(users, F_SETFD, FD_CLOEXEC);
    setsid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "belayer-keeper");
    /* the helpers inherit this: containers stand still while CRIU waits for a busy CPU. CRIU gives restored processes
     * their own priority back, and a new container resets it. Where the kernel schedules by session (autogroup), the
     * priority counts only inside the session, and the session has one of its own */
    setpriority(PRIO_PROCESS, 0, -10);
    write_file("/proc/self/autogroup", "-10");
    sigset_t chld, before;
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    sigprocmask(SIG_BLOCK, &chld, &before);
    sigdelset(&before, SIGCHLD);
    struct sigaction action = {.sa_handler = on_child};
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    sigaction(SIGCHLD, &action, NULL);

    for (;;) {
        struct pollfd waits[2] = {{driver_fd, POLLIN, 0}, {driver, POLLIN, 0}};
        int n = ppoll(waits, 2, NULL, &before);
        if (n < 0 && errno != EINTR) break;
        reap();
        if (n > 0 && waits[1].revents) break;
        if (n > 0 && waits[0].revents && !receive()) break;
    }

    for (int i = 0; i < n_helpers; i++) kill(helpers[i].pid, SIGKILL);
    int64_t end = now_ns() + 10000000000LL;
    do {
        for (int i = 0; i < n_cgroups; i++) each_cgroup(cgroups[i], kill_cgroup);
        n_helpers = 0;
        while (waitpid(-1, NULL, WNOHANG) > 0) continue;
        usleep(2000);
    } while (waitpid(-1, NULL, WNOHANG) >= 0 && now_ns() < end);
    for (int i = 0; i < n_cgroups; i++) each_cgroup(cgroups[i], remove_cgroup);
    if (mount_point) {
        int lock = open(mount_lock, O_RDWR | O_CLOEXEC);
        if (lock >= 0 && !flock(lock, LOCK_EX) && !flock(users, LOCK_EX | LOCK_NB)) {
            umount2(mount_point, 0);
            flock(users, LOCK_SH); /* the driver, if it lives, shares this lock: the next user must not wait for it */
        }
    }
    return 0;
}
