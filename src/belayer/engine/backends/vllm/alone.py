"""A vLLM engine without sockets, threads, semaphores and files that it has only for company it does not keep.

A worker is the only rank of its process group, but vLLM still makes a gloo group for every kind of parallelism: 13
listening sockets and 39 threads. Two processes restored from one image could not both listen on their ports, and
every thread makes a restore slower. (vLLM 0.32.)
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed
import tqdm
import vllm.v1.executor.uniproc_executor as executor
from vllm.distributed import parallel_state

from belayer.errors import EngineError
from belayer.ownership import own_dir


def share_nothing() -> None:
    """Call it before the engine is made: no semaphore is shared with other processes, for there are none."""
    executor.Lock = threading.Lock  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
    tqdm.tqdm.set_lock(threading.RLock())  # for its bars, which it would share with processes too


@contextlib.contextmanager
def rendezvous() -> Iterator[None]:
    """Make the engine inside: the file by which ranks find one another is gone afterwards.

    vLLM makes it in the folder for temporary files, where it outlives the engine. Once the process groups exist, nobody
    reads it any more. Meanwhile it is in the run's folder: that of a worker killed half-way goes with the run.
    """
    module: Any = executor
    usual = module.get_file_store_init_method
    with tempfile.TemporaryDirectory(prefix="rendezvous-", dir=own_dir()) as folder:
        module.get_file_store_init_method = lambda: f"file://{folder}/file"
        try:
            yield
        finally:
            module.get_file_store_init_method = usual


def leave_process_groups() -> None:
    """End every process group of this engine. Raises `EngineError` where this worker is not alone in one."""
    for reference in parallel_state._groups.values():
        group: Any = reference()
        if group is None:
            continue
        if group.world_size != 1:
            raise EngineError(f"process group {group.unique_name} has {group.world_size} ranks: no image of a part")
        group.cpu_group = group.device_group = None
    torch.distributed.destroy_process_group()
    gc.collect()
