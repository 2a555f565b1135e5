/* The two short-lived helpers on the host: `create` makes a container, `restore` prepares the ground for CRIU. */
#define _GNU_SOURCE
#include "belayer.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHANNEL_FD (PASSED_FD + 1)

static int report_fd = 2; /* where a failure's sentence goes */

static void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
static void die(const char *format, ...) {
    int saved = errno;
    char text[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text - 80, format, args);
    va_end(args);
    if (n > (int)sizeof text - 80) n = sizeof text - 80;
    n += snprintf(text + n, sizeof text - n, ": %s", strerror(saved));
    if (write(report_fd, text, n) < 0) _exit(71);
    _exit(70);
}

struct options {
    const char *root, *agent, *hostname, *request, *work, *closed;
    char **cgroups, **env; /* env: of the init, where shell.c finds what the image sets */
    int n_cgroups, n_env;
    char **rest;
};

static void parse(int argc, char **argv, struct options *o) {
    memset(o, 0, sizeof *o);
    o->cgroups = xmalloc(sizeof(char *) * (argc + 1));
    o->env = xmalloc(sizeof(char *) * (argc + 1));
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--")) {
            o->rest = argv + i + 1;
            return;
        }
        if (i + 1 >= argc) break;
        if (!strcmp(argv[i], "--root")) o->root = argv[++i];
        else if (!strcmp(argv[i], "--agent")) o->agent = argv[++i];
        else if (!strcmp(argv[i], "--hostname")) o->hostname = argv[++i];
        else if (!strcmp(argv[i], "--request")) o->request = argv[++i];
        else if (!strcmp(argv[i], "--work")) o->work = argv[++i];
        else if (!strcmp(argv[i], "--close")) o->closed = argv[++i];
        else if (!strcmp(argv[i], "--env")) o->env[o->n_env++] = argv[++i];
        else if (!strcmp(argv[i], "--cgroup")) o->cgroups[o->n_cgroups++] = argv[++i];
        else break;
    }
}

static void join_cgroups(const struct options *o) {
    char path[4096];
    for (int i = 0; i < o->n_cgroups; i++) {
        if (limit_devices(o->cgroups[i])) die("the devices of cgroup %s cannot be limited", o->cgroups[i]);
        snprintf(path, sizeof path, "%s/cgroup.procs", o->cgroups[i]);
        if (write_file(path, "0")) die("cannot join cgroup %s", o->cgroups[i]);
    }
}

static void private_mounts(const char *root) {
    if (unshare(CLONE_NEWNS)) die("no mount namespace");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("mounts cannot be made private");
    if (mount(root, root, NULL, MS_BIND, NULL)) die("cannot bind %s", root);
}

/* What the container's root keeps. Not CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_MKNOD, CAP_NET_RAW, CAP_SYS_CHROOT … */
static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID,
                           CAP_SETUID, CAP_SETPCAP, CAP_NET_BIND_SERVICE, CAP_SETFCAP};

static void drop_capabilities(void) {
    uint64_t keep = 0;
    for (unsigned i = 0; i < sizeof kept / sizeof *kept; i++) keep |= 1ULL << kept[i];
    for (int cap = 0; cap < 64; cap++)
        if (!(keep >> cap & 1) && prctl(PR_CAPBSET_READ, cap) == 1 && prctl(PR_CAPBSET_DROP, cap))
            die("capability %d cannot be dropped", cap);
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{0}};
    for (int half = 0; half < 2; half++)
        data[half].effective = data[half].permitted = (uint32_t)(keep >> (32 * half));
    if (syscall(SYS_capset, &head, data)) die("capabilities cannot be dropped");
}

/* Files below /proc that tell of the host's memory, devices and keys, and that uid 0 may read without any capability. */
static const char *const masked[] = {MASKED_PATHS};

/* Each is covered by the file `mask` of the container's own agent folder: empty, without permissions and immutable. Not by
 * the host's /dev/null: CRIU restores such mounts writable, and then uid 0 could change the mode of the host's device. */
