/* The system-call filter of a container.
 *
 * Two reasons to refuse a call: it reaches outside the container, or it makes state that CRIU cannot capture. The latter
 * answers ENOSYS, so that programs fall back (io_uring, landlock, sealed mappings); the former EPERM.
 */
#define _GNU_SOURCE
#include "belayer.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "belayer: sandboxes are supported on x86_64 and aarch64"
#endif

#define NR_memfd_secret 447 /* newer than some C libraries know; the numbers are the same on both machines */
#define NR_mseal 462
#define NR_lsm_set_self_attr 460
#define NR_open_tree_attr 467
#define NR_newest 469 /* file_setattr, Linux 6.17; what comes later was not looked at */

static const int absent[] = {
    425, 426, 427, /* io_uring_setup, _enter, _register */
    444, 445, 446, /* landlock_create_ruleset, _add_rule, _restrict_self */
    __NR_clone3,   /* its flags cannot be inspected; the C library falls back to clone */
    NR_memfd_secret, NR_mseal, NR_lsm_set_self_attr, __NR_userfaultfd,
    __NR_mq_open, __NR_mq_unlink, /* what lies in a queue would be lost without a word */
};

static const int denied[] = {
    __NR_mount, __NR_umount2, __NR_pivot_root, __NR_chroot, __NR_unshare, __NR_setns, NR_open_tree_attr,
    428, 429, 430, 431, 432, 433, 442, /* open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr */
    __NR_ptrace, __NR_process_vm_readv, __NR_process_vm_writev, __NR_kcmp,
    438, 440, /* pidfd_getfd would hand out the init's listening socket; process_madvise */
    __NR_keyctl, __NR_add_key, __NR_request_key,
    __NR_bpf, __NR_perf_event_open, __NR_fanotify_init, __NR_open_by_handle_at, __NR_name_to_handle_at,
    __NR_kexec_load, __NR_init_module, __NR_finit_module, __NR_delete_module, __NR_reboot,
#ifdef __NR_kexec_file_load
    __NR_kexec_file_load,
#endif
    __NR_swapon, __NR_swapoff, __NR_acct, __NR_quotactl, 443 /* quotactl_fd */, __NR_syslog, __NR_vhangup,
    __NR_settimeofday, __NR_clock_settime, __NR_adjtimex, __NR_clock_adjtime, __NR_sethostname, __NR_setdomainname,
    __NR_lookup_dcookie, __NR_nfsservctl, __NR_move_pages, __NR_migrate_pages,
#ifdef __x86_64__
    __NR_iopl, __NR_ioperm, __NR_uselib, __NR_ustat, __NR_sysfs, __NR__sysctl, __NR_create_module,
    __NR_get_kernel_syms, __NR_query_module,
#endif
};

#define NEW_NAMESPACES \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
#define TIOCSTI_ 0x5412 /* push characters into another program's terminal */
#define TIOCLINUX_ 0x541C
#define FICLONE_ 0x40049409
#define FICLONERANGE_ 0x4020940d

#define COUNT(list) (sizeof(list) / sizeof *(list))
#define STMT(...) program[n++] = (struct sock_filter)BPF_STMT(__VA_ARGS__)
#define JUMP(...) program[n++] = (struct sock_filter)BPF_JUMP(__VA_ARGS__)
#define ARG(i) offsetof(struct seccomp_data, args[i])

int install_seccomp(void) {
    struct sock_filter program[2 * (COUNT(absent) + COUNT(denied)) + 40];
    unsigned n = 0;
    STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS); /* 32-bit programs: another table, not filtered here */
    STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
    JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* x32 */
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
#endif
    JUMP(BPF_JMP | BPF_JGT | BPF_K, NR_newest, 0, 1);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
    for (unsigned i = 0; i < COUNT(absent); i++) {
        JUMP(BPF_JMP | BPF_JEQ | BPF_K, absent[i], 0, 1);
        STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
    }
    for (unsigned i = 0; i < COUNT(denied); i++) {
        JUMP(BPF_JMP | BPF_JEQ | BPF_K, denied[i], 0, 1);
        STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    /* clone: no new namespaces */
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 4);
    STMT(BPF_LD | BPF_W | BPF_ABS, ARG(0));
    JUMP(BPF_JMP | BPF_JSET | BPF_K, NEW_NAMESPACES, 0, 1);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    /* ioctl: no pushing of characters into terminals; of the store's own file system only cloning of files, since a
     * subvolume made inside would be missing from every snapshot */
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_ioctl, 0, 10);
    STMT(BPF_LD | BPF_W | BPF_ABS, ARG(1));
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, FICLONE_, 7, 0);
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, FICLONERANGE_, 6, 0);
    STMT(BPF_ALU | BPF_AND | BPF_K, 0xff00);
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x9400, 3, 0);
    STMT(BPF_LD | BPF_W | BPF_ABS, ARG(1));
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, TIOCSTI_, 1, 0);
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, TIOCLINUX_, 0, 1);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    /* socket: unix, inet, inet6, netlink; the others reach the hypervisor (vsock) or cannot be dumped (alg) */
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 6);
    STMT(BPF_LD | BPF_W | BPF_ABS, ARG(0));
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, 1, 4, 0);
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, 2, 3, 0);
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, 10, 2, 0);
    JUMP(BPF_JMP | BPF_JEQ | BPF_K, 16, 1, 0);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT);
    STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {.len = n, .filter = program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}
