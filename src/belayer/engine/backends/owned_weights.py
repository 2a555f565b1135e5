"""A torch model on the owner's weights, whichever backend built it.

The model is built as its backend builds it, then every parameter is re-pointed at its place in a mapped epoch.
Parameters are immutable weights and mapped read-only; buffers (rotary tables, scales) are private to the process. The
first worker loads the checkpoint through the backend's own loading code while a dispatch mode writes down which bytes
of the epoch each checkpoint tensor went to: that is the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from belayer.engine.memory import Region, Scratch, of
from belayer.engine.weights.layout import Layout, Slice, align, first_unfilled
from belayer.errors import WeightsError


class _Placement:
    """Where each parameter of a model lies in an epoch. The same model class gives the same placement every time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters: list[tuple[str, torch.nn.Parameter, int, int]] = []
        offset = 0
        for name, parameter in model.named_parameters():
            if not parameter.is_contiguous():
                raise WeightsError(f"parameter {name} is not contiguous: it cannot lie in a shared epoch")
            nbytes = parameter.numel() * parameter.element_size()
            self.parameters.append((name, parameter, offset, nbytes))
            offset = align(offset + nbytes)
        self.nbytes = offset

    def repoint(self, region: Region) -> None:
        """Make every parameter a view of `region`."""
        memory = region.tensor()
        for _name, parameter, offset, nbytes in self.parameters:
            parameter.data = memory[offset : offset + nbytes].view(parameter.dtype).view(parameter.shape)


class _Recorder(TorchDispatchMode):
    """Writes down what lands in `region`, and under which checkpoint name."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._start, self._end = region.address, region.address + region.nbytes
        self.source: tuple[str, torch.Tensor] | None = None
        self.slices: list[Slice] = []
        self.zeros: list[tuple[int, int]] = []
        self.names: list[str] = []

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.source = (name, tensor)
            self.names.append(name)
            yield name, tensor
        self.source = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # of an operator that writes, by convention the one whose name ends in "_", the first argument is the target
        target = args[0] if args and func.overloadpacket.__name__.endswith("_") else None
        if isinstance(target, torch.Tensor) and self._start <= target.data_ptr() < self._end:
            self._record(func, target, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, target: torch.Tensor, args: Any) -> None:
        name = self.source[0] if self.source else "?"
        offset, nbytes = target.data_ptr() - self._start, target.numel() * target.element_size()
        if not target.is_contiguous():
            raise WeightsError(f"{name} fills a strided part of a parameter: this architecture is not supported")
        if func is torch.ops.aten.copy_.default and self.source is not None:
            source = self.source[1]
            if args[1].numel() != source.numel() or target.numel() != source.numel():
                raise WeightsError(f"{name} is split over several parameters: this architecture is not supported")
            self.slices.append(
                Slice(name, offset, nbytes, str(target.dtype).removeprefix("torch."), tuple(source.shape))
            )
        elif func in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar) and not any(args[1:]):
            self.zeros.append((offset, offset + nbytes))  # padding; an epoch starts as zeros and keeps them
        else:
            raise WeightsError(f"{name} is loaded through {func}, not a plain copy: this architecture is not supported")


class OwnedWeights:
    """The one model of this process and the epoch it looks at."""

    def __init__(self, *, fill: bool, batch_invariant: bool, device: str = "cpu") -> None:
        self.device = device
        self.fill = fill
        self.batch_invariant = batch_invariant
        self.layout: Layout | None = None
        self.region: Region | None = None
        # set by the worker: obtains the descriptors, given the layout (bootstrap) or None (attach), places them under
        # the region, and returns the layout in force
        self.attach: Callable[[Region, int, Layout | None], Layout] | None = None

    def take(
        self,
        model: torch.nn.Module,
        checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] | None = None,
    ) -> None:
        """Point the parameters of `model`, which it need not have filled, at an epoch of the owner's.

        Where that epoch is still to be made, `load` (default: the model's `load_weights`) copies `checkpoint` there.
        """
        placement = _Placement(model)
        scratch = Scratch.WHOLE if self.fill else Scratch.NONE
        region = self.region = of(self.device).reserve(placement.nbytes, scratch)
        placement.repoint(region)
        assert self.attach is not None
        layout = self._load(placement, region, checkpoint, load or model.load_weights) if self.fill else None  # pyright: ignore[reportArgumentType]
        self.layout = self.attach(region, placement.nbytes, layout)

    def _load(self, placement: _Placement, region: Region, checkpoint: Any, load: Callable[[Any], Any]) -> Layout:
        recorder = _Recorder(region)
        with recorder:
            load(recorder.watch(checkpoint()))
        filled = [(s.offset, s.offset + s.nbytes) for s in recorder.slices] + recorder.zeros
        missing = first_unfilled(((name, offset, nbytes) for name, _, offset, nbytes in placement.parameters), filled)
        if missing is not None:
            raise WeightsError(f"no tensor of the model folder fills parameter {missing}")
        loaded = {s.name for s in recorder.slices}
        aliases = tuple(name for name in recorder.names if name not in loaded)
        return Layout(placement.nbytes, tuple(sorted(recorder.slices, key=lambda s: s.offset)), aliases)
