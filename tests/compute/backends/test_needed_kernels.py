"""A load compiles what its steps need, ahead and by several processes; no prompt waits for a compiler.

The processes load no torch, and their Numba takes shortcuts that change no code.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cases import cases
from infer import InferError, SamplingParams, Tokenizer
from infer.cli.command_options import CompileOptions
from infer.cli.commands.models_command import run_compile
from infer.compute.backends.cpu import records
from infer.compute.backends.cpu.backend import CpuBackend
from infer.compute.backends.cpu.compile import addresses, compiler, linked_code, parallel
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.compile.parallel import Compilation, CompiledObject
from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.isa import BY_NAME, instruction_set
from infer.compute.backends.cpu.needed_kernels import needed_kernels
from infer.compute.backends.cpu.threads import pool
from infer.compute.backends.cpu.threads.pool import CurrentPool, ThreadPool
from infer.compute.operands.architecture import ModelOutline
from infer.compute.operands.step import Chunk
from infer.compute.ops import KernelStore, SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.engine.runner.runner import Runner
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models import from_checkpoint
from infer.models.compile_ahead import compiling_ahead, make_outline
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_checked
from infer.system import cores
from infer.system.status_line import silence
from tiny import TINY, Tiny, make_tiny
from watched import run_python

ADD = Kernel(".matmul.matmul:make_store", ("add",), "EPILOGUE")
RELU = Kernel(".matmul.matmul:make_gate", ("relu",), "EPILOGUE", "activation relu")
SETTINGS: dict[str, dict[str, str]] = {"as stored": {}, "q8, fast": {"weights": "q8", "precision": "fast"}}
SETTINGS |= {"q4, kv q8": {"weights": "q4", "kv_type": "q8"}, "float16": {"dtype": "float16"}}
CASES = [pytest.param(tiny, each, id=f"{tiny.name}, {each}") for tiny, each in zip(TINY, cycle(SETTINGS), strict=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(TINY[0], folder)
    return folder


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Kernel], set[Kernel]]:
    """Compile nothing and run no table. Return the kernels that a load announced, and those that were requested."""
    announced, asked = list[Kernel](), set[Kernel]()

    @contextmanager
    def compiling(needed: Iterable[Kernel]) -> Iterator[None]:
        announced.extend(needed)
        yield

    def compiled_address(maker: str, arguments: Any, *variant: str | int) -> int:
        asked.add(Kernel(maker, variant))
        return 0

    import_module("infer.compute.backends.cpu.capture.forward")  # loads the modules that import `compiled_address`
    real = addresses.compiled_address
    for module in list(sys.modules.values()):
        if vars(module).get("compiled_address") is real:
            monkeypatch.setattr(module, "compiled_address", compiled_address)
    monkeypatch.setattr(addresses, "compiling", compiling)
    monkeypatch.setattr(pool, "_current", CurrentPool())
    monkeypatch.setattr(ThreadPool, "run", lambda self, table, state, num_threads=None: None)
    return announced, asked


@pytest.mark.slow(cases=6, rest=40)
@pytest.mark.parametrize(("tiny", "setting"), CASES)
def test_a_load_announces_exactly_the_kernels_of_its_steps(
    dry: tuple[list[Kernel], set[Kernel]], tiny: Tiny, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced, asked = dry
    make_tiny(tiny, tmp_path)
    monkeypatch.setattr(from_checkpoint, "_check_vocabulary", lambda architecture, tokenizer: None)
    tokenizer = object.__new__(Tokenizer)
    kv_type = {} if tiny.config.hidden_size % 128 == 0 else {"kv_type": "auto"}
    settings = ModelSettings.of({"max_seq_len": 64} | SETTINGS[setting] | kv_type)
    model = load_checked(open_checkpoint(tmp_path), tokenizer, settings)
    captured = Runner(model, 64, settings=settings.cache)._captured
    assert captured is not None
    columns = SamplingColumns.of([SamplingParams(temperature=0)], 8)
    step = SampledStep([Chunk(0, [1])], [0], columns)
    captured.run_multi_step(step, 1)
    captured.launch(step).wait()
    assert set(announced) == asked | {Kernel(".threads.worker_loop:publish")}  # only grammars need it


def finished(kernels: list[Kernel]) -> dict[str, Any]:
    compilation = Compilation(kernels)
    try:
        compilation.finish()
        return {kernel.label: compilation.take(kernel.file_name) for kernel in kernels}
    finally:
        compilation.close()


@pytest.mark.slow
def test_processes_compile_the_same_kernels_as_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    for label, answer in finished([ADD, RELU]).items():
        assert answer is not None, label
        assert addresses._load(answer.symbol.encode() + b"\n" + answer.object_code)
    assert list(tmp_path.iterdir()) == []  # the caller keeps the kernels


@pytest.mark.slow
def test_kernels_that_other_processes_cannot_compile_are_compiled_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finished([replace(ADD, maker=".matmul.matmul:make_nothing"), RELU])["nothing_add"] is None
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert finished([RELU]) == {"gate_relu": None}


@cases(
    "available processes",
    (10**12, 3),
    (None, 3),
    (1_300_000_000, 2),
    (100_000_000, 1),
)
def test_processes_that_compile_leave_half_of_the_memory(
    available: int | None, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    monkeypatch.setattr(parallel, "available_memory_bytes", lambda: available)
    monkeypatch.setattr(parallel, "num_processors", lambda: 16)
    kernels = [replace(ADD, maker=f".matmul.matmul:make_{number}") for number in range(3)]
    compilation = Compilation(kernels)
    compilation.close()
    assert len(compilation._threads) == processes


def test_the_first_line_has_the_number_the_purpose_and_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    monkeypatch.setattr(kernel_cache, "trouble", lambda: None)
    finished([RELU])
    purpose = "for activation relu: about 5 s, once per machine and model type"
    assert capsys.readouterr().err == f"infer: compiling 1 CPU kernel {purpose}\n"
    monkeypatch.setattr(kernel_cache, "trouble", lambda: "/folder cannot be written")
    finished([RELU, ADD])
    reason = "for this process only: /folder cannot be written (set INFER_CACHE)"
    assert capsys.readouterr().err == f"infer: compiling 2 CPU kernels: about 5 s, {reason}\n"
    silence()
    try:
        finished([RELU])
    finally:
        silence(False)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_fork_does_not_wait_for_its_parents_compilation() -> None:
    code = f"""
