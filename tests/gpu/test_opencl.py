"""OpenCL's kernels on PoCL, or on Intel's runtime (`make intel`), have the CPU's bits for every op, type and model."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import LlamaConfig

import opencl_platform
from answer_gguf import write_mixed_gguf
from byte_tokenizer import write_byte_tokenizer
from commands import run
from extent import IS_WHOLE
from infer import LLM, InvalidRequestError, SamplingParams
from infer.cli.subcommands import infer
from infer.compute import ops
from infer.compute.backends.cpu.layouts import LAYOUTS
from infer.compute.backends.opencl.stored_types import KV_TYPES, TYPES, stored_type
from infer.compute.backends.reference_parts import as_halves
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, Projection, RopeTable, Weight
from layer_caches import make_layer
from path_cases import CASES, DRAFTS, Drafts, Outcome, Way, World, all_by_definition, make_world, run_batch
from refusals import check_refused
from test_cpu_kernels import make_weight
from test_families import load, make_reserved, random_ids
from test_session import make_model
from tiny import ONE_EACH_DENSE, Tiny, make_tiny
from unseen_values import Span, check_unseen

pytest.importorskip("pyopencl")
opencl_platform.use_cpu_runtime()

# The platform is chosen before these modules are imported.
import pyopencl as cl  # noqa: E402

from infer.compute.backends.opencl import devices, runtime  # noqa: E402
from infer.compute.backends.opencl.backend import OpenCLBackend  # noqa: E402
from steps import join  # noqa: E402

CPU = torch.device("cpu")
PLATFORM = devices.choose().platform.name
OTHER_TYPES = sorted(set(LAYOUTS) - TYPES) if IS_WHOLE else ["Q3_K", "MXFP4", "F8_E4M3"]
NUM_SLOTS = 600


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def same(call: Callable[[], tuple[Tensor, ...]]) -> bool:
    found = []
    for backend in ("cpu", ops.backend_named("opencl")):
        with ops.using(backend):
            found.append(call())
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def projected(precision: Any, *weights: Weight, bias: Tensor | None = None) -> Projection:
    """Return the weights as the active backend packs them. Types that OpenCL does not read are F16 on both."""
    stored = tuple(as_halves(weight, stored_type) for weight in weights)
    return ops.prepare(Projection(stored, bias), CPU, precision)


STORED = [(type_, "exact") for type_ in (*sorted(TYPES), *OTHER_TYPES)] + [("Q4_1", "fast"), ("Q6_K", "fast")]


@pytest.mark.slow(cases=1, rest=3)
@pytest.mark.parametrize(("type_", "precision"), STORED)
def test_a_projection_has_the_bits_of_the_cpu(type_: str, precision: str) -> None:
    """Rows do not fill a work group, and tokens do not fill a work item."""
    weight, bias, norm = make_weight(type_, 40, 512), torch.randn(40), Norm(torch.rand(512) + 0.5, 1e-5)
    for tokens in (1, 11):
        x, residual = torch.randn(tokens, 512), torch.randn(tokens, 40)

        def call(x: Tensor = x, residual: Tensor = residual) -> tuple[Tensor, ...]:
            projection = projected(precision, weight, bias=bias)
            logits = ops.head(x, torch.tensor([len(x) - 1, 0]), norm, projection, 30.0)
            added = ops.project_add(residual.clone(), Activations(x), projection, Norm(bias, 1e-6))
            rows = ops.embed(projection.parts[0], torch.tensor([0, 39, 99]), 2.0)
            return ops.norm_project(x, norm, projection).floats, logits, added, rows

        assert same(call)


@pytest.mark.skipif(
    "cl_khr_integer_dot_product" in devices.choose().extensions.split(), reason="hardware: it has them, for every test"
)
def test_products_of_four_bytes_are_the_devices_if_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is simulated that has the function, and the program that calls another name does not build."""
    weight, x = make_weight("Q5_0", 40, 512), torch.randn(5, 512)
    backend, real = OpenCLBackend(CPU, ""), runtime._text
    product = "int NAME(uint a, uint b) { uchar4 p = as_uchar4(a); char4 q = as_char4(b);"
    product = f"#define __opencl_c_integer_dot_product_input_4x8bit_packed\nint NAME(uint, uint);\n{product}"
    product += " return p.x * q.x + p.y * q.y + p.z * q.z + p.w * q.w; }\n"
    with ops.using("cpu"):
        expected = ops.norm_project(x, None, projected("exact", weight)).floats
    for name in ("dot_4x8packed_us_int", "another"):
        texts = {"common.cl": product.replace("NAME", name) + real("common.cl")}
        monkeypatch.setattr(runtime, "_text", lambda source, texts=texts: texts.get(source) or real(source))
        backend.kernels._runtime._programs.clear()
        with ops.using(backend):
            if name == "another":
                check_refused(lambda: ops.norm_project(x, None, projected("exact", weight)), "matmul.cl does not build")
            else:
                assert torch.equal(ops.norm_project(x, None, projected("exact", weight)).floats, expected)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_mlp_has_the_bits_of_the_cpu(activation: Activation) -> None:
    """Gate and up are one weight, two weights, of two types, and have rows that do not fill a group."""
    whole, half, odd = (make_weight("Q4_1", rows, 256) for rows in (128, 64, 40))
    other = make_weight("Q6_K", 64, 256)
    x = 3 * torch.randn(5, 256)
    for parts in ((whole,), (half, half), (other, half), (odd, odd)):
        assert same(lambda parts=parts: (ops.norm_gate(x, None, projected("exact", *parts), activation).floats,))


