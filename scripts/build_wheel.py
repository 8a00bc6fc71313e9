"""Build a wheel for Linux on x86-64 that has compiled kernels, so that a first answer compiles nothing.

    python scripts/build_wheel.py                   write dist/infer_engine-…-manylinux_2_31_x86_64.whl: minutes
    python scripts/build_wheel.py --sets avx2       with kernels of some instruction sets only
    python scripts/build_wheel.py --out FOLDER      to another folder

The wheel is the pure one, and a package with the images of kernels: one file for each instruction set and each way in
which cores read memory. They are made from the sources in the wheel, for named features of processors, on any machine
with x86-64. Two builds have the same bytes if Python, Numba and LLVM are the same.
"""

import argparse
import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from check_wheel import build_wheel, tracked_files

ROOT = Path(__file__).parents[1]
TAG = "py3-none-manylinux_2_31_x86_64"  # as llguidance's wheels
PACKAGE = "infer/compute/backends/kernel_images"
TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0", "F16", "BF16", "F32")
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = (  # of networks that have the kernels of SmolLM2, Qwen2.5, Gemma 3 and MiniLM
    {"model_type": "llama", "rms_norm_eps": 1e-5, **_SIZES, **_HEADS},
    {"model_type": "gemma3_text", "head_dim": 32, "rms_norm_eps": 1e-6, **_SIZES, **_HEADS},
    {"model_type": "bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", **_SIZES, **_HEADS},
)
_V3 = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vbmi", "avx512vnni")
_TABLE = '''"""Images of kernels, made by `make wheel`. `shipped_kernels` reads them."""

SOURCES = {sources!r}
FILES = {files!r}  # by name: the features that the file needs, and its digest
'''


class Target(NamedTuple):
    """LLVM's names of a processor and of its features, and the cores whose way of reading memory is compiled in."""

    cpu: str
    features: tuple[str, ...]
    cores: dict[str, str]  # by the name of the way: a core that reads so


TARGETS = {
    "avx2": Target("x86-64-v3", _V3, {"two": "haswell", "near": "znver3"}),
    "avxvnni": Target("x86-64-v3", (*_V3, "avxvnni"), {"two": "alderlake"}),
    "avx512vnni": Target("x86-64-v4", _V4, {"two": "icelake-server", "near": "znver4", "far": "znver5"}),
    "avx512bf16": Target("x86-64-v4", (*_V4, "avx512bf16"), {"two": "cooperlake", "near": "znver4", "far": "znver5"}),
    "amx": Target("x86-64-v4", (*_V4, "amx-tile", "amx-int8"), {"two": "sapphirerapids"}),
}


def kernels(isa_name: str) -> Iterator[Any]:
    """Yield the kernels of `CONFIGS` for each type of weights, and once for a layer of two types."""
    from infer.compute.backends.cpu.compile.kernel import Kernel
    from infer.compute.backends.cpu.isa import BY_NAME
    from infer.compute.backends.cpu.needed_kernels import needed_kernels
    from infer.compute.operands.architecture import ModelOutline
    from infer.models.families import make_architecture
    from infer.models.tensors import expected_shapes

    for config in CONFIGS:
        architecture = make_architecture(config)
        kv_type = "f32" if architecture.reads_whole_texts else "f16"
        for type_ in TYPES:
            types = dict.fromkeys(
                (name for name, shape in expected_shapes(architecture).items() if len(shape) > 1), type_
            )
            yield from needed_kernels(ModelOutline(architecture, types, kv_type, "exact"), BY_NAME[isa_name])
    yield Kernel(".matmul.matmul:make_store", ("silu",), "EPILOGUE")


def compile_images(isa_name: str, path: Path) -> None:
    """Write the images of a set to a folder: a file for each way of reading memory. Only products differ by it."""
    from infer.compute.backends.cpu import weight_streams
    from infer.compute.backends.cpu.compile.compiler import compile_command
    from infer.compute.backends.cpu.compile.kernel import records_by_name
    from infer.compute.backends.cpu.compile.linked_code import try_make

    needed, images = dict.fromkeys(kernels(isa_name)), dict[str, bytes]()
    for way, core in TARGETS[isa_name].cores.items():
        weight_streams._core_name = lambda core=core: core
        weight_streams.most_by_one_stream.cache_clear()
        weight_streams.prefers_near.cache_clear()
        for kernel in needed:
            if kernel.file_name in images and not kernel.maker.startswith(".matmul.matmul:make_matmul"):
                continue
            made = compile_command(kernel.label, kernel.make, records_by_name()[kernel.record])
            image = try_make(made.object_code or b"", made.symbol)
            assert image is not None, f"{kernel.label} cannot be stored"
            images[kernel.file_name] = image
        (path / f"{isa_name}-{way}.images").write_bytes(joined(images))


def joined(images: Mapping[str, bytes]) -> bytes:
    """Return the file of images: a line of JSON with the name, start and size of each one, and their bytes."""
    places, rest = list[tuple[str, int, int]](), b""
    for name, image in sorted(images.items()):
        places.append((name, len(rest), len(image)))
        rest += image
    return json.dumps(places).encode() + b"\n" + rest


def run_compiler(isa_name: str, unpacked: Path, out: Path) -> None:
    """Compile a set from the sources of the wheel, in a process of its own, whose Numba knows no other features."""
    target = TARGETS[isa_name]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "INFER_"))}
    environment |= {
        "NUMBA_CPU_NAME": target.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in target.features),
    }
    environment |= {"PYTHONPATH": str(unpacked), "PYTHONHASHSEED": "0", "INFER_CACHE": str(out / f"cache-{isa_name}")}
    command = [sys.executable, str(Path(__file__).resolve()), "--compile", isa_name, "--out", str(out)]
    subprocess.run(command, check=True, env=environment, cwd=out)


def add_images(pure: Path, unpacked: Path, images: Path, folder: Path) -> Path:
    """Write the wheel with the images of a folder. No time, owner or order of the build is in it."""
    code = "from infer.compute.backends.cpu.host.kernel_cache import sources_digest; print(sources_digest())"
    run = [sys.executable, "-c", code]
    digest = subprocess.run(
        run, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(unpacked)}
    )
    contents = {path.name: path.read_bytes() for path in sorted(images.glob("*.images"))}
    files = {}
    for name, content in contents.items():
        features = TARGETS[name.partition("-")[0]].features
        files[name.removesuffix(".images")] = features, hashlib.sha256(content).hexdigest()
    contents["__init__.py"] = _TABLE.format(sources=digest.stdout.strip(), files=files).encode()
    with zipfile.ZipFile(pure) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    members |= {f"{PACKAGE}/{name}": content for name, content in contents.items()}
    wheel = record.replace("RECORD", "WHEEL")
    members[wheel] = members[wheel].replace(b"py3-none-any", TAG.encode()).replace(b"purelib: true", b"purelib: false")
    members[record] = "".join([*map(record_line, members, members.values()), f"{record},,\n"]).encode()
    path = folder / pure.name.replace("py3-none-any", TAG)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, members[name])
    return path


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--compile", choices=TARGETS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile is not None:
        compile_images(options.compile, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        (images := folder / "images").mkdir()
        pure = build_wheel(tracked_files(), folder)
        zipfile.ZipFile(pure).extractall(folder / "unpacked")
        list(pool.map(lambda each: run_compiler(each, folder / "unpacked", images), options.sets))
        wheel = add_images(pure, folder / "unpacked", images, options.out)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, with kernels for {', '.join(options.sets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