import os
from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.compile.parallel import Compilation
add = {ADD!r}
compilation = Compilation([add])
child = os.fork()
if child == 0:
    os._exit(0 if compilation.take(add.file_name) is None else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert compilation.take(add.file_name) is not None
compilation.close()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow(cases=2)
@cases(
    "missing trouble said",
    ([], None, "all 9 CPU kernels are already in /kept"),
    ([], "/kept cannot be written", "all 9 CPU kernels are already in /kept"),
    (["add"], None, "1 of 9 CPU kernels compiled for avx2 in 0 s, in /kept"),
    (["add"], "/kept cannot be written", "cannot be stored: /kept cannot be written; set INFER_CACHE"),
)
def test_compile_prints_its_result_or_the_reason(
    missing: list[str],
    trouble: str | None,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = []

    def compiling(backend: CpuBackend, models: Sequence[ModelOutline]) -> AbstractContextManager[None]:
        counts.append(len({kernel for model in models for kernel in needed_kernels(model, BY_NAME["avx2"])}))
        return nullcontext()

    monkeypatch.setattr(
        CpuBackend, "kernel_store", lambda backend, needed: KernelStore("avx2", missing, 9, Path("/kept"), trouble)
    )
    monkeypatch.setattr(CpuBackend, "compiling", compiling)
    if missing and trouble:
        with pytest.raises(InferError, match=said):
            run_compile(CompileOptions(model=str(folder), is_all=False, quiet=True, verbose=False))
        return
    for is_all in (False, True):
        run_compile(CompileOptions(model=str(folder), is_all=is_all, quiet=True, verbose=False))
    assert capsys.readouterr().out == f"{folder}: {said}\n" * 2
    assert counts == sorted(set(counts))  # more settings need more kernels


# The first use on a machine without kernels


MAKE_ALL = """
import json, sys
import infer.compute.backends.cpu.compile.child
from infer.compute.backends.cpu.compile.kernel import Kernel
for maker, variant in json.loads(sys.argv[1]):
    Kernel(maker, tuple(variant)).make()
print(sorted({"torch", "jaxtyping"} & set(sys.modules)))
"""
NORMALIZE = Kernel(".activations:normalize")


@pytest.fixture(scope="module")
def needed(folder: Path) -> list[Kernel]:
    checkpoint = open_checkpoint(str(folder))
    architecture = make_architecture(checkpoint.config)
    outline = make_outline(architecture, checkpoint.tensors, ModelSettings())
    return list(needed_kernels(outline, instruction_set()))


class NoCompilation:
    """Takes kernels and compiles none, so that a caller who needs a kernel compiles it."""

    begun: ClassVar[list[set[str]]] = []

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.file_names = {kernel.file_name for kernel in kernels}
        self.begun.append(self.file_names)

    def take(self, file_name: str) -> CompiledObject | None:
        return None

    def close(self) -> None:
        pass

    finish = close


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return the kernels that would have been compiled. Every kernel is available immediately."""
    monkeypatch.setattr(NoCompilation, "begun", [])
    monkeypatch.setattr(addresses, "Compilation", NoCompilation)
    monkeypatch.setattr(addresses, "compiled_address", lambda *named: 1)
    monkeypatch.setattr(addresses, "_address_by_kernel", {})
    monkeypatch.setattr(kernel_cache, "is_kept", lambda name: False)
    monkeypatch.setattr(kernel_cache, "is_empty", lambda: True)
    return NoCompilation.begun


@pytest.mark.slow
def test_compiling_kernels_loads_no_torch(needed: list[Kernel]) -> None:
    kernels = json.dumps([(kernel.maker, kernel.variant) for kernel in needed])
    done = run_python(MAKE_ALL, kernels)
    assert done.stdout == "[]\n", done.stderr


def test_kernels_begun_ahead_are_those_of_the_load_and_not_begun_twice(
    begun: list[set[str]], folder: Path, needed: list[Kernel]
) -> None:
    with compiling_ahead(str(folder), ModelSettings()):
        assert begun == [{kernel.file_name for kernel in addresses.missing_kernels(needed)}]
        with addresses.compiling(needed):
            pass
    assert len(begun) == 1
    with addresses.compiling(needed):
        assert begun[1:] == begun[:1]  # kernels that no process took are dropped


def test_a_load_compiles_the_other_kernels_that_it_needs(
    begun: list[set[str]], folder: Path, needed: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_WORTH_SECONDS", 0.1)
    with compiling_ahead(str(folder), ModelSettings()), addresses.compiling([*needed, RELU]):
        assert begun[1:] == [{"matmul.matmul.gate_relu"}]


@pytest.mark.parametrize("unlike", ["kept", "cuda", "refused"])
def test_kernels_are_compiled_ahead_only_if_they_will_be_used(
    unlike: str, begun: list[set[str]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "is_empty", lambda: unlike != "kept")
    model, device = (str(tmp_path) if unlike == "refused" else str(folder)), "cuda" if unlike == "cuda" else "cpu"
    with compiling_ahead(model, ModelSettings(device=device)):
        pass
    assert begun == []


def test_a_cache_is_empty_until_it_holds_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    kernel_cache.write("target-features", b"avx2")
    assert kernel_cache.is_empty()
    kernel_cache.write("matmul.matmul.add", b"code")
    assert not kernel_cache.is_empty()


def image() -> bytes:
    code = compiler.compile_command(NORMALIZE.label, NORMALIZE.make, records.NORMALIZE)
    assert code.object_code is not None
    made = linked_code.try_make(code.object_code, code.symbol)
    assert made is not None
    return made


@pytest.mark.slow
@pytest.mark.skipif(not linked_code.are_used_here(), reason="hardware: Linux on x86-64 only")
def test_shortcuts_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    short = image()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "shortcuts", nullcontext)
        assert image() == short


def test_processors_are_those_the_process_may_use_within_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: {0, 1, 2, 3})
    for quota, expected in ((None, 4), (2.5, 2), (9.0, 4), (0.5, 1)):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert cores.num_processors() == expected
