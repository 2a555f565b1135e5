"""Runs inside a sandbox, as root: tries to get out of it in every common way and reports what each attempt met.

Prints one JSON object: attempt → name of the error, or "REACHED …". Needs nothing but Python's standard library.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import socket
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
found: dict[str, str] = {}

# number on x86_64, on aarch64 (None: there is no such call)
CALLS = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "clone": (56, 220), "clone3": (435, 435), "ptrace": (101, 117), "mknodat": (259, 33),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "swapon": (167, 224),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "fanotify_init": (300, 262), "iopl": (172, None),
    "ioperm": (173, None), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "landlock_create_ruleset": (444, 444), "memfd_secret": (447, 447),
    "futuristic": (600, 600),
}  # fmt: skip


def record(name, call):
    ctypes.set_errno(0)
    try:
        result = call()
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno or 0, str(error.errno))
        return
    number = ctypes.get_errno()
    found[name] = errno.errorcode.get(number, str(number)) if result == -1 else f"REACHED ({result!r})"


def call(name, *args, label=""):
    number = CALLS[name][0 if X86 else 1]
    if number is not None:
        record(label or name, lambda: libc.syscall(ctypes.c_long(number), *args))


def opened(path, flags=os.O_RDONLY):
    fd = os.open(path, flags)
    try:
        return f"{path}: {os.read(fd, 16)!r}" if flags == os.O_RDONLY else f"{path} opened"
    finally:
        os.close(fd)


def written(path, text):
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, text)
    finally:
        os.close(fd)


# -- system calls ------------------------------------------------------------------------------------------------------
os.makedirs("/tmp/m", exist_ok=True)
for kind in (b"tmpfs", b"proc", b"sysfs", b"cgroup", b"cgroup2", b"debugfs", b"devtmpfs", b"overlay"):
    call("mount", b"none", b"/tmp/m", kind, 0, b"", label=f"mount {kind.decode()}")
call("mount", b"/", b"/tmp/m", None, 4096, None, label="bind mount")
call("mount", None, b"/proc", None, 32 | 4096, None, label="remount /proc writable")
call("umount2", b"/proc/keys", 2, label="umount a mask")
call("umount2", b"/proc", 2)
call("pivot_root", b"/tmp", b"/tmp/m")
call("chroot", b"/tmp")
for flag, what in (
    (0x10000000, "user"),
    (0x20000, "mount"),
    (0x20000000, "pid"),
    (0x40000000, "net"),
    (0x8000000, "ipc"),
    (0x4000000, "uts"),
    (0x2000000, "cgroup"),
    (0x80, "time"),
):
    call("unshare", flag, label=f"unshare {what}")
    if flag > 0xFF:
        call("clone", flag | 17, 0, 0, 0, 0, label=f"clone {what}")
call("clone3", struct.pack("<8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
for kind in ("net", "mnt", "pid", "uts", "ipc"):
    call("setns", os.open(f"/proc/self/ns/{kind}", os.O_RDONLY), 0, label=f"setns {kind}")
call("ptrace", 16, 1, 0, 0, label="ptrace attach to the init")
call("ptrace", 0x4206, 1, 0, 0, label="ptrace seize the init")
call("process_vm_readv", 1, 0, 0, 0, 0, 0)
call("process_vm_writev", 1, 0, 0, 0, 0, 0)
call("kcmp", 1, 1, 0, 0, 0)
pidfd = libc.syscall(CALLS["pidfd_open"][0], 1, 0)
call("pidfd_getfd", pidfd, 3, 0, label="take the init's socket")
call("bpf", 5, bytes(128), 128)
call("perf_event_open", bytes(128), 0, -1, -1, 0)
call("keyctl", 0, -3, 0)
call("add_key", b"user", b"a", b"b", 1, -3)
call("request_key", b"user", b"a", None, -3)
call("userfaultfd", 0)
call("open_by_handle_at", -100, bytes(128), 0)
call("name_to_handle_at", -100, b"/", bytes(128), bytes(8), 0)
call("io_uring_setup", 8, bytes(120))
call("io_uring_enter", 0, 0, 0, 0, 0, 0)
call("init_module", b"x", 1, b"")
call("finit_module", 0, b"", 0)
call("delete_module", b"loop", 0)
call("kexec_load", 0, 0, 0, 0)
call("kexec_file_load", 0, 0, 0, b"", 0)
call("reboot", 0xFEE1DEAD, 672274793, 0x1234567, 0)
call("settimeofday", struct.pack("<2q", 1000000000, 0), None)
call("clock_settime", 0, struct.pack("<2q", 1000000000, 0))
call("adjtimex", struct.pack("<I", 1) + bytes(252))
call("sethostname", b"taken", 5)
call("setdomainname", b"taken", 5)
call("swapon", b"/tmp/m", 0)
call("acct", b"/tmp/acct")
call("quotactl", 0x800002 << 8, b"/dev/loop0", 0, 0)
call("syslog", 2, bytes(64), 64)
call("fanotify_init", 0, 0)
call("iopl", 3)
call("ioperm", 0x80, 1, 1)
call("open_tree", -100, b"/", 1)
call("fsopen", b"tmpfs", 0)
call("move_mount", -1, b"", -100, b"/tmp/m", 4)
call("mount_setattr", -100, b"/proc", 0, bytes(32), 32)
call("landlock_create_ruleset", None, 0, 1)
call("memfd_secret", 0)
call("futuristic")

if X86:
    # the other two tables of system calls that the kernel has: 32-bit programs, and x32
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    getpid32 = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    answer = getpid32()
    found["int 0x80"] = errno.errorcode.get(-answer, f"REACHED ({answer})")
    record("x32", lambda: libc.syscall(ctypes.c_long(0x40000000 | 39)))

# -- devices -----------------------------------------------------------------------------------------------------------
for name, mode, device in (
    ("disk", 0o60600, (7, 0)),
    ("mem", 0o20600, (1, 1)),
    ("kmsg", 0o20600, (1, 11)),
    ("fuse", 0o20600, (10, 229)),
    ("null", 0o20600, (1, 3)),
):
    record(f"mknod {name}", lambda n=name, m=mode, d=device: os.mknod(f"/tmp/{n}", m, os.makedev(*d)) or 0)
for name in ("mem", "kmsg", "port", "loop0", "loop-control", "sda", "vda", "fuse", "kvm", "net/tun", "mapper/control"):
    record(f"open /dev/{name}", lambda n=name: opened(f"/dev/{n}"))
for node in sorted(os.listdir("/srv/planted") if os.path.isdir("/srv/planted") else []):
    # placed by the test, from outside: even a node that is there must not open
    record(f"open planted {node}", lambda n=node: opened(f"/srv/planted/{n}"))
    record(f"write planted {node}", lambda n=node: opened(f"/srv/planted/{n}", os.O_WRONLY))

# -- /proc, /sys, sockets ----------------------------------------------------------------------------------------------
for path, text in (
    ("/proc/sys/kernel/core_pattern", b"|/tmp/x"),
    ("/proc/sys/kernel/panic", b"1"),
    ("/proc/sys/kernel/modprobe", b"/x"),
    ("/proc/sys/vm/drop_caches", b"3"),
    ("/proc/sys/fs/binfmt_misc/register", b":x:"),
    ("/proc/sysrq-trigger", b"h"),
    ("/proc/1/mem", b"x"),
    ("/proc/self/oom_score_adj", b"-1000"),
    ("/proc/self/uid_map", b"0 0 1"),
    ("/proc/self/attr/current", b"x"),
    ("/proc/irq/default_smp_affinity", b"1"),
    ("/proc/mtrr", b"x"),
    ("/sys/fs/cgroup/release_agent", b"/x"),
    ("/sys/kernel/uevent_helper", b"/x"),
    ("/sys/power/state", b"mem"),
):
    record(f"write {path}", lambda p=path, t=text: written(p, t))
for path in (
    "/proc/kcore",
    "/proc/kmsg",
    "/proc/keys",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/latency_stats",
    "/sys/kernel/debug/tracing/trace",
    "/sys/firmware/acpi/tables/DSDT",
):
    record(f"read {path}", lambda p=path: opened(p))
for path in ("/proc/keys", "/proc/timer_list", "/proc/kpageflags", "/proc/1/mem", "/proc/meminfo"):
    # whatever lies there may belong to the host
    record(f"chmod {path}", lambda p=path: os.chmod(p, 0o777) or 0)
    record(f"chown {path}", lambda p=path: os.chown(p, 1, 1) or 0)
for family, kind, protocol, what in (
    (socket.AF_INET, socket.SOCK_RAW, 1, "raw ip"),
    (10, socket.SOCK_RAW, 58, "raw ip6"),
    (17, socket.SOCK_RAW, 768, "packet"),
    (40, socket.SOCK_STREAM, 0, "vsock"),
    (38, socket.SOCK_SEQPACKET, 0, "alg"),
    (29, socket.SOCK_RAW, 1, "can"),
    (44, socket.SOCK_RAW, 0, "xdp"),
):
    record(f"socket {what}", lambda f=family, k=kind, p=protocol: socket.socket(f, k, p).fileno())
for address in (("1.1.1.1", 80), ("169.254.169.254", 80), ("10.0.0.1", 22)):
    record(f"connect {address[0]}", lambda a=address: socket.create_connection(a, 1).fileno())
if len(sys.argv) > 2:  # where something of the host listens: a port of its loopback, an abstract address
    record("the host's loopback", lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1).fileno())
    record("the host's abstract socket", lambda: socket.socket(socket.AF_UNIX).connect(f"\0{sys.argv[2]}") or 0)
record(
    "netlink: add an address",
    lambda: fcntl.ioctl(socket.socket(), 0x8916, struct.pack("16sH2s4s8x", b"lo", 2, b"", b"\x0a\0\0\1")) and 0,
)

# -- ioctls ------------------------------------------------------------------------------------------------------------
tmp, terminal = os.open("/tmp", os.O_RDONLY), os.open("/dev/ptmx", os.O_RDWR)
for number, what in (
    (0x5000940E, "make a subvolume"),
    (0x50009417, "snapshot"),
    (0xD0009411, "search the store's tree"),
    (0x5000940F, "delete a subvolume"),
    (0x40309410, "defragment"),
):
    record(f"btrfs: {what}", lambda n=number: libc.ioctl(tmp, ctypes.c_ulong(n), ctypes.create_string_buffer(4096)))
for number, what in ((0x5412, "TIOCSTI"), (0x541C, "TIOCLINUX")):
    record(what, lambda n=number: libc.ioctl(terminal, ctypes.c_ulong(n), b"x"))
for number, what in ((0xC0045877, "freeze the file system"), (0xC0185879, "trim the file system")):
    record(what, lambda n=number: libc.ioctl(tmp, ctypes.c_ulong(n), ctypes.create_string_buffer(64)))
record(
    "make a file immutable",
    lambda: fcntl.ioctl(os.open("/tmp/file", os.O_RDWR | os.O_CREAT), 0x40086602, struct.pack("<Q", 0x10)) and 0,
)

# -- the agent's folder ------------------------------------------------------------------------------------------------
record("replace the init", lambda: os.rename("/bin/true", "/run/agent/init") or 0)
record("write the init", lambda: written("/run/agent/init", b"x"))
record("remove the socket", lambda: os.unlink("/run/agent/agent.sock") or 0)
record("a file beside the socket", lambda: os.open("/run/agent/more", os.O_CREAT | os.O_WRONLY))
record("a link beside the socket", lambda: os.symlink("/etc", "/run/agent/link") or 0)
record("hard link to the init", lambda: os.link("/run/agent/init", "/root/init") or 0)
record("rename the folder", lambda: os.rename("/run/agent", "/run/other") or 0)
record("chmod the folder", lambda: os.chmod("/run/agent", 0o777) or 0)
folder = os.open("/run/agent", os.O_RDONLY)
up = os.listdir(f"/proc/self/fd/{folder}/../../..")
found["the folder's parents"] = "inside" if "proc" in up and "srv" in up else f"REACHED {up}"


# -- what a look around shows ------------------------------------------------------------------------------------------
def look_around():
    names = {name for name in os.listdir("/proc") if name.isdigit()}
    roots = {os.stat(f"/proc/{pid}/root/etc/hostname").st_ino for pid in names if os.path.exists(f"/proc/{pid}/root")}
    here = os.stat("/etc/hostname").st_ino
    found["/proc/*/root"] = "inside" if roots <= {here} else f"REACHED {roots}"
    strange = []
    for pid in names:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("/") and not os.path.lexists(target.removesuffix(" (deleted)")):
                    strange.append(target)
        except OSError:
            continue
    found["/proc/*/fd"] = "inside" if not strange else f"REACHED {strange}"
    found["interfaces"] = ",".join(sorted(name for _, name in socket.if_nameindex()))
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines())
    for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Seccomp", "NoNewPrivs", "Seccomp_filters"):
        found[key] = status[key].strip()
    found["hostname"] = socket.gethostname()
    found["core"] = str(resource.getrlimit(resource.RLIMIT_CORE))
    found["clock"] = str(time.time() > 1.6e9)


look_around()
print(json.dumps(found))
