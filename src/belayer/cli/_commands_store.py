"""Commands about what is kept: checkpoints and images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from belayer.cli._root import app

checkpoint = App(name="checkpoint", help="List a run's sandbox checkpoints, export one to a file, import one.")
app.command(checkpoint)


@checkpoint.command(name="list")
def checkpoint_list(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    /,
) -> int:
    """List the sandbox checkpoints of a run, oldest first; the run may be alive."""
    from belayer.cli.checkpoint import list_command

    return list_command(run)


@checkpoint.command(name="export")
def checkpoint_export(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    id: Annotated[str, Parameter(help="An id that `belayer checkpoint list` shows.")],
    file: Annotated[Path, Parameter(help="The archive to write; it must not exist yet.")],
    /,
) -> int:
    """Write one checkpoint, with processes and file system, to one file; the run may be alive."""
    from belayer.cli.checkpoint import export_command

    return export_command(run, id, file)


@checkpoint.command(name="import")
def checkpoint_import(
    file: Annotated[Path, Parameter(help="An archive that `belayer checkpoint export` wrote.")],
    run: Annotated[Path, Parameter(help="The run to import into, which must not be alive; made if it is not there.")],
    /,
) -> int:
    """Make the checkpoint in FILE one of RUN, on this host or another of the same kind.

    Import only archives that you trust: what the process images say is restored as root.
    """
    from belayer.cli.checkpoint import import_command

    return import_command(file, run)


image = App(name="image", help="Images of the sandbox store: what new sandboxes start from.")
app.command(image)
_Store = Annotated[Path | None, Parameter(help="Folder of the store; default: below the cache folder.")]


@image.command(name="import")
def image_import(
    name: Annotated[str, Parameter(help="What it will be called, e.g. in sandbox.image.")],
    source: Annotated[str, Parameter(help="A folder, an archive, podman:REFERENCE or docker:REFERENCE.")],
    /,
    *,
    ref: Annotated[str, Parameter(help="Which one, where SOURCE holds several.")] = "",
    store: _Store = None,
) -> int:
    """Unpack an image into the store: from an OCI layout or archive, a docker archive, a root file system, or a store
    of podman or docker.

    Environment and working directory of the image are kept; commands run as root. Example: `belayer image import py
    docker:python:3.12`
    """
    from belayer.cli.image import import_command

    return import_command(name, source, ref=ref, store=store)


@image.command(name="list")
def image_list(
    *, json: Annotated[bool, Parameter(negative="", help="The same as JSON.")] = False, store: _Store = None
) -> int:
    """The images there are."""
    from belayer.cli.image import list_command

    return list_command(as_json=json, store=store)


@image.command(name="remove")
def image_remove(name: str, /, *, store: _Store = None) -> int:
    """Remove an image. Sandboxes and checkpoints that were made from it are not touched."""
    from belayer.cli.image import remove_command

    return remove_command(name, store=store)
