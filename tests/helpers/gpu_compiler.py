"""Compiles kernels for GPUs, which needs no GPU: those of the sampler and those that read weights."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from infer.compute.backends.cuda.activations import NUM_PLANES, Quantized, RowNorm, normalize_rows, quantize_rows
from infer.compute.backends.cuda.blocks import Matrix, constants_of
from infer.compute.backends.cuda.dense import DEPTHS, TILES, DenseTile, dense, num_stages
from infer.compute.backends.cuda.embed import embed_floats, embed_rows
from infer.compute.backends.cuda.epilogue import Output
from infer.compute.backends.cuda.layouts import LAYOUTS, Layout
from infer.compute.backends.cuda.matmul import MAX_LANES, matmul, matvec, multiply_few_rows
from infer.compute.backends.cuda.projection import BLOCK_TILE, FEW_ROWS_TILES, FORMS, MATVEC_TILE, matmul_tile
from infer.compute.backends.cuda.sampling import filters, logprobs, unfiltered
from infer.compute.backends.cuda.sampling.kernel_arguments import Batch
from infer.compute.backends.cuda.sampling.logprobs import BlockParts, Found
from infer.compute.backends.cuda.sampling.sampler import EXACT, tiling_of
from infer.compute.quantization.ggml_types import BLOCK_FIELDS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
QUANTIZED = [name for name, layout in LAYOUTS.items() if not layout.is_float]
LEFT = Quantized("*i8!", "*fp32!", "*i32!")
SHARED_BYTES: dict[str | int, int] = {80: 166_912, 89: 101_376, 90: 232_448, 120: 101_376}  # of a program at most
AMD = ("gfx942", "gfx1100")
TARGETS = (80, 89, 90, 120)
INSTRUCTION = re.compile(r"\s+(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)+)")  # of PTX
LABEL, BRANCH = re.compile(r"\$(L__BB\w+):"), re.compile(r"\bbra(?:\.uni)?\s+\$(L__BB\w+)")
LISTED = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")


def compiled(
    kernel: triton.JITFunction, arguments: dict[str, Any], target: str | int = 90, num_warps: int = 4, **options: Any
) -> CompiledKernel:
    """Compile a kernel. `arguments` has Triton's names of types, constants, and tuples of both.

    A pointer or a size whose type ends with "!" is a multiple of 16.
    """
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(argument: Any, path: tuple[int, ...]) -> Any:
        if isinstance(argument, tuple):
            return type(argument)(*(type_of(each, (*path, i)) for i, each in enumerate(argument)))
        if not isinstance(argument, str):
            constants[path] = argument.value if isinstance(argument, tl.constexpr) else argument
            return "constexpr"
        if argument.endswith("!"):
            attributes[path] = [["tt.divisibility", 16]]
        return argument.removesuffix("!")

    signature = {name: type_of(arguments[name], (i,)) for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    gpu = GPUTarget("cuda", target, 32)
    if isinstance(target, str):
        gpu = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    return triton.compile(source, target=gpu, options={"num_warps": num_warps, **EXACT, **options})


def code_of(kernel: CompiledKernel, *, is_listed: bool = False) -> dict[str, Any]:
    """Return resources, and counts of PTX instructions: of the whole kernel, and of its shortest loop that multiplies.

    With `is_listed`, also count the device's own instructions, which takes half a second.
    """
    usage, *listing = cuobjdump(kernel, "--dump-resource-usage", *(["-sass"] if is_listed else []))
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    lines = kernel.asm["ptx"].splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := LABEL.match(line))}
    branches = [(labels[found[1]], at) for at, line in enumerate(lines) if (found := BRANCH.search(line))]
    instructions = [(at, found[1]) for at, line in enumerate(lines) if (found := INSTRUCTION.match(line))]
    products = [at for at, name in instructions if re.match(r"dp4a|mma|wgmma\.mma|fma\.rn\.f32", name)]
    loops = [(first, last) for first, last in branches if any(first <= at < last for at in products)]
    inner = min(loops, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    return {
        "registers": int(resources["REG"]),
        "spilled": int(resources["STACK"]) + int(resources["LOCAL"]),
        "instructions": Counter(name for _, name in instructions),
        "loop": Counter(name for at, name in instructions if inner[0] <= at < inner[1]),
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "has_wide_offsets": has_wide_offsets(kernel.asm["ttir"]),
        "listed": Counter(LISTED.findall("".join(listing))),
    }


def cuobjdump(kernel: CompiledKernel, *flags: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        for flag in flags:
            command = [TOOLS / "cuobjdump", flag, file.name]
            yield subprocess.run(command, capture_output=True, text=True, check=True).stdout


def has_wide_offsets(code: str) -> bool:
    """Return True if every address is an argument plus a 64-bit offset. Offsets of a norm's weights may be shorter."""
    wide, bases = set(), dict[str, str]()
    for line in code.splitlines():  # a name may have another meaning after a loop
        if step := re.search(r"(%\w+) = tt\.(addptr|splat|broadcast|expand_dims|bitcast|reshape) (%\w+)(.*)", line):
            name, operation, source, types = step.groups()
            bases[name] = bases.get(source, source)
            wide.discard(name)
            if source in wide or (operation == "addptr" and re.search(r"i64>?\s*(?:loc|$)", types)):
                wide.add(name)
        elif arguments := re.search(r"scf\.for .*iter_args\((.*?)\)", line):
            wide |= {own for own, first in re.findall(r"(%\w+) = (%\w+)", arguments[1]) if first in wide}
        elif access := re.search(r"tt\.(?:load|store) (%\w+)", line):
            pointer = access[1]
            if pointer not in wide and bases.get(pointer) != "%norm":
                return False
    return True


