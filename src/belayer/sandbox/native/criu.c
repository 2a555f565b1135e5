/* One restore, spoken with `criu swrk` from here and not from the driver: CRIU asks at seven points whether to go on, and a
 * busy driver would let the sandbox wait at each.
 *
 * When everything is restored and no process is awake yet, the container's agent folder is closed: nothing inside can put
 * anything into it, or take its socket away, from its first instruction on. A folder that does not look as it must ends the
 * restore. Messages: images/rpc.proto of CRIU. */
#define _GNU_SOURCE
#include "belayer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SOCKET_FD 11
#define WORK_FD 20 /* criu.py names it in the request; CRIU opens it by our entry in /proc */
#define NOTIFY 6

/* The last field `wanted` of a message: the number itself, or the length of `*data`. */
static bool find(const uint8_t *p, size_t n, unsigned wanted, uint64_t *value, const uint8_t **data) {
    const uint8_t *end = p + n;
    bool found = false;
    while (p < end) {
        uint64_t numbers[2] = {0, 0};
        for (int i = 0; i < 2; i++) {
            if (i && (numbers[0] & 7) != 0 && (numbers[0] & 7) != 2) break;
            for (int shift = 0; p < end && shift < 64; shift += 7) {
                numbers[i] |= (uint64_t)(*p & 127) << shift;
                if (!(*p++ & 128)) break;
            }
        }
        unsigned kind = numbers[0] & 7;
        uint64_t skip = kind == 2 ? numbers[1] : kind == 5 ? 4 : kind == 1 ? 8 : 0;
        if (skip > (uint64_t)(end - p)) return false;
        if (numbers[0] >> 3 == wanted) {
            found = true;
            *value = numbers[1];
            if (data) *data = p;
        }
        p += skip;
    }
    return found;
}

static bool close_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), flags = 0;
    if (fd < 0 || ioctl(fd, FS_IOC_GETFLAGS, &flags)) return false;
    flags |= FS_IMMUTABLE_FL;
    if (ioctl(fd, FS_IOC_SETFLAGS, &flags)) return false;
    DIR *list = fdopendir(fd);
    struct dirent *entry;
    bool good = list != NULL;
    while (good && (entry = readdir(list)))
        good = !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || !strcmp(entry->d_name, "init") ||
               !strcmp(entry->d_name, "mask") || (!strcmp(entry->d_name, "agent.sock") && entry->d_type == DT_SOCK);
    if (list) closedir(list);
    else close(fd);
    return good;
}

static size_t from_hex(const char *text, uint8_t *data, size_t size) {
    size_t n = 0;
    for (unsigned byte; n < size && text[0] && text[1] && sscanf(text, "%2x", &byte) == 1; text += 2) data[n++] = byte;
    return n;
}

/* Prints "pid N", N being the container's init, and returns the exit code. `command` ends with "swrk 11". */
int restore_by_criu(char **command, const char *request, const char *work, const char *folder) {
    static uint8_t message[1 << 16];
    int ends[2], folder_fd = open(work, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0 || dup3(folder_fd, WORK_FD, O_CLOEXEC) < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) {
        printf("the restore cannot be begun: %s\n", strerror(errno));
        return 71;
    }
    pid_t criu = fork();
    if (criu == 0) {
        dup2(ends[1], SOCKET_FD);
        execv(command[0], command);
        dprintf(2, "cannot run %s: %s", command[0], strerror(errno));
        _exit(71);
    }
    close(ends[1]);
    size_t size = from_hex(request, message, sizeof message);
    uint64_t type = 0, success = 0, length = 0, pid = 0;
    const uint8_t *part;
    ssize_t n = criu > 0 ? send(ends[0], message, size, MSG_NOSIGNAL) : -1;
    while (n > 0 && (n = recv(ends[0], message, sizeof message, 0)) > 0) {
        if (!find(message, n, 1, &type, NULL)) break;
        if (type != NOTIFY) {
            if (find(message, n, 2, &success, NULL) && success && find(message, n, 4, &length, &part))
                find(part, length, 1, &pid, NULL);
            break;
        }
        const uint8_t *stage;
        uint64_t stage_length = 0;
        bool good = true;
        if (find(message, n, 5, &length, &part) && find(part, length, 1, &stage_length, &stage) && *folder &&
            stage_length == strlen("post-restore") && !memcmp(stage, "post-restore", stage_length)) {
            good = close_folder(folder);
            if (!good) printf("a process of the sandbox has tampered with the folder of its socket\n");
        }
        const uint8_t answer[] = {1 << 3, NOTIFY, 3 << 3, good};
        n = send(ends[0], answer, sizeof answer, MSG_NOSIGNAL);
    }
    close(ends[0]); /* ends `criu swrk`; what it restored becomes the keeper's */
    waitpid(criu, NULL, 0);
    if (!pid) return 1;
    printf("pid %llu\n", (unsigned long long)pid);
    return 0;
}
