"""Run a tiny model's paths through Triton's real driver on the stub of libcuda. Print what was launched, as JSON.

No kernel runs, so results are uninitialised memory. Run it with the stub's folder in LD_LIBRARY_PATH and
TRITON_LIBCUDA_PATH.
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

import gpu_models
from infer.compute import ops
from infer.compute.backends.cuda.capture import CapturedForward
from infer.compute.backends.cuda.graphs import Event, Graphs, Recording, Repeats
from infer.compute.operands.step import Chunk, Step, sampled_after
from infer.compute.ops import SampledStep

CPU, CONTEXT, ROWS = torch.device("cpu"), 256, 8
# Types of weights.
PARTS = {"experts": "Q4_0", "delta nets": "BF16", "convolutions": "Q4_0", "per-layer inputs": "BF16"}
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
BIASED = {**SAMPLED, "logit_bias": {3: 1.0}}
FILTERED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logprobs": 3}
# Other calls that a capture may contain: memory of its pool, and work that waits for nothing.
ALLOWED = {"empty", "empty_like", "empty_strided", "add", "index", "copy_", "fill_", "zero_", "where"}
ALLOWED |= {"full", "zeros"}  # memory that is filled


class StubDriver(CudaDriver):
    """Triton's driver, except for its questions to torch, which has no CUDA here."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return


class _Launch(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint),
        ("shared", ctypes.c_uint),
    )


class _Library:
    def __init__(self) -> None:
        self._stub = ctypes.CDLL("libcuda.so.1")
        self._stub.stub_launch.restype = ctypes.POINTER(_Launch)

    @property
    def num_modules(self) -> int:
        return int(self._stub.stub_num_modules())

    @property
    def num_launches(self) -> int:
        return int(self._stub.stub_num_launches())

    def launches(self, first: int) -> list[dict[str, Any]]:
        found = [self._stub.stub_launch(index).contents for index in range(first, self.num_launches)]
        return [
            {"name": each.name.decode(), "grid": list(each.grid), "block": each.block, "shared": each.shared}
            for each in found
        ]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._stub.stub_capture(1)
        try:
            yield
        finally:
            self._stub.stub_capture(0)


class _Operations(TorchDispatchMode):
    """The operations of torch that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.add(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


class StubGraphs(Graphs):
    """Graphs whose work is run once and then captured. During a capture, nothing may be compiled or waited for."""

    def __init__(self, library: _Library) -> None:
        self._library, self._repeats = library, Repeats()
        self.captures: list[dict[str, Any]] = []

    def record(self, work: Callable[[], Tensor]) -> Recording:
        num_before = self._library.num_modules
        work()
        first, num_modules = self._library.num_launches, self._library.num_modules
        with self._library.capturing(), _Operations() as operations:
            result = work()
        counts = {"compiled_before": num_modules - num_before, "compiled": self._library.num_modules - num_modules}
        forbidden = sorted(operations.names - ALLOWED)
        self.captures.append({"launches": self._library.launches(first), **counts, "forbidden": forbidden})
        return Recording(lambda: None, result)

    def mirror(self, size: int) -> Tensor:
        return self._repeats.mirror(size)

    def event(self) -> Event:
        return self._repeats.event()

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def captured_of(shape: str, type_: str, library: _Library) -> Iterator[tuple[Any, StubGraphs, CapturedForward]]:
    """Yield a model, its graphs and its forward, whose rows have room for 64 tokens."""
    model, graphs = gpu_models.make_model(shape, type_, CPU, CONTEXT), StubGraphs(library)
    with ops.using(model.backend):
        runner = gpu_models.make_runner(model, ROWS, CONTEXT, capture=False)
        captured = CapturedForward(lambda step: model.forward(step, runner.cache), 64, 64, CPU, graphs)
        for row in range(ROWS):
            runner.cache.reserve(row, 64)
        yield model, graphs, captured


def run_part(part: str, type_: str, library: _Library) -> list[dict[str, Any]]:
    """Return what forwards of a model with some part capture: a step of one token, and one of 64."""
    found = list[dict[str, Any]]()
    with captured_of(f"tiny {part}", type_, library) as (_, graphs, captured):
        for num_tokens in (1, 64):
            captured.run(Step.of([1] * num_tokens))
            found.extend(
                {"type": f"{type_} {part}", "path": f"forward of {num_tokens}", **each} for each in graphs.captures
            )
            graphs.captures.clear()
    return found


def run(type_: str, library: _Library, numbers_of_rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return the captured launches of each path of a model with weights of this type."""
    found = list[dict[str, Any]]()
    with captured_of("tiny", type_, library) as (model, graphs, captured):

        def note(path: str) -> None:
            found.extend({"type": type_, "path": path, **each} for each in graphs.captures)
            graphs.captures.clear()

        for num_tokens in (1, 8, 64):
            captured.run(Step.of([1] * num_tokens))
            note(f"forward of {num_tokens}")
        captured.record_ahead([gpu_models.columns_of(model, 1, **each) for each in (GREEDY, SAMPLED, BIASED)])
        note("ahead")
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED), ("biased", BIASED), ("filtered", FILTERED)):
            for num_rows in numbers_of_rows:
                columns, history = gpu_models.sampling_of(model, [[1, 2, 3]] * num_rows, 16, **params)
                chunks, starts = [Chunk(row, [1]) for row in range(num_rows)], [0] * num_rows
                captured.run_multi_step(SampledStep(chunks, starts, columns, history), 3, (2,))
                note(f"{name} multi-step of {num_rows}")
                drafted = [Chunk(row, [1, 2, 3], num_drafts=2) for row in range(num_rows)]
                captured.launch(SampledStep(drafted, starts, columns, history))
                note(f"{name} verifier of {num_rows}")
        pending = captured.launch(SampledStep(chunks, starts, columns, history))
        behind = [Chunk(row, [sampled_after(row)]) for row in range(len(chunks))]
        captured.launch(SampledStep(behind, [1] * len(chunks), columns, history), pending)
        note("tokens of the step before")
    return found


def main() -> None:
    triton.runtime.driver.set_active(StubDriver())
    library = _Library()
    is_whole = os.environ.get("INFER_TESTS") == "all"
    captures = run("Q4_0", library, (1, 3, ROWS))
    captures += run("BF16", library, (1, 3, ROWS)) if is_whole else []  # another type has other products only
    for part, type_ in list(PARTS.items())[:: 1 if is_whole else 3]:
        captures += run_part(part, type_, library)
    print(json.dumps({"triton": triton.__version__, "captures": captures}))


if __name__ == "__main__":
    main()
