/* What the host asks of init: the content of a request's frame, and the fence that keeps out hosts of the past. */
#define _GNU_SOURCE
#include "init.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

uint64_t jobs_started;

static uint64_t boot_nonce, fence_attempt, fence_generation;

int requests_begin(void) { return getrandom(&boot_nonce, sizeof boot_nonce, 0) == sizeof boot_nonce ? 0 : -1; }

struct reader {
    const char *p, *end;
    bool bad;
};

static uint64_t get(struct reader *r, int bytes) {
    uint64_t value = 0;
    if (r->end - r->p < bytes) {
        r->bad = true;
        return 0;
    }
    memcpy(&value, r->p, bytes);
    r->p += bytes;
    return value;
}

static char *get_string(struct reader *r) {
    uint32_t n = get(r, 4);
    if (r->bad || (size_t)(r->end - r->p) < n) {
        r->bad = true;
        return NULL;
    }
    char *text = xmalloc(n + 1);
    memcpy(text, r->p, n);
    r->p += n;
    return text;
}

static char **get_strings(struct reader *r) {
    uint32_t n = get(r, 4);
    if (r->bad || n > 1 << 16) {
        r->bad = true;
        n = 0;
    }
    char **list = xmalloc((n + 1) * sizeof *list);
    for (uint32_t i = 0; i < n && !r->bad; i++) list[i] = get_string(r);
    return list;
}

static void free_strings(char **list) {
    for (char **s = list; s && *s; s++) free(*s);
    free(list);
}

static bool fence_passes(struct conn *c, struct reader *r) {
    uint64_t attempt = get(r, 8), generation = get(r, 8);
    if (attempt < fence_attempt || (attempt == fence_attempt && generation < fence_generation)) {
        refuse(c, ERROR_STALE, "a newer attempt or generation has taken this sandbox over");
        return false;
    }
    fence_attempt = attempt;
    fence_generation = generation;
    return true;
}

static struct job *new_job(struct conn *c, struct reader *r, bool shell) {
    if (get(r, 1) && !fence_passes(c, r)) return NULL;
    uint32_t timeout_ms = get(r, 4), quiet_ms = get(r, 4);
    uint64_t limit = get(r, 8);
    if (r->bad || n_jobs == (int)(sizeof jobs / sizeof *jobs)) {
        refuse(c, r->bad ? ERROR_BAD : ERROR_BUSY, r->bad ? "malformed request" : "too many commands at once");
        return NULL;
    }
    struct job *j = xmalloc(sizeof *j);
    j->shell = shell;
    j->started = j->last_output = now_ns();
    j->deadline = timeout_ms ? j->started + timeout_ms * 1000000LL : 0;
    j->quiet = quiet_ms * 1000000LL;
    j->limit = limit;
    j->status = j->in = j->out[0] = j->out[1] = -1;
    j->at_status = j->at_in = j->at_out[0] = j->at_out[1] = -1;
    return j;
}

static void accept_job(struct conn *c, struct job *j) {
    j->conn = c;
    c->job = j;
    jobs[n_jobs++] = j;
    jobs_started++;
}

static void request_exec(struct conn *c, struct reader *r) {
    struct job *j = new_job(c, r, false);
    if (!j) return;
    struct command command = {.builtin = get(r, 1)};
    char *cwd = get_string(r), **argv = get_strings(r), **envp = get_strings(r);
    command.cwd = cwd;
    command.argv = argv;
    command.envp = envp;
    if (r->bad || !argv[0]) {
        refuse(c, ERROR_BAD, "malformed request");
        free(j);
    } else {
        accept_job(c, j);
        exec_start(j, &command);
    }
    free(cwd);
    free_strings(argv);
    free_strings(envp);
}

static void request_shell(struct conn *c, struct reader *r) {
    struct job *j = new_job(c, r, true);
    if (!j) return;
    if (shell_busy()) {
        refuse(c, ERROR_BUSY, "the shell still runs another command");
        free(j);
        return;
    }
    buf_add(&j->script, r->p, r->end - r->p);
    accept_job(c, j);
    shell_start_job(j);
}

static void request_ping(struct conn *c) {
    struct __attribute__((packed)) {
        uint64_t nonce, attempt, generation, jobs_started;
        uint32_t shell, jobs;
    } state = {boot_nonce, fence_attempt, fence_generation, jobs_started, shell_pid, n_jobs};
    reply(c, 'p', &state, sizeof state);
    c->finished = true;
}

void request(struct conn *c, char type, const char *data, size_t n) {
    struct reader r = {data, data + n, false};
    if (c->job && (type == 'i' || type == 'I')) {
        if (type == 'i') buf_add(&c->job->input, data, n);
        else c->job->input_ended = true;
        return;
    }
    if (type == 'i' || type == 'I') return; /* input of a command that is over */
    if (c->job || c->finished) return refuse(c, ERROR_BAD, "one request for each connection");
    switch (type) {
    case 'P': return request_ping(c);
    case 'F':
        if (fence_passes(c, &r)) request_ping(c);
        return;
    case 'X': return request_exec(c, &r);
    case 'S': return request_shell(c, &r);
    default: refuse(c, ERROR_BAD, "unknown request");
    }
}