def sampler_code() -> Iterator[tuple[str, str]]:
    tiling = tiling_of(128_256)
    found, parts = Found("*i64", "*fp32", "*fp32", "*i32"), BlockParts("*i64", "*i32", "*i32", "*i32")
    kernels = [(unfiltered.score_blocks, tiling.num_warps, "*bf16", 2), (unfiltered.choose_plain, 4, "*fp32", 0)]
    kernels += [(filters.weigh_blocks, tiling.num_warps, "*fp16", 1)]
    kernels += [(filters.choose_filtered, tiling.filter_warps, "*fp32", 0), (logprobs.weigh_scores, 8, "*fp32", 2)]
    kernels += [(logprobs.join_scores, 4, "*fp32", 2)]
    for kernel, num_warps, logits, edits in kernels:
        batch = Batch(
            logits=logits, row_stride="i32", vocab_size="i32", fields="*i64", positions="*i64", allowed="*i32",
            allowed_stride="i32", masks="*i32", num_words="i32", bias_ids="*i64", biases="*fp64", end_ids="*i64",
            last="*i32", counts="*i32", lengths="*i64", drafts="*i64",
        )  # fmt: skip
        arguments = {
            "batch": batch, "scores": "*fp32", "score_ids": "*i32", "largests": "*fp32", "maxima": "*i32",
            "sums": "*i64", "gathered": "*i32", "token_ids": "*i64", "num_blocks": "i32", "raw_largests": "*fp32",
            "ends": "*i32", "found": found, "parts": parts, "words": "*i64", "done": "*i64", "MOST": 32,
            "BLOCK": tiling.block, "BLOCKS": 32, "CHUNK": tiling.chunk, "CHUNKS": 8192,
            "CAPACITY": tiling.capacity, "EDITS": edits, "FILTERS": True, "LOGPROBS": True,
        }  # fmt: skip
        yield kernel.__name__, str(compiled(kernel, arguments, num_warps=num_warps).asm["ptx"])


def matrix_of(type_: str, unit: str) -> Matrix:
    scale, above = scale_types(type_)
    return Matrix(unit, unit, scale, scale, above, "i32", **constants_of(LAYOUTS[type_]))


def scale_types(type_: str) -> tuple[str, str]:
    """Return the types of the scales of blocks, and of the scales of these scales."""
    scale = {"MXFP4": "*bf16!", "NVFP4": "*fp16!"}.get(type_, "*i8!" if LAYOUTS[type_].scales_per_block else "*fp16!")
    return scale, "*fp16!" if BLOCK_FIELDS[type_].factor == 1 else "*fp32!"


def one_each() -> list[str]:
    """Return one type per kernel code. Types that differ only in their table have the same code."""
    return [*{constants_without_table(name): name for name in QUANTIZED}.values()]


def constants_without_table(type_: str) -> Layout:
    """Return the constants with which kernels are compiled for a layout, without the values of its table."""
    return replace(LAYOUTS[type_], type="", table=LAYOUTS[type_].table and (0,))


def quantized_arguments(type_: str, unit: str, activations: str, gate: str) -> dict[str, Any]:
    is_gated, alone = gate != "", "" if gate else "gelu"
    flags = map(tl.constexpr, (is_gated, not is_gated, is_gated, alone))
    return {
        "x": Quantized(activations, "*fp32!", "*i32!"), "matrix": matrix_of(type_, unit), "num_tokens": "i32",
        "left": LEFT, "LEAVES": is_gated,
        "y": Output("*fp32!", "i32", "i32", "*fp32", "fp32", *flags, "*fp32"),
        "PLANES": 2, "LANES": MAX_LANES, "GATE": tl.constexpr(gate),
    }  # fmt: skip


