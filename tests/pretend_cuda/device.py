"""A pretend CUDA device: tensors that say `cuda:k` and hold their values on the CPU, for machines without a GPU.

What a GPU would refuse raises here: tensors of two devices in one operation, a generator of another device, a host
synchronisation while a graph is captured. What a GPU would do slowly is counted: launches, reads that the host waits
for, uploads. Kernels' own behaviour, NCCL, memory and time are not simulated. The pretence cannot be taken back:
install it in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing

CPU = torch.device("cpu")
NUM_DEVICES = 2  # guard.cpp says the same
FREE_BYTES = 80 << 30  # of each device
PACKAGE = Path(__file__).resolve().parents[2]

# Operations whose result's size or value the host must know: it waits for the device.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal",
    "is_nonzero", "bincount", "masked_scatter_backward",
}  # fmt: skip
_COPIES_INTO = {"copy_", "copy", "_copy_from"}
_COPIES = {"_to_copy", "to"}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
# Bookkeeping on tensors; nothing runs on the device.
_NO_KERNEL = {"detach", "alias", "lift", "lift_fresh", "is_same_size", "set_", "empty", "empty_strided", "new_empty"}


class Counts:
    """What the device was asked to do since `clear`: launches by operation, waits and uploads by place in the code."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin to count anew."""
        self.launches: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()  # the host waits for a value
        self.uploads: Counter[str] = Counter()
        self.blocking: Counter[str] = Counter()  # uploads after which the host waits: without non_blocking
        self.waits: Counter[int] = Counter()  # torch.cuda.synchronize, by device
        self.devices: Counter[str] = Counter()  # launches by device

    def totals(self) -> dict[str, int]:
        """launches, reads, uploads, waits; launches by device count them again."""
        return {name: sum(counter.values()) for name, counter in vars(self).items()}


class _State:
    current = 0
    captured_on: int | None = None  # while a graph is captured or runs
    recorded = 0  # operations


COUNTS, GRAPHS = Counts(), list[tuple[int, int]]()  # of every captured graph: device, operations


