"""Claims about memory: the estimate from headers is the memory that a loaded model takes."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import refused, run
from extent import IS_WHOLE
from infer.compute import ops
from infer.compute.backends.before_load import StepSizes
from infer.compute.backends.cpu.capture.forward import CapturedForward
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.thread_records import MAX_THREADS
from infer.compute.backends.cpu.threads.pool import set_num_threads, thread_pool
from infer.compute.backends.cpu.workspace import step_buffers
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import HOST_STEP
from infer.compute.operands.mixers import Attention, Rope
from infer.compute.operands.weights import Heads, Norm, Projection
from infer.compute.quantization.kv_formats import QUANTIZED
from infer.engine.runner.runner import make_cache
from infer.errors import InvalidRequestError, ModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_model
from infer.models.layers import LoadedAttention, LoadedExperts, LoadedRecurrent
from infer.models.load import load_transformer
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings, loaded_types, pool_bytes, rope_bytes, weight_bytes
from infer.models.transformer import Transformer
from refusals import check_refused
from test_available_memory import smollm2
from tiny import BY_NAME, ONE_EACH, make_tiny
from watched import python_command

CPU, DEFAULT, CACHE = torch.device("cpu"), LoadSettings(), CacheSettings()
CASES = [
    *(
        ("llama_odd_sizes", "auto"),
        ("llama_odd_sizes", "q8"),
        ("gemma3", "q4"),
        ("olmo2_biases", "bf16"),
        ("phi3", "q4"),
    ),
    *(("smollm3", "auto"), ("lfm2", "q8"), ("lfm2_biases", "q4"), ("qwen3_5", "q8"), ("qwen3_next", "auto")),
    *(("gemma4_shared", "q8"), ("gemma4_per_layer", "q8"), ("gemma4_per_layer", "auto"), ("gemma4_moe", "q4")),
]
EACH_FAMILY = [(tiny.name, kind) for tiny, kind in zip(ONE_EACH, cycle(["bf16", "auto", "q4", "q8"]), strict=False)]
ATTENTION = Attention(4, 2, 32, Rope(10_000.0, 32), 0.25)


def load_tiny(name: str, weights: Any, folder: Path) -> tuple[Checkpoint, Transformer]:
    make_tiny(BY_NAME[name], folder)
    checkpoint = open_checkpoint(folder)
    architecture, stored = make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)
    settings = {"backend": ops.backend_of(CPU), "keep_floats_as": weights, "max_seq_len": 200}
    return checkpoint, load_transformer(architecture, stored, **settings)


def all_heads(model: Transformer) -> list[Heads]:
    return [layer.mixer.heads for layer in model.layers if isinstance(layer.mixer, LoadedAttention)]


def estimated(num_tokens: int, load: LoadSettings = DEFAULT, kv: CacheSettings = CACHE, **rows: int) -> MemoryBudget:
    """Return the estimate of SmolLM2."""
    return MemoryBudget.of(*smollm2(), load, kv, num_tokens=num_tokens, **rows)


def norm_tensors(norm: Norm, model: Transformer) -> list[torch.Tensor]:
    """Return the weight and the bias of a norm, if the files have them."""
    weights = [norm.weight] if model.architecture.norms.have_weight else []
    return weights if norm.bias is None else [*weights, norm.bias]


def held_bytes(model: Transformer) -> int:
    """Return the real bytes of a loaded model's matrices, norms and biases, each counted once."""
    found: dict[int, int] = {}
    members = [member for layer in model.layers for part in layer.parts for member in vars(part).values()]
    for part in (part for layer in model.layers for part in layer.parts):
        if isinstance(part, LoadedRecurrent):
            members += vars(part.weights).values()
        if isinstance(part, LoadedExperts):
            members += vars(part.experts).values()
            members += [] if part.experts.shared is None else vars(part.experts.shared).values()
            members += [] if part.experts.norms is None else vars(part.experts.norms).values()
    for own in (layer.per_layer_input for layer in model.layers):
        members += [] if own is None else vars(own).values()
    for own in (model.per_layer, model.text_inputs):
        members += [] if own is None else vars(own).values()
    members += [heads.sinks for heads in all_heads(model)]
    for own in (layer.mixer for layer in model.layers if isinstance(layer.mixer, LoadedAttention)):
        if own.own.qk_norm != "head_unweighted":  # its ones are not in a file
            members += [own.heads.q_norm, own.heads.k_norm]
    for member in (model.embedding, model.head, model.norm, *members):
        if isinstance(member, Projection):
            tensors = [part.data for part in member.parts]  # type: ignore[attr-defined]
            tensors += [each for each in (member.bias, member.curve) if each is not None]
        else:
            tensors = norm_tensors(member, model) if isinstance(member, Norm) else []
            tensors += [member] if isinstance(member, torch.Tensor) else []
        found |= {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    return sum(found.values()) + 4 * sum(layer.has_scale for layer in model.architecture.layers)


@pytest.mark.slow(cases=5, rest=30)
@pytest.mark.parametrize(("name", "weights"), [*CASES, *EACH_FAMILY])
def test_weights_take_the_estimated_memory(name: str, weights: str, tmp_path: Path) -> None:
    checkpoint, model = load_tiny(name, weights, tmp_path)
    architecture = model.architecture
    types = loaded_types(architecture, checkpoint.tensors, LoadSettings(weights=weights))
    assert weight_bytes(architecture, types) == held_bytes(model)
    tables = {heads.rope.cos.data_ptr(): heads.rope for heads in all_heads(model) if heads.rope}
    held = sum(rope.cos.nbytes + rope.sin.nbytes for rope in tables.values())
    scales = {own.data_ptr(): own for heads in all_heads(model) if (own := heads.query_scales) is not None}
    held += sum(own.nbytes for own in scales.values())
    assert rope_bytes(architecture, model.max_seq_len) == held


@pytest.mark.parametrize("dtype", ["auto", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_quantised_weights_take_the_estimated_memory(dtype: str) -> None:
    architecture, tensors = smollm2()
    chosen = None if dtype == "auto" else getattr(torch, dtype)
    model = load_transformer(architecture, LazyWeights(tensors), backend=ops.backend_of(CPU), dtype=chosen)
    types = loaded_types(architecture, tensors, LoadSettings(dtype=dtype))
    assert weight_bytes(architecture, types) == held_bytes(model)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(
    ("name", "weights", "capacity"), [*((*case, 200) for case in CASES), ("llama_odd_sizes", "auto", 1000)]
)
def test_a_recorded_step_takes_the_estimated_memory(name: str, weights: str, capacity: int, tmp_path: Path) -> None:
    set_num_threads(3)
    checkpoint, model = load_tiny(name, weights, tmp_path)
    is_beyond = capacity > model.architecture.most_positions
    cache = make_cache(model, capacity, settings=CacheSettings(eviction_policy="sliding" if is_beyond else "none"))
    cache.reserve(0, 1)
    captured = CapturedForward(lambda step: model.forward(step, cache), *HOST_STEP)
    held, said = Counter[str](), Counter[str]()
    for (role, *_), tensor in captured._recording._workspace.items():
        held["quantized" if role.startswith("quantized") else role] += tensor.nbytes
    types = loaded_types(model.architecture, checkpoint.tensors, LoadSettings(weights=weights))
    sizes = StepSizes(capacity, *HOST_STEP, "exact", thread_pool().num_threads)
    buffers = step_buffers(model.architecture, types, sizes, HOST_STEP.logits)
    for (role, _), size in buffers.items():
        said["quantized" if role.startswith("quantized") else role] += size
    for role in ("attention scratch", "delta net scratch", "unpacked weights"):  # for each thread
        held[role] = held[role] * thread_pool().num_threads // MAX_THREADS
    if not instruction_set().has_matrices:
        said.pop("unpacked weights", None)
    assert +said == +held


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize(
    "settings",
    [
        CacheSettings(),
        CacheSettings(kv_type="q8"),
        CacheSettings(kv_type="q4", page_tokens=16),
        CacheSettings(kv_type="f16", eviction_policy="sliding", eviction_window=300),
        CacheSettings(eviction_policy="sliding", eviction_window=300, protected_prefix=0, page_tokens=256),
    ],
    ids=lambda settings: f"{settings.kv_type}-{settings.eviction_policy}-{settings.page_tokens}",
)
@pytest.mark.parametrize("name", ["gemma3", "lfm2", "gemma4_shared"])
def test_a_cache_takes_the_estimated_memory(name: str, settings: CacheSettings, tmp_path: Path) -> None:
    _, model = load_tiny(name, "auto", tmp_path)
    if name != "gemma3" and settings.kv_type in QUANTIZED:  # the heads are too small
        settings = replace(settings, kv_type="f16")
    assert LoadSettings().kv_type == model.kv_type
    kv_type = model.kv_type if settings.kv_type == "auto" else settings.kv_type
    for (num_tokens, num_rows), pool_pages in product([(1, 1), (1000, 1), (4097, 3)], [None, 300]):
        cache = make_cache(model, num_tokens, num_rows, settings=settings, pool_pages=pool_pages)
        said = sum(pool_bytes(model.architecture.cached_mixers, settings, kv_type, num_tokens, num_rows, pool_pages))
        assert said == cache.num_bytes, (num_tokens, num_rows, pool_pages)


def test_a_context_is_no_longer_than_the_pool() -> None:
    assert estimated(1, num_rows=64, pool_pages=30).largest_context(10**12, 8192) == 30 * 64
    assert estimated(1920, num_rows=1).cache == estimated(1920, num_rows=64, pool_pages=30).cache
    with pytest.raises(InvalidRequestError, match=r"at least 30, the pages of one sequence of 1,920 tokens, got 29"):
        sum(pool_bytes(smollm2()[0].attention, CACHE, "f16", 1920, 64, 29))


LOAD = """
import sys
from pathlib import Path
from infer import LLM
llm = LLM("smollm2", max_seq_len=64, threads=1, dtype=sys.argv[1])
lines = Path("/proc/self/status").read_text().splitlines()
kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
print((kilobytes["VmHWM"] - kilobytes["VmRSS"]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hardware: a system that tells a process's peak")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"] if IS_WHOLE else ["bfloat16"])
def test_loading_never_takes_much_more_than_the_loaded_model(dtype: str) -> None:
    """The table of SmolLM2 is 30 MB, 57 as bfloat16, 113 in floats; its file is 98 MB."""
    done = subprocess.run(python_command(LOAD, dtype), capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16_000_000


FREE = """
from pathlib import Path
import torch
from infer.system.available_memory import give_back_freed

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

pieces = [torch.ones(15_000) for _ in range(2000)]
pieces[:-1] = []  # the last one keeps what lies below it
before = resident()
give_back_freed()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hardware: a system that tells what is resident")
def test_freed_memory_returns_to_the_system() -> None:
    done = subprocess.run(python_command(FREE), capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100_000_000


def test_each_row_of_a_batch_takes_a_line_of_logits_and_its_history() -> None:
    one, five = (estimated(512, num_rows=count) for count in (1, 5))
    assert five.workspace - one.workspace == 4 * (4 * 49_152 + 8 * 49_152 + 8 * 512)


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_the_type_of_a_cache_is_the_loaders(dtype: str) -> None:
    chosen = None if dtype == "auto" else getattr(torch, dtype)
    assert LoadSettings(dtype=dtype).kv_type == ops.backend_of(CPU).kv_type(chosen)
    assert LoadSettings(dtype=dtype).kv_type == ("f16" if dtype == "auto" else "f32")


def test_the_largest_context_is_the_last_that_fits() -> None:
    def largest(available: int) -> int:
        return estimated(1).largest_context(available, 8192)

    for wanted in (2, 1000, 8191):
        available = estimated(wanted).model
        found = largest(available)
        assert wanted <= found
        assert estimated(found).model <= available < estimated(found + 1).model
    assert (largest(10**12), largest(10**6)) == (8192, 0)


def test_windows_bound_the_memory_of_their_layers() -> None:
    windowed, settings = [replace(ATTENTION, window=100)] * 5, CacheSettings()
    short, long = (sum(pool_bytes(windowed, settings, "f16", count, 1)) for count in (2048, 100_352))
    assert short == long
    whole = [sum(pool_bytes([*windowed, ATTENTION], settings, "f16", count, 1)) for count in (2048, 100_352)]
    assert whole[1] - whole[0] == sum(pool_bytes([ATTENTION], settings, "f16", 98_304, 1))


def test_a_context_that_does_not_fit_is_refused_with_one_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = estimated(1000, LoadSettings(num_threads=thread_pool().num_threads)).model
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: needed)
    with monkeypatch.context() as within:
        within.setattr("infer.models.from_checkpoint.load_transformer", None)  # it is not called
        with pytest.raises(ModelError, match=r"Q4_1.gguf needs 3\d\d MB here \(99 of .* for 8,192 tokens, ") as error:
            load_model("smollm2", max_seq_len=8192)
    most = int(re.findall(r"max_seq_len=(\d+) fits", str(error.value))[0])
    assert 1000 <= most < 1100
    assert load_model("smollm2", max_seq_len=most)[0].max_seq_len == most
    check_refused(lambda: load_model("smollm2", max_seq_len=most + 64), f"max_seq_len={most} fits", ModelError)
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: 10**6)
    check_refused(lambda: load_model("smollm2"), "but 1 MB are available: use a smaller quantisation", ModelError)
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: None)
    assert load_model("smollm2", max_seq_len=64)[0].max_seq_len == 64


def test_the_command_uses_its_options_and_loads_no_torch() -> None:
    code = "import sys; from infer.cli import main; status = main(); print('torch' in sys.modules); sys.exit(status)"
    model = "estimate smollm2 --json --max-seq-len 4096 --batch 3 --pool-pages 20 --kv-type q8 --threads 2"
    options = "--eviction-policy sliding --eviction-window 500 --precision fast"
    arguments = [*model.split(), *options.split()]
    done = subprocess.run(python_command(code, *arguments), capture_output=True, text=True, check=True)
    report, has_torch = done.stdout.splitlines()
    assert has_torch == "False"
    found = json.loads(report)
    cache = CacheSettings(kv_type="q8", eviction_policy="sliding", eviction_window=500)
    load = LoadSettings(precision="fast", num_threads=2)
    expected = estimated(4096, load, cache, num_rows=3, pool_pages=20)
    own = {f"{name.removesuffix('s')}_bytes": getattr(expected, name) for name in ("weights", "cache", "total")}
    own |= {f"{name}_bytes": getattr(expected, name) for name in ("workspace", "process")}
    assert {key: found[key] for key in own} == own
    assert (found["fits"], found["largest_context"]) == (True, 8192)


@pytest.mark.parametrize(
    ("device", "free", "remark"),
    [("cpu", None, "512 tokens\n"), ("cuda", None, "8,192 tokens, twice, "), ("cuda", 1e9, "1,024 tokens, twice, ")],
)
def test_the_command_names_the_tokens_of_a_step(
    device: str, free: float | None, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = None if free is None else int(free)
    monkeypatch.setattr("infer.cli.commands.explain_command._free_on_gpu", lambda: free_bytes)
    shown = run("estimate", "--max-seq-len", "2048", "--device", device).out
    assert f"MB   of a step of {remark}" in shown


@pytest.mark.slow
def test_the_command_says_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.cli.commands.explain_command.available_memory_bytes", lambda: 500_000_000)
    last = run("estimate", "--max-seq-len", "8192").out.splitlines()[-1]
    most = int(re.findall(r"it does not fit; up to ([\d,]+) tokens would", last)[0].replace(",", ""))
    assert "it fits" in run("estimate", "--max-seq-len", most).out
    monkeypatch.setattr("infer.cli.commands.explain_command.available_memory_bytes", lambda: 100_000_000)
    assert "it does not fit; no context would fit: use a smaller quantisation" in run("estimate").out


BAD_SETTINGS = [
    (["--max-seq-len", "8193"], "max_seq_len must be from 2 to the model's own 8192, got 8193"),
    (["--dtype", "float32", "--weights", "q8"], "dtype=float32 and weights=q8 contradict each other"),
    (["--eviction-policy", "sliding", "--eviction-window", "4"], "eviction_window must be larger than"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD_SETTINGS)
def test_a_bad_setting_is_not_estimated(arguments: list[str], reason: str) -> None:
    assert reason in refused("estimate", *arguments)


def test_the_command_needs_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no affinity."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    assert "total" in run("estimate").out
