/* Which devices a container may open: the harmless ones that every image has.
 *
 * Its root has no CAP_MKNOD, and images are made without other nodes. This is the second lock, for a node that got in some
 * other way. cgroup v2 asks a program of ours; on hosts with v1 only, _cgroup.py writes the same list to its controller.
 */
#define _GNU_SOURCE
#include "belayer.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(to, offset) {BPF_LDX | BPF_W | BPF_MEM, to, 1, offset, 0}
#define IF_EQUAL(reg, value, skip) {BPF_JMP | BPF_JEQ | BPF_K, reg, 0, skip, value}
#define IF_OTHER(reg, value, skip) {BPF_JMP | BPF_JNE | BPF_K, reg, 0, skip, value}
#define ANSWER(value) {BPF_ALU64 | BPF_MOV | BPF_K, 0, 0, 0, value}
#define LEAVE {BPF_JMP | BPF_EXIT, 0, 0, 0, 0}

static const struct bpf_insn program[] = {
    LOAD(2, offsetof(struct bpf_cgroup_dev_ctx, access_type)),
    {BPF_ALU64 | BPF_AND | BPF_K, 2, 0, 0, 0xffff},
    LOAD(3, offsetof(struct bpf_cgroup_dev_ctx, major)),
    LOAD(4, offsetof(struct bpf_cgroup_dev_ctx, minor)),
    IF_OTHER(2, BPF_DEVCG_DEV_CHAR, 10), /* to the refusal */
    IF_EQUAL(3, 136, 11),                /* terminals of /dev/pts; to the permission */
    IF_OTHER(3, 1, 5),
    IF_EQUAL(4, 3, 9), /* null */
    IF_EQUAL(4, 5, 8), /* zero */
    IF_EQUAL(4, 7, 7), /* full */
    IF_EQUAL(4, 8, 6), /* random */
    IF_EQUAL(4, 9, 5), /* urandom */
    IF_OTHER(3, 5, 2),
    IF_EQUAL(4, 0, 3), /* tty */
    IF_EQUAL(4, 2, 2), /* ptmx */
    ANSWER(0),
    LEAVE,
    ANSWER(1),
    LEAVE,
};

static int bpf(int command, union bpf_attr *attributes) { return syscall(SYS_bpf, command, attributes, sizeof *attributes); }

/* 0, also where `cgroup` is not of the v2 hierarchy; -1 and errno when the kernel refuses. Once the last process has left
 * and the cgroup is removed, the program goes too. */
int limit_devices(const char *cgroup) {
    char path[4096];
    snprintf(path, sizeof path, "%s/cgroup.type", cgroup);
    if (access(path, F_OK)) return 0;
    int folder = open(cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return -1;
    union bpf_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE;
    attributes.insns = (uint64_t)(uintptr_t)program;
    attributes.insn_cnt = sizeof program / sizeof *program;
    attributes.license = (uint64_t)(uintptr_t)"";
    int loaded = bpf(BPF_PROG_LOAD, &attributes), result = -1;
    if (loaded >= 0) {
        memset(&attributes, 0, sizeof attributes);
        attributes.target_fd = folder;
        attributes.attach_bpf_fd = loaded;
        attributes.attach_type = BPF_CGROUP_DEVICE;
        result = bpf(BPF_PROG_ATTACH, &attributes);
    }
    int saved = errno;
    if (loaded >= 0) close(loaded);
    close(folder);
    errno = saved;
    return result < 0 ? -1 : 0;
}