ATTENTION = [
    *((kv_type, mode, 64) for kv_type in KV_TYPES for mode in ("plain", "far")),
    *(("f16", mode, 96) for mode in ("window", "softcap", "norm")),
    *(("f32", mode, 20) for mode in ("sinks", "norm of all")),
]


@pytest.mark.slow(rest=5)
@pytest.mark.parametrize(("kv_type", "mode", "dim"), ATTENTION)
def test_attention_has_the_bits_of_the_cpu(kv_type: str, mode: str, dim: int) -> None:
    """The cached values have them as well, and the chunks of a row do not matter."""
    num_heads, kv_heads = 4, 2
    angles = 6 * torch.rand(1, NUM_SLOTS, dim // (4 if mode == "norm" else 2))
    norms = [Norm(torch.rand(dim * (count if mode == "norm of all" else 1)), 1e-6) for count in (num_heads, kv_heads)]
    q_norm, k_norm = norms if mode.startswith("norm") else (None, None)
    softcap = 20.0 if mode == "softcap" else None
    rope = RopeTable(angles.cos(), angles.sin())
    heads = Heads(num_heads, kv_heads, dim, dim**-0.5, rope, q_norm, k_norm, softcap)
    qkv = torch.randn(2, 300, (num_heads + 2 * kv_heads) * dim)

    def call() -> tuple[Tensor, ...]:
        layer = make_layer(heads, 2, NUM_SLOTS, kv_type, window=70 if mode in ("window", "sinks", "far") else None)
        if mode in ("sinks", "far"):
            pages = replace(layer.pages, sinks=torch.tensor([5, 20]), last_position=100 if mode == "far" else None)
            layer = replace(layer, pages=pages)
        attended = []
        for start, end in ((0, 290), (290, 299), (299, 300)):
            steps = join([Step.of([0] * (end - start), start, row=row) for row in range(2)])
            part = Activations(qkv[:, start:end].flatten(0, 1).contiguous())
            attended.append(ops.attend(part, heads, layer, steps).floats)
        return *attended, layer.keys, layer.values

    assert same(call)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_wrong_position_changes_no_token_that_does_not_see_it(kv_type: str) -> None:
    with ops.using(ops.backend_named("opencl")):
        check_unseen(ops.attend, kv_type, 32, Span(40, 29), [[40], [25, 5, 10]])
        check_unseen(ops.attend, kv_type, 32, Span(40, 20, window=9, sinks=2), [[40], [1] * 40])


@torch.inference_mode()
def logits_of(folder: Path, backend: str) -> Tensor:
    """Return the logits of a recorded model, in chunks of several sizes."""
    with ops.using(backend):
        model = load(folder)
    cache, pieces, start = make_reserved(model), [], 0
    captured = model.backend.capture(lambda step: model.forward(step, cache), 32, 32)
    assert captured is not None
    for size in (40, 1, 9):  # the first in two pieces
        pieces.append(captured.run(Step.of(random_ids(size), start, logit_indices=range(size))).clone())
        start += size
        cache.commit(0, size)
    return torch.cat(pieces)


@pytest.mark.slow(rest=4)
@pytest.mark.parametrize("tiny", ONE_EACH_DENSE, ids=lambda tiny: tiny.name)
def test_a_model_of_each_family_has_the_bits_of_the_cpu(tiny: Tiny, tmp_path: Path) -> None:
    make_tiny(tiny, tmp_path)
    assert torch.equal(logits_of(tmp_path, "opencl"), logits_of(tmp_path, "cpu"))


@pytest.mark.slow
def test_answers_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Answers are computed alone and together, with and without a recording, drafts, grammars and log-probabilities."""
    folder = make_model(tmp_path)
    greedy = SamplingParams(temperature=0, max_new_tokens=20)
    sampled = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=5, max_new_tokens=20, logprobs=2)
    found = []
    for device in ("cpu", "opencl"):
        llm = LLM(folder, device=device)
        results = [llm.generate("hello", greedy), llm.generate("abab abab abab", sampled, speculation="ngram")]
        results += [llm.generate("one", replace(greedy, regex="[a-d]+"), speculation="ngram")]
        results += [*llm.generate_all(["a", "bc", "a longer prompt than the others"], [greedy, sampled, greedy])]
        found.append([(result.token_ids, result.text, result.logprobs) for result in results])
    assert found[0] == found[1]
    eager = LLM(folder, device=f"opencl:{PLATFORM[:5]}", capture=False)
    assert eager.generate("hello", replace(greedy, max_new_tokens=3)).token_ids == found[0][0][0][:3]


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_the_cache_of_document_003_is_computed(kv_type: str, tmp_path: Path) -> None:
    """The example there is a command with q4 and a window."""
    make_wide_heads(tmp_path)
    typed = f"generate --model-path {tmp_path} --eviction-policy sliding --eviction-window 32 --protected-prefix 4"
    typed += " --max-seq-len 128 --num-tokens 60 --top-k 40 --repetition-penalty 1.1 --seed 1 --prompt Hello --backend"
    said = [run(*typed.split(), device, "--kv-type", kv_type).out for device in ("opencl", "cpu")]
    assert said[0] == said[1] != ""


def test_other_types_of_keys_and_values_are_refused(tmp_path: Path) -> None:
    make_wide_heads(tmp_path)
    for kv_type in ("q8", "bf16"):
        wanted = rf"kv_type must be one of f32, f16, q4 on device opencl, got {kv_type}: use one .* --device cpu"
        check_refused(lambda kv_type=kv_type: LLM(tmp_path, device="opencl", kv_type=kv_type), wanted)


def make_wide_heads(folder: Path) -> None:
    sizes = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    make_tiny(Tiny("wide heads", LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)), folder)
    write_byte_tokenizer(folder)


def test_types_that_the_kernels_do_not_read_are_f16_and_explain_names_them(tmp_path: Path) -> None:
    path = write_mixed_gguf(tmp_path / "mixed.gguf")
    stored = {part.layout.type for each in LLM(path, device="opencl").model.projections for part in each.parts}
    assert stored == TYPES - {"F32", "BF16", "Q8_0"}
    assert re.search(r"on OpenCL +Q3_K, MXFP4, Q2_K as F16\n", run("explain", path).out)


@pytest.mark.slow
def test_a_gpu_that_shares_memory_is_notified_of_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host copies the memory to itself."""
    folder, params = make_model(tmp_path), SamplingParams(temperature=0, max_new_tokens=5)
    expected = LLM(folder, device="opencl").generate("hello", params)
    monkeypatch.setattr(ops.backend_named("opencl")._memory, "_is_cpu", False)
    assert LLM(folder, device="opencl").generate("hello", params).token_ids == expected.token_ids


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World]:
    """Return one model with windows, on the CPU and on OpenCL."""
    on_cpu = make_world("windows", tmp_path_factory.mktemp("cpu"))
    with ops.using("opencl"):
        return on_cpu, make_world("windows", tmp_path_factory.mktemp("opencl"))