def matvec_code(type_: str, target: str | int, gate: str = "") -> CompiledKernel:
    arguments = quantized_arguments(type_, "*i32!", "*i32!", gate) | {"DP4A": isinstance(target, int)}
    tile = BLOCK_TILE if gate else MATVEC_TILE
    return compiled(matvec, arguments | tile, target, **warps_of(tile))


def matmul_code(type_: str, target: str | int, gate: str = "") -> CompiledKernel:
    tile = matmul_tile(LAYOUTS[type_], 64, gate)
    arguments = quantized_arguments(type_, "*u8!", "*i8!", gate) | {"DP4A": isinstance(target, int)} | tile
    return compiled(matmul, arguments, target, **warps_of(tile))


def dense_code(type_: str, target: str | int, gate: str = "", size: int = -1) -> CompiledKernel:
    """Return the code of a product with dense weights. `size` is the index of the tile in `TILES`."""
    form, shared_bytes = FORMS[type_], SHARED_BYTES.get(target, 65_536)
    tile: DenseTile = TILES[form][size]
    planes = {"F32": "*fp32!", "F16": "*fp16!", "BF16": "*bf16!"}[type_]
    forms = Quantized(planes, "*fp32!" if type_ == "F16" else planes, planes)
    arguments = quantized_arguments("Q8_0", "*i32", "*i32", gate) | {
        "x": forms, "left": forms, "codes": planes, "num_inputs": "i32!", "num_blocks": "i32!",
        "PLANES": form, "NUM_PLANES": NUM_PLANES[form], "TOKENS": tile.TOKENS, "ROWS": tile.ROWS,
        "DEPTH": DEPTHS[form], "IS_WHOLE": True, "LEAVES": gate != "" and form > 0,
    }  # fmt: skip
    stages = num_stages(tile, form, shared_bytes)
    return compiled(dense, arguments, target, num_warps=tile.num_warps, num_stages=stages)


def few_rows_code(number: int, target: str | int) -> CompiledKernel:
    """Return the code of a router's product for few tokens (0) or many (1)."""
    arguments = quantized_arguments("Q8_0", "*i32", "*i32", "") | dict.fromkeys(("x", "weights"), "*fp32!")
    arguments |= {"num_inputs": "i32!"} | FEW_ROWS_TILES[number]
    return compiled(multiply_few_rows, arguments, target, num_warps=FEW_ROWS_TILES[number]["num_warps"])


def rows_code(type_: str, target: str | int, gate: str = "") -> Iterator[CompiledKernel]:
    norm = RowNorm("*fp32!", "*fp32!", "fp32", *map(tl.constexpr, (True, True, True)))
    arguments = {
        "x": "*fp32!", "y": "*fp32!", "indices": "*i64!", "norm": norm, "to": LEFT, "features": "i32!",
        "matrix": matrix_of(type_, "*u8!"), "token_ids": "*i64!", "scale": "fp32", "table": "*bf16!",
        "SIZE": 1024, "HAS_INDICES": True, "HAS_NORM": True, "PLANES": 2, "BLOCKS": 32,
    }  # fmt: skip
    for kernel in (quantize_rows, normalize_rows, embed_rows, embed_floats):
        yield compiled(kernel, arguments, target)


def warps_of(tile: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in tile.items() if name.startswith("num_")}


def weights_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield products for every architecture if `is_whole`, else each product for two of them."""
    makers: list[tuple[Callable[..., CompiledKernel], list[str], list[str], tuple[int, ...]]] = [
        (matvec_code, QUANTIZED if is_whole else one_each()[::3], ["Q4_0"], (90, 120)),
        (matmul_code, QUANTIZED if is_whole else ["Q6_K"], ["Q4_0"], (80, 90)),
        (dense_code, ["F32", "F16"], ["BF16"], (89, 90)),
    ]
    for make, types_on_90, types, two_targets in makers:
        name = make.__name__.removesuffix("_code")
        for target in TARGETS if is_whole else two_targets:
            for type_ in dict.fromkeys([*types, *types_on_90] if target == 90 or is_whole else types):
                is_listed = type_ == types[0] and target == 90
                yield f"{name} {type_} {target}", code_of(make(type_, target), is_listed=is_listed)
        yield f"{name} gated 90", code_of(make(types[0], 90, "silu"))
        for target in AMD if is_whole else AMD[:1]:
            make(types[0], target)
    for type_ in ("BF16", "F16"):
        for size, tile in enumerate(TILES[FORMS[type_]][:-1]):
            for target in TARGETS if is_whole else (90,):
                name = f"dense {type_} {tile.ROWS} {tile.TOKENS} gated {target}"
                yield name, code_of(dense_code(type_, target, "silu", size))
    for number, target in product((0, 1), TARGETS if is_whole else (90,)):
        yield f"few rows {number} {target}", code_of(few_rows_code(number, target))
    for kernel in rows_code("Q6_K", 90):
        yield kernel.metadata.name, code_of(kernel)
