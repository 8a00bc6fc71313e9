"""A load compiles what its steps need, ahead and by several processes; no prompt waits for a compiler."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from infer import InferError, SamplingParams, Tokenizer
from infer.cli.model_commands.compile_command import run_compile
from infer.compute.backends.cpu.backend import CpuBackend
from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.compile.parallel import Compilation
from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.isa import BY_NAME
from infer.compute.backends.cpu.needed_kernels import needed_kernels
from infer.compute.backends.cpu.threads import pool
from infer.compute.backends.cpu.threads.pool import CurrentPool, ThreadPool
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.architecture import ModelOutline
from infer.compute.operands.step import Chunk
from infer.compute.ops import KernelStore
from infer.compute.sampling.columns import SamplingColumns
from infer.engine.runner.runner import Runner
from infer.files import open_checkpoint
from infer.models import from_checkpoint
from infer.models.from_checkpoint import load_checked
from infer.system.status_line import silence
from tiny import TINY, Tiny, make_tiny
from watched import run_python

ADD = Kernel(".matmul.matmul:make_store", ("add",), "EPILOGUE")
RELU = Kernel(".matmul.matmul:make_gate", ("relu",), "EPILOGUE", "activation relu")
SETTINGS: dict[str, dict[str, str]] = {"as stored": {}, "q8, fast": {"weights": "q8", "precision": "fast"}}
SETTINGS |= {"q4, kv q8": {"weights": "q4", "kv_type": "q8"}, "float16": {"dtype": "float16"}}
CASES = [pytest.param(tiny, each, id=f"{tiny.name}, {each}") for tiny, each in zip(TINY, cycle(SETTINGS), strict=False)]


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


@pytest.mark.slow(cases=6)
@pytest.mark.parametrize(("tiny", "setting"), CASES)
def test_a_load_announces_exactly_the_kernels_of_its_steps(
    dry: tuple[list[Kernel], set[Kernel]], tiny: Tiny, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced, asked = dry
    make_tiny(tiny, tmp_path)
    monkeypatch.setattr(from_checkpoint, "_check_vocabulary", lambda architecture, tokenizer: None)
    tokenizer = object.__new__(Tokenizer)
    chosen = {"dtype": "auto", "weights": "auto", "precision": "exact"} | SETTINGS[setting]
    kv_type = chosen.pop("kv_type", "auto")
    cache = CacheSettings(kv_type=kv_type if tiny.config.hidden_size % 128 == 0 else "auto")
    options = {"max_seq_len": 64, "on_progress": None, "cache": cache}
    model = load_checked(open_checkpoint(tmp_path), tokenizer, "cpu", **chosen, **options)
    captured = Runner(model, 64, settings=cache)._captured
    assert captured is not None
    columns = SamplingColumns.of([SamplingParams(temperature=0)], 8)
    captured.run_multi_step([Chunk(0, [1])], [0], 1, columns)
    captured.run_verified([Chunk(0, [1])], [0], columns)
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tiny(TINY[0], tmp_path)
    capsys.readouterr()
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
            run_compile(str(tmp_path), is_all=False)
        return
    for is_all in (False, True):
        run_compile(str(tmp_path), is_all=is_all)
    assert capsys.readouterr().out == f"{tmp_path}: {said}\n" * 2
    assert counts == sorted(set(counts))  # more settings need more kernels
