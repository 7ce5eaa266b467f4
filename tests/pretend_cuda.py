"""CUDA devices in name only: tensors say that they are on `cuda:0` or `cuda:1`, their values lie in host memory.

What goes wrong on a GPU goes wrong here: operands on different devices, `numpy()` of a device tensor, page-locking what
is on a device, reading in one stream what another has written and nobody has waited for. So what runs on GPUs can be
run, and its results compared with a CPU's, on a machine that has none. It does not show speed, kernels, or memory that
is handed on too early.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from tests.pretend_streams import (
    Event,
    Stream,
    check_waited_for,
    current_stream,
    in_full,
    in_stream,
    start,
    synchronize,
)

aten = torch.ops.aten
CPU = torch.device("cpu")
TOTAL_BYTES = 8 << 30
PROPERTIES = SimpleNamespace(
    name="a pretended GPU", major=8, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=1
)
"""What libraries ask about a GPU when they are imported."""
COPIES = {aten.copy_.default, aten._to_copy.default}


class _Bracket:
    """`tensor[…]` as if it were an operation: torch asks the driver before it calls those that it consists of."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


GET, SET = _Bracket(torch.Tensor.__getitem__), _Bracket(torch.Tensor.__setitem__)
# A device takes the indices of its own tensors from the host too.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, GET, SET}


class DeviceTensor(torch.Tensor):
    """A tensor on a device that does not exist; `held` has the values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
            storage_size=held.untyped_storage().nbytes(),
        )
        tensor.held = held
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held!r}, device={str(self.device)!r})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"cannot convert a tensor on {self.device} to numpy; copy it to host memory first")

    def record_stream(self, stream: Stream) -> None:
        """Host memory is not handed on before the last reference is gone."""

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees the functions that make a tensor on a device without being given one that is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Names devices in full and makes tensors from data, both of which torch otherwise asks the device's driver for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), (str, torch.device)):
            kwargs["device"] = in_full(kwargs["device"])
        if args and isinstance(args[0], torch.Tensor) and func in _AROUND_THE_DRIVER:
            return _AROUND_THE_DRIVER[func](*args, **kwargs)
        if func in READS:
            return func(_on_host(args[0]))
        if func is torch.Tensor.to:
            args = tuple(in_full(a) if isinstance(a, (str, torch.device)) else a for a in args)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    if func is aten.is_pinned.default:
        return getattr(tensors[0], "page_locked", False)
    if func is aten._pin_memory.default:
        return _page_locked(tensors[0])
    if func is aten._fused_sdp_choice.default:
        return 0  # the formula in torch's own operations
    device = _device_of(func, args, kwargs, tensors)
    on_devices = [t for t in tensors if isinstance(t, DeviceTensor)]
    for tensor in on_devices:
        check_waited_for(tensor.held, current_stream(tensor.device))
    options = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    result = func(*tree_map(_plain, args), **tree_map(_plain, options))
    if device.type != "cuda" or func is aten._local_scalar_dense.default:
        for tensor in on_devices:  # the host has waited for what it reads
            current_stream(tensor.device).synchronize()
        return result
    known = {id(t.held): t for t in on_devices}
    shared = {t.held.untyped_storage()._cdata for t in on_devices}
    stream = current_stream(device)
    stream.issued += 1
    if func is SET:
        stream.wrote(args[0].held)

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known or value.untyped_storage()._cdata not in shared:  # in place or new, not a view
            stream.wrote(value)
        return known[id(value)] if id(value) in known else DeviceTensor(value, device)

    return tree_map(back, result)


def _device_of(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.device:
    """Where the result lies; refuses operands that a GPU would refuse."""
    if kwargs.get("device") is not None:
        return in_full(kwargs["device"])
    if func in COPIES:
        return args[0].device
    allowed = {args[0].device, CPU} if func in INDEXING else None
    devices = {t.device for t in tensors if t.dim() or t.device != CPU} or {CPU}
    if len(devices) > 1 and (allowed is None or not devices <= allowed):
        raise RuntimeError(f"{func}: expected all tensors on the same device, found {sorted(map(str, devices))}")
    return args[0].device if allowed else next(iter(devices))


def _contiguous(tensor: torch.Tensor, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else aten.clone.default(tensor, memory_format=memory_format)


_AROUND_THE_DRIVER: dict[Any, Any] = {
    torch.Tensor.__getitem__: lambda *args: _run(GET, args, {}),
    torch.Tensor.__setitem__: lambda *args: _run(SET, args, {}),
    torch.Tensor.__invert__: aten.bitwise_not.default,
    torch.Tensor.contiguous: _contiguous,
    torch.nonzero: aten.nonzero.default,
    torch.Tensor.nonzero: aten.nonzero.default,
    torch.Tensor.copy_: lambda tensor, source, non_blocking=False: aten.copy_.default(tensor, source),
}
READS = {getattr(torch.Tensor, n) for n in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return aten._to_copy.default(tensor, device=CPU) if isinstance(tensor, DeviceTensor) else tensor


def _plain(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value.held if isinstance(value, DeviceTensor) else value


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DeviceTensor):
        raise RuntimeError("only host tensors can be page-locked")
    locked = tensor.clone()
    locked.page_locked = True  # type: ignore[attr-defined]
    return locked


@contextlib.contextmanager
def pretend_cuda(num_devices: int = 1) -> Iterator[None]:
    """torch with `num_devices` GPUs, in every thread that starts within."""
    start(num_devices)
    run = threading.Thread.run

    def run_with_devices(thread: threading.Thread) -> None:
        with _Calls(), _Factories():
            run(thread)

    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: "a pretended GPU",
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "synchronize": synchronize,
        "device": lambda device: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "current_stream": current_stream,
        "stream": in_stream,
        "Stream": Stream,
        "Event": Event,
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(threading.Thread, "run", run_with_devices),
        # `Module.to` makes new parameters: an existing one cannot become a tensor of another class.
        mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", return_value=True),
        _Calls(),
        _Factories(),
    ):
        yield
