/* Private to the init role: connections, jobs and the shell. The wire format is described in init.c. */
#ifndef BELAYER_INIT_H
#define BELAYER_INIT_H

#include "belayer.h"

#define HIGH_WATER (1 << 19) /* unsent bytes of one connection above which its command's output is left in the pipe */

enum error_code { ERROR_STALE = 1, ERROR_BUSY = 2, ERROR_BAD = 3, ERROR_START = 4 };
enum result_flag { TIMED_OUT = 1, TRUNCATED = 2, SHELL_ENDED = 4, WAS_QUIET = 8 };

struct conn {
    int fd;
    struct buf in, out;
    struct job *job;
    bool finished; /* close once `out` is sent */
    bool dead;
};

struct job {
    bool shell, over, killed;
    struct conn *conn; /* NULL: cancelled */
    int64_t started, deadline, quiet, last_output, give_up;
    uint64_t limit, sent, dropped;
    uint32_t flags;
    /* exec only */
    pid_t supervisor;
    int status, in, out[2];
    struct buf input;
    bool input_ended;
    int at_status, at_in, at_out[2]; /* places in the poll table of this round */
    /* shell only */
    struct buf script;
    int stage; /* of the interruption */
};

extern struct job *jobs[128];
extern int n_jobs;
extern uint64_t jobs_started;

void reply(struct conn *c, char type, const void *data, size_t n);
void refuse(struct conn *c, enum error_code code, const char *text);
void job_output(struct job *j, char type, const char *data, size_t n);
void job_finish(struct job *j, int exit_code, int signal_number);

/* request.c */
int requests_begin(void);
void request(struct conn *c, char type, const char *data, size_t n);

/* jobs.c */
void exec_start(struct job *j, const struct command *c);
void exec_stop(struct job *j, uint32_t why);
void exec_poll(struct job *j, int64_t now);
int drain_add(int fd);

/* shell.c */
extern pid_t shell_pid;
bool shell_busy(void);
void shell_start_job(struct job *j);
void shell_stop(struct job *j, uint32_t why);
void shell_reaped(pid_t pid, int status);
void shell_tick(int64_t now);

/* the poll table, filled anew on every round */
int watch(int fd, short events); /* index into the table, -1 when fd < 0 */
short ready(int index);
void shell_watch(void);
void shell_handle(void);
void exec_watch(struct job *j);
void exec_handle(struct job *j);
void drains_watch(void);
void drains_handle(void);
void wake_at(int64_t when); /* the next round is no later than this */

#endif