def _place() -> str:
    """file:line of the project's innermost frame."""
    frame = sys._getframe(2)
    while frame is not None:
        file = _file_of_the_project(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@functools.cache
def _file_of_the_project(name: str) -> Path | None:
    # A checkout may be reached through a symbolic link.
    file = Path(name).resolve()
    if name.startswith("<") or not file.is_relative_to(PACKAGE):
        return None
    path = file.relative_to(PACKAGE)
    return None if path.parts[0] in ("tests", ".venv") else path


def _read(kind: str) -> None:
    place = _place()
    if _State.captured_on is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {kind} at {place}")
    COUNTS.reads[f"{kind} {place}"] += 1


class OnDevice(Tensor):
    """A tensor on the pretend device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # accelerate makes a parameter of the old one's class
            return torch.nn.Parameter(held, requires_grad=requires_grad)
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, requires_grad=False, device=device,
        )  # fmt: skip
        self.held = held
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            _read("tolist")
            return args[0].held.tolist()
        if func in (Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr):
            return func(args[0].held)
        if func is Tensor.numpy:
            raise TypeError(f"can't convert {args[0].device} device type tensor to numpy at {_place()}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"OnDevice({self.held!r}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)


class _Factories(TorchDispatchMode):
    """Operations without a tensor of the device among their arguments: factories and copies to it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper took a tenth of a run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """For work of the CPU alone: its operations are not looked at one by one, which takes longer than they do."""
    with _disable_current_modes():
        yield


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Of an operation's arguments: tensors, or lists of them. (torch's pytrees took most of a run.)"""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


def _map(change: Any, value: Any) -> Any:
    """An argument or a result of an operation: one value, or a list or tuple of them."""
    return type(value)([change(one) for one in value]) if type(value) in (list, tuple) else change(value)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, OnDevice) else leaf


def _full(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", _State.current) if device.type == "cuda" and device.index is None else device


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = _tensors(args, kwargs)
    ours = any(isinstance(tensor, OnDevice) for tensor in tensors)
    if not ours and not any(isinstance(value, torch.device | str | Generator) for value in (*args, *kwargs.values())):
        return func(*args, **kwargs)
    name = func._schema.name.split("::")[1]
    device = _result_device(name, func, args, kwargs, tensors)
    if not ours and device.type == "cpu":
        return func(*args, **kwargs)
    if not func.is_view and name not in _NO_KERNEL:
        # A graph holds its own device's operations. What another device is told to do is not in it.
        if device.index is not None and device.index == _State.captured_on:
            _State.recorded += 1
        else:
            COUNTS.launches[name] += 1
        COUNTS.devices[str(device)] += 1
    inner_args = tuple([_map(_held, value) for value in args])
    inner = {key: _map(_held, value) for key, value in kwargs.items()}
    if name in _COPIES:
        inner_args = tuple(CPU if isinstance(arg, torch.device | str) else arg for arg in inner_args)
    if inner.get("device") is not None:
        inner["device"] = CPU
    inner.pop("pin_memory", None)
    result = func(*inner_args, **inner)
    if device.type == "cpu" or name == "_local_scalar_dense":
        return result

    def wrapped(leaf: Any) -> Any:
        return OnDevice(leaf, device) if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) else leaf

    outputs = _map(wrapped, result)
    if not ours or name in _COPIES:
        return outputs
    return return_and_correct_aliasing(func, args, kwargs, outputs)


def _result_device(name: str, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> torch.device:
    """Where the result lies. Counts what the host waits for, and raises where a GPU would."""
    if name in _COPIES_INTO:
        _note_blocking(args[0].device, args[1], *args[2:], **kwargs)
        return _copied(args[0].device, args[1])
    if name in _COPIES:
        asked = next((a for a in (*args[1:], kwargs.get("device")) if isinstance(a, torch.device | str)), None)
        to = _full(asked) if asked is not None else args[0].device
        _note_blocking(to, args[0], kwargs.get("non_blocking", False))
        return _copied(to, args[0])
    if name in _INDEXING:
        return _indexed(name, args)
    # A CPU tensor without dimensions goes with every device, as a number does.
    devices = {t.device for t in tensors if isinstance(t, OnDevice) or t.dim() > 0}
    if len(devices) > 1 and name not in _NO_KERNEL:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"expected all tensors on one device, found {names} in {name} at {_place()}")
    own = next((t.device for t in tensors if isinstance(t, OnDevice)), CPU)
    asked = kwargs.get("device")
    device = _full(asked) if asked is not None else own
    if own.type == "cuda" and (name in _WAITING or _repeats_by_tensor(name, func, kwargs)):
        _read(name)
    generator = kwargs.get("generator")
    if isinstance(generator, Generator) and generator.label.type != device.type:
        raise RuntimeError(f"expected a {device.type} generator, found {generator.label} in {name} at {_place()}")
    return device


def _repeats_by_tensor(name: str, func: Any, kwargs: dict[str, Any]) -> bool:
    if name != "repeat_interleave" or kwargs.get("output_size") is not None:
        return False
    return func._overloadname in ("Tensor", "self_Tensor")


def _note_blocking(to: torch.device, source: Tensor, non_blocking: bool = False) -> None:
    if to.type == "cuda" and source.device.type == "cpu" and not non_blocking:
        COUNTS.blocking[f"blocking upload {_place()}"] += 1


def _copied(to: torch.device, source: Tensor) -> torch.device:
    if to.type == "cpu" and source.device.type == "cuda":
        _read("copy")
    elif to.type == "cuda" and source.device.type == "cpu":
        if _State.captured_on is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: upload at {_place()}")
        COUNTS.uploads[_place()] += 1
    return to


def _indexed(name: str, args: Any) -> torch.device:
    device = args[0].device
    for index in args[1]:
        if index is None:
            continue
        if index.device != device and index.device.type != "cpu":
            raise RuntimeError(f"indices on {index.device} for a tensor on {device} at {_place()}")
        if device.type == "cuda" and index.device.type == "cpu":
            COUNTS.uploads[_place()] += 1
        # Writing one number where a mask is true needs no count of its places.
        fills = "put" in name and args[2].numel() == 1
        if device.type == "cuda" and index.dtype in (torch.bool, torch.uint8) and not fills:
            _read("boolean index")
    if "put" in name and args[2].dim() > 0 and args[2].device != device:
        raise RuntimeError(f"values on {args[2].device} for a tensor on {device} at {_place()}")
    return device


class Generator(torch.Generator):
    """A CPU generator that remembers which device it was asked for."""

    label: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, device="cpu")
        self.label = _full(device)
        return self

    def __init__(self, device: Any = "cpu"):
        pass


def _make_graphed_callables(run: Any, sample: Any, pool: list[Tensor], **_: Any) -> Any:
    """`run` as it is, counted as one launch and a copy of each input; what a capture would refuse raises.

    The device that is current now is recorded. Graphs that share a memory pool write over each other's results: here
    they become NaN when another one runs.
    """
    device, shapes = _State.current, [value.shape for value in sample]

    def replay(*inputs: Tensor) -> Any:
        assert [value.shape for value in inputs] == shapes
        for result in pool:
            result.fill_(float("nan"))
        _State.captured_on, _State.recorded = device, 0
        try:
            results = run(*inputs)
        finally:
            _State.captured_on = None
        pool[:] = [result.held for result in results if result.is_floating_point()]
        return results

    replay(*sample)
    GRAPHS.append((device, _State.recorded))

    def counted(*inputs: Tensor) -> Any:
        COUNTS.launches["graph"] += 1
        COUNTS.launches["copy into a graph"] += len(inputs)
        return replay(*inputs)

    return counted


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _State.current
    _set_device(device)
    try:
        yield
    finally:
        _set_device(before)


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        assert index < NUM_DEVICES, f"invalid device ordinal {index}"
        _State.current = index


def _synchronize(device: Any = None) -> None:
    if _State.captured_on is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: synchronize at {_place()}")
    COUNTS.waits[_State.current if device is None else _full(device).index] += 1


def install() -> None:
    """Let torch see the pretend devices in this process, until it ends. `guard.load` comes before."""
    torch._C._set_only_lift_cpu_tensors(True)
    cuda = torch.cuda
    nothing: dict[str, Any] = {
        "_lazy_init": None, "manual_seed": None, "manual_seed_all": None, "set_rng_state": None, "empty_cache": None,
        "reset_peak_memory_stats": None, "is_available": True, "is_initialized": True, "device_count": NUM_DEVICES,
        "is_bf16_supported": True, "get_device_name": "pretend device", "get_device_capability": (9, 0),
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
    }  # fmt: skip
    for name, answer in nothing.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.mem_get_info = lambda *_: (FREE_BYTES, 80 << 30)
    cuda.get_device_properties = lambda *_: SimpleNamespace(name="pretend device", is_integrated=False)
    cuda.current_device = lambda: _State.current
    cuda.set_device, cuda.synchronize, cuda.device = _set_device, _synchronize, _device  # type: ignore[misc,assignment]
    cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    cuda.make_graphed_callables = _make_graphed_callables  # type: ignore[assignment]
    cuda.graph_pool_handle = list  # type: ignore[assignment]
    cuda.current_stream, cuda.set_stream = lambda *_: None, lambda stream: None
    torch.Generator = Generator  # type: ignore[misc]
    # Weights that move to the device become tensors of another class: the old ones cannot be filled in place.
    torch.__future__.set_swap_module_params_on_conversion(True)
    # A view that is made in inference mode cannot share the version counter of a tensor made outside of it.
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]
    _Factories().__enter__()
