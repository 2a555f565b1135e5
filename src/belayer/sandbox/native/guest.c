/* PID 1 of a container that another runtime made: does what `create` does in a container of our own and that runtime has
 * not done, then becomes the init. Namespaces, mounts, cgroups and capabilities are the other runtime's part. */
#define _GNU_SOURCE
#include "belayer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static int fail(const char *what) {
    dprintf(2, "%s: %s\n", what, strerror(errno));
    return 70;
}

int guest_main(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = AGENT_SOCKET};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    umask(0177);
    if (listener < 0 || bind(listener, (void *)&address, sizeof address) || listen(listener, 64))
        return fail("no socket at " AGENT_SOCKET);
    umask(022);
    setpriority(PRIO_PROCESS, 0, 0); /* not the keeper's, which started the runtime */
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    for (int signal_number = 1; signal_number < 32; signal_number++) signal(signal_number, SIG_DFL);
    if (install_seccomp()) return fail("no system-call filter");
    if (listener != LISTEN_FD && dup2(listener, LISTEN_FD) < 0) return fail("descriptor");
    syscall(SYS_close_range, LISTEN_FD + 1, ~0U, 0);
    int null = open("/dev/null", O_RDWR);
    if (null < 0) return fail("the image has no /dev/null");
    for (int fd = 0; fd < 3; fd++) dup2(null, fd);
    close(null);
    char *argv[] = {"belayer", "init", NULL};
    int n = 0, kept = 0;
    while (environ[n]) n++;
    char **ours = xmalloc((n + 1) * sizeof *ours); /* what the image sets; the rest is the other runtime's idea */
    for (int i = 0; i < n; i++)
        if (!strncmp(environ[i], "BELAYER_", 8)) ours[kept++] = environ[i];
    execve(AGENT_DIR "/init", argv, ours);
    return 70;
}
