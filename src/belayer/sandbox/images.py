"""Sandbox images: read-only subvolumes of the store, each with a small description beside it.

An image is built once and shared by every sandbox; `digest` is computed over its content (names, types, modes, owners,
link targets and file bytes), so two stores with the same digest hold the same image.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from belayer.errors import ImageError
from belayer.sandbox._layers import delete_entry, exists_in
from belayer.sandbox._oci import ImageConfig
from belayer.sandbox.store import Store, remove_tree, storage_errors

RECIPE = 6  # raise it when what `build_base` makes changes
BASE_PACKAGES = (
    "bash", "dash", "coreutils", "findutils", "grep", "sed", "mawk", "diffutils", "procps", "util-linux", "hostname",
    "tar", "gzip", "python3", "python3-pip", "git", "tmux", "vim-tiny", "libc-bin", "ncurses-base",
)  # fmt: skip
_FRESH = ".new-"
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


class ImageInfo(msgspec.Struct, frozen=True):
    """What is known of an image: where it came from and what it contains.

    `origin` names the content of the image that it was imported from ("" where that has no name of its own).
    """

    name: str
    digest: str
    source: str
    recipe: int
    created: float
    files: int
    bytes: int
    origin: str = ""
    config: ImageConfig = ImageConfig()


class Image(msgspec.Struct, frozen=True):
    """An image that can be used now. `environment`: of its containers' init, see `with_image_env` in native/run.c."""

    name: str
    digest: str
    path: Path
    environment: dict[str, str] = {}


def find(store: Store, name: str) -> Image:
    """The image `name`. Raises `ImageError` that lists the ones there are."""
    path = store.images / name
    info = read_info(store, name)
    if info is None or not path.is_dir() or "/" in name:
        known = ", ".join(names(store)) or "none"
        raise ImageError(
            f"there is no sandbox image {name!r} in the store (there: {known})",
            next_step="`make setup` makes `base`, `belayer image import` any other",
        )
    environment = {f"BELAYER_ENV_{variable}": value for variable, value in info.config.env.items()}
    if info.config.workdir:
        environment["BELAYER_WORKDIR"] = info.config.workdir
    return Image(name, info.digest, path, environment)


def of_checkpoint(store: Store, name: str, digest: str) -> Image:
    """The image that a checkpoint was made from. It may be gone, or another one by now: then only its name is left."""
    try:
        found = find(store, name)
    except ImageError:
        found = None
    return found if found is not None and found.digest == digest else Image(name, digest, store.images / name)


def names(store: Store) -> list[str]:
    """Names of all images in the store."""
    return sorted(path.stem for path in store.images.glob("*.json") if (store.images / path.stem).is_dir())