static void mask(int agent) {
    int fd = openat(agent, "mask", O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return; /* the trial container of `belayer doctor` */
    if (fd < 0) die("cannot open the mask");
    char source[64];
    snprintf(source, sizeof source, "/proc/self/fd/%d", fd);
    for (unsigned i = 0; i < sizeof masked / sizeof *masked; i++)
        if (!access(masked[i], F_OK) && mount(source, masked[i], NULL, MS_BIND, NULL)) die("cannot mask %s", masked[i]);
}

static void ensure_dir(const char *path) {
    if (mkdir(path, 0755) && errno != EEXIST) die("cannot make %s in the image", path);
}

/* Runs as PID 1 of the new pid namespace, still with the host's mounts in view. */
static void become_init(const struct options *o) {
    setsid();
    int agent = open(o->agent, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (agent < 0) die("cannot open %s", o->agent);
    if (chdir(o->root)) die("cannot enter %s", o->root);
    if (syscall(SYS_pivot_root, ".", ".")) die("cannot make %s the root", o->root);
    /* from here "/" is the new root, and the old one lies over it until it is detached below */
    ensure_dir("/proc");
    ensure_dir("/dev");
    ensure_dir("/dev/pts");
    ensure_dir("/run");
    ensure_dir(AGENT_DIR);
    /* read-only: /proc/sys and /proc/sysrq-trigger obey uid 0 even without capabilities */
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL)) die("no /proc");
    mask(agent);
    if (mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"))
        die("no /dev/pts");
    char source[64];
    snprintf(source, sizeof source, "/proc/self/fd/%d", agent);
    if (mount(source, AGENT_DIR, NULL, MS_BIND, NULL)) die("cannot bind " AGENT_DIR);
    if (umount2(".", MNT_DETACH)) die("the old root cannot be detached");
    if (chdir("/")) die("no root");

    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = AGENT_SOCKET};
    umask(0177);
    if (listener < 0 || bind(listener, (void *)&address, sizeof address) || listen(listener, 64))
        die("no socket at " AGENT_SOCKET);
    umask(022);
    /* writable, since CRIU must be able to bind the socket here again; the host makes the folder immutable instead */
    if (mount(NULL, AGENT_DIR, NULL, MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV, NULL))
        die(AGENT_DIR " cannot be remounted");

    if (sethostname(o->hostname, strlen(o->hostname))) die("hostname");
    setpriority(PRIO_PROCESS, 0, 0); /* not the keeper's */
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none); /* a core dump would go to the host's core_pattern */

    int null = open("/dev/null", O_RDWR);
    if (null < 0) die("the image has no /dev/null");
    for (int fd = 0; fd < 3; fd++) dup2(null, fd);
    if (report_fd != LISTEN_FD + 1) dup2(report_fd, LISTEN_FD + 1);
    dup2(listener, LISTEN_FD);
    report_fd = LISTEN_FD + 1;
    fcntl(report_fd, F_SETFD, FD_CLOEXEC);
    syscall(SYS_close_range, LISTEN_FD + 2, ~0U, 0);
    for (int signal_number = 1; signal_number < 32; signal_number++) signal(signal_number, SIG_DFL);
    drop_capabilities();
    if (install_seccomp()) die("no system-call filter");
    char *argv[] = {"belayer", "init", NULL};
    execve(AGENT_DIR "/init", argv, o->env);
    die("cannot run " AGENT_DIR "/init");
}

/* Joins the cgroups and waits on descriptor 11 for what to do in them: a role and its arguments, each ended by NUL. */
int park_main(int argc, char **argv) {
    static char message[1 << 17];
    static char *words[256];
    struct options o;
    parse(argc, argv, &o);
    join_cgroups(&o);
    ssize_t n = recv(CHANNEL_FD, message, sizeof message - 1, 0);
    if (n < 0) die("no command came");
    close(CHANNEL_FD);
    int count = 0;
    for (char *p = message; p < message + n && count < 255; p += strlen(p) + 1) words[count++] = p;
    if (!count) return 0; /* not needed */
    if (!strcmp(words[0], "create")) return create_main(count, words);
    if (!strcmp(words[0], "restore")) return restore_main(count, words);
    return 64;
}

int create_main(int argc, char **argv) {
    struct options o;
    parse(argc, argv, &o);
    if (!o.root || !o.agent || !o.hostname) {
        fprintf(stderr, "create (network namespace: descriptor 10) --root DIR --agent DIR --hostname NAME [--env NAME=VALUE]...");
        return 64;
    }
    if (setns(PASSED_FD, CLONE_NEWNET)) die("cannot enter the network namespace");
    if (unshare(CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID)) die("no namespaces");
    private_mounts(o.root);
    int report[2];
    if (pipe2(report, O_CLOEXEC)) die("no pipe");
    /* CLONE_PARENT: the container's init is a child of the keeper, which reaps it, not of this helper */
    pid_t pid = syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
    if (pid < 0) die("no process");
    if (pid == 0) {
        dup2(report[1], 30); /* clear of the descriptors that become_init places */
        report_fd = 30;
        become_init(&o);
    }
    close(report[1]);
    char text[512];
    ssize_t n = read(report[0], text, sizeof text); /* end of file: the init runs */
    if (n > 0) {
        if (write(2, text, n) < 0) return 71;
        return 70;
    }
    printf("%d\n", pid);
    return 0;
}

int restore_main(int argc, char **argv) {
    struct options o;
    parse(argc, argv, &o);
    if (!o.root || !o.request || !o.work || !o.rest || !o.rest[0]) {
        fprintf(stderr, "restore (network namespace: descriptor 10, for CRIU) --root DIR --request HEX --work DIR "
                        "[--close DIR] -- criu swrk 11");
        return 64;
    }
    private_mounts(o.root);
    return restore_by_criu(o.rest, o.request, o.work, o.closed ? o.closed : "");
}