@pytest.mark.slow(cases=1, rest=3)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_an_answer_does_not_depend_on_the_way(drafts: Drafts, worlds: tuple[World, World]) -> None:
    """Samplers, grammars and log-probabilities are each tried with drafts of every kind and with neighbours."""
    on_cpu, on_opencl = worlds
    way, cases = Way(drafts, chunk=7, chain=8), CASES[DRAFTS.index(drafts) :: 12]
    expected = all_by_definition(on_cpu, cases)
    found = run_batch(on_opencl, cases, way, 3, [outcome.token_ids for outcome in expected])
    assert [Outcome.of(result) for result in found] == expected


def test_a_device_that_is_not_there_is_one_line_with_those_that_are() -> None:
    with pytest.raises(InvalidRequestError, match=rf"opencl:nothing: no such device; there are: {re.escape(PLATFORM)}"):
        ops.backend_named("opencl:nothing")


def test_no_platform_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "all_devices", list)
    check_refused(lambda: devices.choose(), r"no OpenCL platform is installed: install .* or use --device cpu")


def test_without_pyopencl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.compute.ops.device.find_spec", lambda name: None)
    check_refused(lambda: ops.backend_named("opencl:other"), r"run pip install '\.\[opencl\]' in the clone of infer")
    assert ops.opencl_devices() == []