def read_info(store: Store, name: str) -> ImageInfo | None:
    """The description of an image, or None when there is none."""
    try:
        return msgspec.json.decode((store.images / f"{name}.json").read_bytes(), type=ImageInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def remove(store: Store, name: str) -> None:
    """Remove an image; sandboxes that were made from it are not touched."""
    (store.images / f"{name}.json").unlink(missing_ok=True)
    remove_tree(store.images / name)


def build_base(store: Store, name: str = "base", progress: Callable[[str], None] = lambda text: None) -> ImageInfo:
    """Build the default image from Debian packages with mmdebstrap (6–20 s), or return it if it is there already."""
    info = read_info(store, name)
    if info is not None and info.recipe == RECIPE and (store.images / name).is_dir():
        return info
    if shutil.which("mmdebstrap") is None:
        raise ImageError("mmdebstrap is missing", next_step="install it (`make setup` does)")
    suite, mirror = _debian_archive()
    with new_image(store, name, source=f"Debian {suite}: {' '.join(BASE_PACKAGES)}") as root:
        progress(f"image {name}: fetching {len(BASE_PACKAGES)} Debian packages and what they need")
        command = ["mmdebstrap", "--mode=root", "--variant=extract", f"--include={','.join(BASE_PACKAGES)}", "--quiet"]
        command += ["--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*"]
        command += ["--dpkgopt=path-exclude=/usr/share/locale/*", "--skip=check/empty", suite, str(root), mirror]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ImageError(f"mmdebstrap cannot build the image:\n{done.stderr[-1500:]}")
        for folder in ("usr/share/man", "usr/share/doc", "usr/share/locale", "var/lib/apt", "var/cache/apt"):
            shutil.rmtree(root / folder, ignore_errors=True)
        _configure_unpacked(root)
        progress(f"image {name}: compiling Python's library")
        _compile_python(root)
    info = read_info(store, name)
    assert info is not None
    return info


def import_directory(store: Store, name: str, folder: Path) -> ImageInfo:
    """Make an image of a root file system that lies in `folder`. Raises `ImageError` if it has no /bin/bash or sh."""
    check_name(name)
    if not folder.is_dir():
        raise ImageError(f"there is no folder {folder}")
    if not exists_in(folder, "bin/sh"):
        raise ImageError(f"{folder} is not a root file system: it has no /bin/sh")
    with new_image(store, name, source=str(folder)) as root:
        done = subprocess.run(
            ["cp", "-a", "--reflink=auto", f"{folder}/.", str(root)], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise ImageError(f"{folder} cannot be copied: {done.stderr.strip()[-500:]}")
    info = read_info(store, name)
    assert info is not None
    return info


def check_name(name: str) -> None:
    """Raises `ImageError` unless `name` can be an image's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name) or name.endswith(".json"):
        raise ImageError(f"{name!r} is not a usable image name: letters, digits, dot, dash and underscore")


@contextmanager
def workspace(store: Store) -> Iterator[Path]:
    """A path in the store at which something can be made; whatever lies at it, or at it with a suffix, goes at the end.

    Also after SIGKILL: the next one that is opened, and every reap, remove what has no living owner.
    """
    sweep(store)
    fresh = store.images / f"{_FRESH}{secrets.token_hex(6)}"
    lock = os.open(f"{fresh}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield fresh
    finally:
        _remove_workspace(fresh)
        os.close(lock)


def sweep(store: Store) -> list[str]:
    """Remove what killed builds and imports left in the store; says what."""
    removed = []
    for path in store.images.glob(f"{_FRESH}*.lock"):
        with suppress(FileNotFoundError), open(path, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _remove_workspace(path.with_suffix(""))
            removed.append(f"unfinished image {path.stem}")
    return removed


def _remove_workspace(fresh: Path) -> None:
    remove_tree(fresh)
    for path in fresh.parent.glob(f"{fresh.name}.*"):
        if path.suffix != ".lock":
            remove_tree(path)
    Path(f"{fresh}.lock").unlink(missing_ok=True)  # last: as long as it is there, the rest is found


@contextmanager
def new_image(
    store: Store, name: str, *, source: str, origin: str = "", config: ImageConfig | None = None
) -> Iterator[Path]:
    """A fresh tree to fill; becomes the image on a clean exit, is deleted otherwise."""
    with storage_errors(f"image {name} cannot be built"), workspace(store) as fresh:
        root = store.trees.make_image(fresh)
        yield root
        _prepare(root)
        digest, files, size = tree_digest(root)
        store.trees.seal_image(fresh)
        info = ImageInfo(name, digest, source, RECIPE, time.time(), files, size, origin, config or ImageConfig())
        publish(store, fresh, info)


def publish(store: Store, fresh: Path, info: ImageInfo) -> None:
    """Give a sealed tree its name, in the place of an older image of that name."""
    remove(store, info.name)
    os.rename(fresh, store.images / info.name)
    description = store.images / f".{info.name}.json"
    description.write_bytes(msgspec.json.encode(info))
    os.replace(description, store.images / f"{info.name}.json")


def _prepare(root: Path) -> None:
    """What every image needs to be a container: mount points, devices, temporary folders."""
    for name, mode in (
        ("proc", 0o555),
        ("dev", 0o755),
        ("run", 0o755),
        ("root", 0o700),
        ("tmp", 0o1777),
        ("etc", 0o755),
    ):
        _folder(root / name, mode)
    # /dev stays on the root file system: a tmpfs would cost the dump an extra tar process
    for name, mode in (("pts", 0o755), ("shm", 0o1777)):
        _folder(root / "dev" / name, mode)
    _folder(root / "run" / "agent", 0o755)
    _remove_devices(root)
    for name, (major, minor) in _NODES.items():
        node = root / "dev" / name
        _clear(node)
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        node.chmod(0o666)
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        link = root / "dev" / name
        _clear(link)
        link.symlink_to(target)
    hosts = root / "etc" / "hosts"
    if not hosts.is_symlink():
        _clear(hosts)
        hosts.write_text("127.0.0.1 localhost sandbox\n::1 localhost sandbox\n")


def _remove_devices(root: Path) -> None:
    """A container has the devices that it is given, whatever its image brings."""
    for _, _, files, folder in os.fwalk(root, follow_symlinks=False):
        for name in files:
            mode = os.lstat(name, dir_fd=folder).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                os.unlink(name, dir_fd=folder)


def _clear(path: Path) -> None:
    """Remove whatever lies at `path`, whose folder is known to be one."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        delete_entry(folder, path.name)
    finally:
        os.close(folder)


def _folder(path: Path, mode: int) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ImageError(f"/{path.name} in the image is not a folder")
    path.mkdir(exist_ok=True)
    path.chmod(mode)


def _configure_unpacked(root: Path) -> None:
    """What package scripts would have done: the packages are unpacked but their scripts did not run."""
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    (etc / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    (etc / "group").write_text("root:x:0:\ntty:x:5:\nnogroup:x:65534:\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (etc / "hostname").write_text("sandbox\n")
    for name, target in (("awk", "mawk"), ("sh", "dash")):
        link = root / "usr" / "bin" / name
        if not link.exists() and not link.is_symlink():
            link.symlink_to(target)


def _compile_python(root: Path) -> None:
    """Byte code for Python's own library, as its package's script would make it (4 s).

    Without it every process in every sandbox compiles what it imports: 1.1 s instead of 0.15 s for asyncio and sqlite3.
    """
    folders = [f"/usr/lib/{path.name}" for path in sorted((root / "usr" / "lib").glob("python3*")) if path.is_dir()]
    command = ["chroot", str(root), "/usr/bin/python3", "-m", "compileall", "-q", *folders]
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=path)
    if done.returncode:
        raise ImageError(f"Python in the image does not compile its library:\n{(done.stdout + done.stderr)[-800:]}")


def _debian_archive() -> tuple[str, str]:
    """(suite, URI) of the Debian archive that this machine's apt already uses."""
    suite = ""
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            suite = value.strip('"')
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"apt's sources cannot be read: {error}") from error
    for line in listing.splitlines():
        release, _, uri = line.partition(" ")
        if release == suite and uri.rstrip("/").endswith("debian"):
            return suite, uri
    raise ImageError(
        "apt has no Debian archive configured here", next_step="import a root file system from a directory instead"
    )


def tree_digest(root: Path) -> tuple[str, int, int]:
    """(sha256 over the whole tree, number of entries, bytes in files). Times do not count."""
    total = hashlib.sha256()
    entries = size = 0
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = os.path.join(folder, name)
            st = os.lstat(path)
            line = f"{os.path.relpath(path, root)}\0{st.st_mode:o}\0{st.st_uid}\0{st.st_gid}\0{st.st_rdev}\0"
            total.update(os.fsencode(line))
            if stat.S_ISLNK(st.st_mode):
                total.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(st.st_mode):
                with open(path, "rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
                size += st.st_size
            entries += 1
    return f"sha256:{total.hexdigest()}", entries, size
