"""The specification that a container's process images belong to, and how it follows them to another place.

Kept among the images as one JSON file: the specification of the checkpointed container, what runc noted of its
descriptors, and the content of the small files of its own that podman mounts into it (/etc/hostname,
/run/.containerenv). They are not part of the root file system, but a command may have written to them.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer.errors import CheckpointRefused

FILE = "spec.img"
CRIU_CONF = "org.criu.config"  # the annotation by which runc finds CRIU's settings
FILE_LIMIT = 64 << 10
DESCRIPTORS = "descriptors.json"  # runc's, beside CRIU's images


@dataclass(frozen=True)
class Moved:
    """Where a restored container is: host paths, and its cgroup as podman names it."""

    root: Path
    agent: Path
    work: Path
    netns: Path
    cgroup: str
    criu_conf: Path


def keep_files(bundle: Path, images: Path) -> None:
    """Write the specification in `bundle` and the content of podman's files to `images`. While all is frozen.

    Raises `CheckpointRefused` when a command has made one of the files big.
    """
    spec = json.loads((bundle / "config.json").read_text())
    files = {}
    for mount in spec["mounts"]:
        source = Path(mount["source"])
        if mount["type"] == "bind" and source.is_file():
            with open(source, "rb") as file:
                data = file.read(FILE_LIMIT + 1)
            if len(data) > FILE_LIMIT:
                raise CheckpointRefused(f"{mount['destination']} is a file of podman's own and is larger than 64 KB")
            files[mount["destination"]] = base64.b64encode(data).decode()
    descriptors = (images / DESCRIPTORS).read_text()
    (images / FILE).write_text(json.dumps({"spec": spec, "files": files, "descriptors": descriptors}))
    (images / DESCRIPTORS).unlink()


def prepare_bundle(images: Path, bundle: Path, to: Moved) -> None:
    """Specification and images of the restored container, into its bundle.

    Raises `OSError`, `ValueError`, `KeyError`.
    """
    kept = json.loads((images / FILE).read_text())
    # beside the images themselves: CRIU reads on when the host's folders are out of its sight, so links would not do
    if not (images / DESCRIPTORS).exists():
        fresh = images / f"{DESCRIPTORS}.{secrets.token_hex(4)}"
        fresh.write_text(kept["descriptors"])
        os.replace(fresh, images / DESCRIPTORS)  # another restore may do the same just now
    link(bundle / "checkpoint", images)
    spec: dict[str, Any] = kept["spec"]
    spec["root"]["path"] = str(to.root)
    spec["linux"]["cgroupsPath"] = to.cgroup
    spec["annotations"][CRIU_CONF] = str(to.criu_conf)
    for namespace in spec["linux"]["namespaces"]:
        if namespace["type"] == "network":
            namespace["path"] = str(to.netns)
    for mount in spec["mounts"]:
        where = mount["destination"]
        if where == "/run/agent":
            mount["source"] = str(to.agent)
        elif where in kept["files"]:
            file = to.work / where.strip("/").replace("/", "-")
            file.write_bytes(base64.b64decode(kept["files"][where]))
            mount["source"] = str(file)
    (bundle / "config.json").write_text(json.dumps(spec))


def link(link: Path, target: Path) -> None:
    """Make `link` lead to `target`, whatever it was."""
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