def pretend(platform: str, **facts: Any) -> Mock:
    """Return a device of PoCL that claims another platform and other properties."""
    real = devices.choose()
    usual = {name: getattr(real, name) for name in ("name", "available", "compiler_available", "profile")}
    usual |= {"endian_little": True, "max_work_group_size": 64, "type": cl.device_type.CPU}
    device = Mock(spec=type(real), platform=SimpleNamespace(name=platform))
    device.configure_mock(**usual | facts)
    return device


UNUSABLE = {"endian_little": (False, "is big-endian"), "profile": ("EMBEDDED_PROFILE", "without 64-bit integers")}
UNUSABLE |= {"compiler_available": (False, "has no compiler"), "max_work_group_size": (32, "groups of 32 items")}


@pytest.mark.parametrize("fact", UNUSABLE)
def test_an_unusable_device_is_refused(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, words = UNUSABLE[fact]
    refused = pretend("Clover", **{fact: value})
    monkeypatch.setattr(devices, "all_devices", lambda: [refused])
    check_refused(lambda: devices.choose(), f"Clover: .* {words}.*: use another device, or --device cpu")
    assert words in devices.describe()[0]


def test_a_name_means_a_platform_first_and_then_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first usable device is taken, a GPU before a CPU."""
    found = [pretend("Rusticl", available=False), pretend("Portable Computing Language", name="pthread-Intel(R) Xeon")]
    found += [pretend("Intel(R) OpenCL", name="Intel(R) Xeon")]
    found += [pretend("QUALCOMM Snapdragon(TM)", name="QUALCOMM Adreno(TM)", type=cl.device_type.GPU)]
    monkeypatch.setattr(devices, "all_devices", lambda: found)
    chosen = [found.index(devices.choose(name)) for name in ("", "pocl", "PORTABLE", "intel", "adreno", "xeon")]
    assert chosen == [3, 1, 1, 2, 3, 1]


def test_a_simulator_is_only_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oclgrind calls itself a GPU as well, and its SiLU is wrong."""
    simulator = pretend("Oclgrind", name="Oclgrind Simulator", type=cl.device_type.GPU | cl.device_type.CPU)
    runtime_for_cpus = pretend("Portable Computing Language")
    monkeypatch.setattr(devices, "all_devices", lambda: [simulator, runtime_for_cpus])
    assert devices.choose() is runtime_for_cpus
    assert devices.choose("oclgrind") is devices.choose("simulator") is simulator
    monkeypatch.setattr(devices, "all_devices", lambda: [simulator])
    check_refused(lambda: devices.choose(), r"only a simulator .*Oclgrind.* \(--device opencl:oclgrind\)")


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("wrong", ["0.5f / (1.0f", "NAN / (1.0f"])
def test_a_device_that_computes_a_known_product_wrongly_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN differs as well, and the right values are taken."""
    real = runtime._text
    OpenCLBackend(CPU, "")
    monkeypatch.setattr(runtime, "_text", lambda source: real(source).replace("1.0f / (1.0f", wrong))
    wanted = rf"^device opencl: {re.escape(PLATFORM)}.* a known product wrongly .* --device cpu$"
    check_refused(lambda: OpenCLBackend(CPU, ""), wanted)


def test_a_runtime_that_does_not_know_the_cpu_is_one_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "clBuildProgram failed: BUILD_PROGRAM_FAILURE\n\nBuild on x:\n\nerror: unknown target CPU 'generic'\n"
    monkeypatch.setattr(cl.Program, "build", Mock(side_effect=cl.RuntimeError(said)))
    wanted = r"does not know this CPU.*'generic'.*opencl:intel.*cpu$"
    check_refused(lambda: OpenCLBackend(CPU, ""), wanted)


def test_a_kernel_that_does_not_build_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runtime.Runtime(devices.choose())
    monkeypatch.setattr(runtime, "_text", lambda source: "kernel void broken(global wrong *x) {}")
    wanted = rf"rows.cl does not build on {re.escape(PLATFORM)}.*wrong"
    check_refused(lambda: made.kernel("rows.cl", "broken", {}), wanted)


def test_a_buffer_larger_than_the_device_takes_is_refused() -> None:
    made = runtime.Runtime(devices.choose())
    made.memory.most_bytes = 1000
    with pytest.raises(InvalidRequestError, match=r"has room for 0 MB in one piece, and 0\.0 MB are needed"):
        made.memory.zeros((1000,), torch.float32)


def test_devices_are_listed() -> None:
    for arguments in (["models", "-v"], ["--version", "-v"]):
        shown = CliRunner().invoke(infer, arguments)
        assert shown.exit_code == 0
        assert f"opencl: {PLATFORM}: " in shown.output
