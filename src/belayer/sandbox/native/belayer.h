/* One small static program with eight roles, chosen by its first argument:
 *
 *   keeper   on the host, one per run: starts helpers, adopts and reaps containers, kills all of them when the driver dies
 *   park     on the host, one per container: joins the container's cgroups ahead, waits, and becomes one of the next two
 *   create   makes the namespaces of a container and becomes its init
 *   restore  makes a private mount table, then runs CRIU, whose processes start in its cgroups
 *   tree     on the host, short-lived: copies and fingerprints the writable layer of an overlay
 *   init     inside the container as PID 1: reaps, runs commands, owns the terminal of the persistent shell
 *   guest    inside a container that podman made, as PID 1: what `create` does inside one of our own, then becomes init
 *   gate     on the host, called by podman's runtime in the place of CRIU: lets the host in while a container is frozen
 *
 * The init role must stay dumpable by CRIU: it holds no descriptor of the host, its socket lives in the external mount
 * /run/agent, and every connection is closed by the init itself before the answer counts as complete.
 */
#ifndef BELAYER_H
#define BELAYER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define AGENT_DIR "/run/agent"
#define AGENT_SOCKET "/run/agent/agent.sock"
#define LISTEN_FD 3
/* covered by an empty file; criu.py names the same ones to CRIU as external mounts. Each costs half a millisecond of every
 * dump and restore, so the list holds what uid 0 may read without any capability and what tells of the host */
#define MASKED_PATHS \
    "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats"
#define PASSED_FD 10 /* first descriptor number of those passed to a helper */

/* roles */
int keeper_main(int argc, char **argv);
int park_main(int argc, char **argv);
int create_main(int argc, char **argv);
int restore_main(int argc, char **argv);
int init_main(void);
int guest_main(void);
int gate_main(int argc, char **argv);
int tree_main(int argc, char **argv);

/* util.c */
struct buf {
    char *data;
    size_t start, end, size; /* the content is data[start..end) */
};
size_t buf_len(const struct buf *b);
char *buf_head(const struct buf *b);
void buf_add(struct buf *b, const void *data, size_t n);
char *buf_room(struct buf *b, size_t n); /* n writable bytes at the end; add them by b->end += n */
void buf_drop(struct buf *b, size_t n);
void buf_free(struct buf *b);
void *xmalloc(size_t n);
int64_t now_ns(void);
int set_nonblock(int fd);
int write_file(const char *path, const char *text);
int kill_children(int rounds_ms);

/* seccomp.c */
int install_seccomp(void);

/* criu.c */
int restore_by_criu(char **command, const char *request, const char *work, const char *folder);

/* devices.c */
int limit_devices(const char *cgroup);

/* run.c: started by init in a forked child, never returns */
struct command {
    char **argv, **envp;
    const char *cwd;
    int in, out, err; /* become 0, 1, 2 */
    bool builtin;     /* argv[0] is read, write, stat, pack or unpack */
};
void supervise(const struct command *c, int status_fd) __attribute__((noreturn));
char **with_image_env(char **envp);

/* copy.c: the exit code is an errno */
int pack_main(char **argv);
int unpack_main(char **argv);

/* what a supervisor writes to its status pipe */
struct outcome {
    int32_t exit_code; /* -1: see signal */
    int32_t signal;
};

#endif
