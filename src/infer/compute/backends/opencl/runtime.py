"""A device, its context, its single in-order queue, and tensors in its memory. Each program is built once.

The memory is the host's or the device's own. If it is the host's, a buffer is a tensor's memory; otherwise it is a
copy. In both cases the host calls `to_device` after it has written and `to_host` before it reads, because a GPU may
cache shared memory. A CPU that shares memory needs neither.
"""

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, final
from weakref import WeakValueDictionary

import numpy as np
import pyopencl as cl
import torch
from torch import Tensor

from infer.compute.backends import host_memory
from infer.compute.backends.opencl.devices import ITEMS, full_name
from infer.errors import InvalidRequestError

_SMALLER = "a smaller max_seq_len, kv_type q4 or weights q4 need less"


@final
class Placed(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a tensor on the host, and its buffer, which lives as long as the bytes."""

    buffer: cl.Buffer
    is_of_host: bool  # the tensor is the host's, and may be written without notice


@final
class Memory:
    def __init__(self, queue: cl.CommandQueue, name: str) -> None:
        self._queue, self._device, self._name = queue, queue.device, name
        self.is_shared = bool(self._device.host_unified_memory)
        self._is_cpu = bool(self._device.type & cl.device_type.CPU)
        self.most_bytes = int(self._device.max_mem_alloc_size)  # of a buffer
        self._placed: WeakValueDictionary[tuple[int, int], Placed] = WeakValueDictionary()  # by address and size
        self._copies = list[cl.Event]()  # under way: one that is dropped is waited for

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.place(host_memory.zeros(shape, dtype))

    def place(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device. If it is copied, its bytes on the host take no memory until `to_host`, and
        are meaningless.
        """
        host = tensor if self.is_shared else host_memory.zeros(tensor.shape, tensor.dtype)
        placed = self._make(host, self._buffer(tensor), is_of_host=False)
        return torch.from_numpy(placed).view(tensor.dtype).view(tensor.shape)

    def placed(self, tensor: Tensor) -> Placed:
        """Return the buffer of a placed tensor. Any other tensor is placed now, for as long as the returned value
        lives.
        """
        found = self._placed.get((tensor.data_ptr(), tensor.nbytes))
        return self._make(tensor, self._buffer(tensor), is_of_host=True) if found is None else found

    def _make(self, host: Tensor, buffer: cl.Buffer, *, is_of_host: bool) -> Placed:
        placed = host.view(-1).view(torch.uint8).numpy().view(Placed)
        placed.buffer, placed.is_of_host = buffer, is_of_host
        self._placed[host.data_ptr(), host.nbytes] = placed
        return placed

    def _buffer(self, tensor: Tensor) -> cl.Buffer:
        """Return a buffer on the memory of a contiguous tensor, or on a copy of it.

        Raises InvalidRequestError if the device has no room for it.
        """
        assert tensor.is_contiguous()
        if not tensor.nbytes:  # OpenCL has no empty buffers
            return cl.Buffer(self._queue.context, cl.mem_flags.READ_WRITE, size=1)
        room = self.most_bytes if self.is_shared else min(self.most_bytes, self.available_bytes())
        needed = f"{tensor.nbytes / 1e6:,.1f} MB"
        if tensor.nbytes > room:
            raise InvalidRequestError(
                f"device opencl: {self._name} has room for {room / 1e6:,.0f} MB in one piece, and {needed} are needed: "
                f"{_SMALLER}"
            )
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        kind = cl.mem_flags.USE_HOST_PTR if self.is_shared else cl.mem_flags.COPY_HOST_PTR
        try:
            return cl.Buffer(self._queue.context, cl.mem_flags.READ_WRITE | kind, hostbuf=memory)
        except cl.MemoryError as error:
            raise InvalidRequestError(
                f"device opencl: {self._name} has no {needed} free, because other work uses its memory: {_SMALLER}"
            ) from error

    def available_bytes(self) -> int:
        """Return the bytes of the device's own memory that this process has not taken.

        OpenCL does not report what other processes have taken.
        """
        taken = [placed.nbytes for each in self._placed.valuerefs() if (placed := each()) is not None]
        return int(self._device.global_mem_size) - sum(taken)

    def to_device(self, tensor: Tensor, first: int = 0, count: int | None = None) -> None:
        """Make entries [first, first + count) of the first axis, as the host wrote them, visible to what is enqueued
        later.
        """
        part, offset = self._part(tensor, first, count)
        self._copy(self.placed(tensor).buffer, part, part.size, dst_offset=offset)

    def to_host(self, tensor: Tensor, first: int = 0, count: int | None = None) -> None:
        """Make entries [first, first + count) of the first axis, as earlier work wrote them, visible to the host after
        `finish`.
        """
        part, offset = self._part(tensor, first, count)
        self._copy(part, self.placed(tensor).buffer, part.size, src_offset=offset)

    def _copy(self, to: Any, source: Any, num_bytes: int, **offset: int) -> None:
        if num_bytes and not (self.is_shared and self._is_cpu):
            self._copies.append(cl.enqueue_copy(self._queue, to, source, is_blocking=False, **offset))

    def _part(self, tensor: Tensor, first: int, count: int | None) -> tuple[Any, int]:
        part = tensor[first:] if count is None else tensor[first : first + count]
        return part.view(-1).view(torch.uint8).numpy(), first * tensor[:1].nbytes  # an empty part has no address

    def finish(self) -> None:
        """Wait for all enqueued work."""
        self._queue.finish()
        self._copies.clear()


def storage_of(tensor: Tensor) -> Tensor:
    """Return all bytes that the tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


_UNKNOWN_CPU = "unknown target CPU"  # Clang's words
_FOLDER = Path(__file__).parent / "kernels"


@final
class Runtime:
    def __init__(self, device: cl.Device) -> None:
        self.device, self.name = device, full_name(device)
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context, device)
        self.memory = Memory(self.queue, self.name)
        # OpenCL C 3.0 declares the products of four bytes, on devices that have them.
        has_products = "cl_khr_integer_dot_product" in device.extensions.split()
        self._options = ["-cl-std=CL3.0" if has_products else "-cl-std=CL1.2"]
        if device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
            self._options.append("-cl-fp32-correctly-rounded-divide-sqrt")
        self._programs: dict[tuple[Any, ...], cl.Program] = {}

    def kernel(self, source: str, name: str, macros: dict[str, Any]) -> cl.Kernel:
        """Return a kernel with arguments of its own. Raises InvalidRequestError if its program does not build."""
        key = (source, *sorted(macros.items()))
        if key not in self._programs:
            self._programs[key] = self._build(source, macros)
        return cl.Kernel(self._programs[key], name)

    def _build(self, source: str, macros: dict[str, Any]) -> cl.Program:
        values = [f"#define {name} {value}\n" for name, value in {"ITEMS": ITEMS, **macros}.items()]
        program = cl.Program(self.context, "".join([*values, _text("common.cl"), _text(source)]))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cl.CompilerWarning)  # Intel's compiler tells what it vectorised
                return program.build(self._options)
        except cl.Error as error:
            lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
            why = f"{source} does not build on {self.name}: {lines[0].strip()}: use another device, or --device cpu"
            if _UNKNOWN_CPU in str(error):
                why = (
                    f"{self.name} does not know this CPU, which is newer than its compiler "
                    f"({lines[0].strip()}): install a newer release of it, or Intel's runtime (pip install "
                    "intel-opencl-rt intel-cmplr-lib-rt) and use --device opencl:intel, or use --device cpu"
                )
            raise InvalidRequestError(f"device opencl: {why}") from error


@cache
def _text(source: str) -> str:
    return (_FOLDER / source).read_text()
