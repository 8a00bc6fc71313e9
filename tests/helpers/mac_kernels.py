"""Compile the CPU kernels for a Mac with Apple's processors, on any machine, and print which functions they call.

    python tests/helpers/mac_kernels.py            the kernels of one tiny model, and those that call the system
    python tests/helpers/mac_kernels.py all        those of all tiny models, weights and histories

LLVM makes object files for arm64-apple-darwin, which nothing here can run. The output is a line of JSON: the number of
kernels, and for each function that is not in a kernel itself the first kernel that calls it.
"""

import json
import platform
import struct
import sys
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import llvmlite.binding as llvm

from infer.compute.backends.cpu import isa, needed_kernels
from infer.compute.backends.cpu.compile import compiler
from infer.compute.backends.cpu.compile.kernel import Kernel, records_by_name
from infer.compute.backends.cpu.host import host_features, kernel_cache
from infer.compute.backends.cpu.layouts import LAYOUTS, PLANES
from infer.compute.backends.cpu.threads import atomics
from infer.compute.operands.architecture import ModelOutline
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.models.families import make_architecture
from infer.models.tensors import expected_shapes
from tiny import TINY

TRIPLE, CPU = "arm64-apple-darwin", "apple-m2"
SETS = {"neon": frozenset({"neon", "dotprod", "fullfp16"}), "i8mm": frozenset({"neon", "dotprod", "fullfp16", "i8mm"})}
FEW_TYPES = ("Q4_K", "F16")
_MACH_O, _SYMBOL_TABLE, _UNDEFINED_KIND, _KIND_MASK = 0xFEEDFACF, 2, 0, 0x0E


class MacCodegen(compiler._Codegen):
    """Numba's code generation with a Mac as its target. Objects are kept, and never loaded."""

    def _init(self, module: Any) -> None:
        super()._init(module)
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(TRIPLE)
        self._tm = target.create_target_machine(cpu=CPU, reloc="pic", codemodel="default", opt=3)
        self._data_layout = str(self._tm.target_data)

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = TRIPLE
        return module

    def _add_module(self, module: Any) -> None:
        pass


def undefined_symbols(code: bytes) -> set[str]:
    """Return the names that an object file in Apple's format needs from elsewhere, without their underscores."""
    magic, _, _, _, num_commands, _, _, _ = struct.unpack_from("<8I", code)
    assert magic == _MACH_O
    at, found = 32, set[str]()
    for _ in range(num_commands):
        command, size = struct.unpack_from("<2I", code, at)
        if command == _SYMBOL_TABLE:
            symbols_at, count, names_at, _ = struct.unpack_from("<4I", code, at + 8)
            for index in range(count):
                name, kind, _, _, value = struct.unpack_from("<IBBHQ", code, symbols_at + 16 * index)
                if kind & _KIND_MASK == _UNDEFINED_KIND and not value:  # with a value, it is a common symbol
                    start = names_at + name
                    found.add(code[start : code.index(b"\0", start)].decode().removeprefix("_"))
        at += size
    return found


def kernels(*, is_whole: bool) -> Iterator[tuple[Kernel, str]]:
    """Yield kernels, and the set of features that each one is compiled for."""
    yield Kernel(".weights.embed:make_embed_from_file", ("F16",), "EMBED_FROM_FILE"), "neon"
    kv_types = KV_TYPES if is_whole else KV_TYPES[:1]
    settings = zip(cycle(FEW_TYPES), cycle(kv_types), cycle(PLANES), cycle(SETS), strict=False)
    for tiny, (type_, kv_type, precision, set_name) in zip(TINY if is_whole else TINY[:1], settings, strict=False):
        architecture = make_architecture(tiny.config.to_dict())
        types = {name: type_ if len(shape) > 1 else "F32" for name, shape in expected_shapes(architecture).items()}
        outline = ModelOutline(architecture, types, kv_type, precision)
        for kernel in needed_kernels.needed_kernels(outline, isa.BY_NAME[set_name]):
            yield kernel, set_name
    for kv_type in kv_types:
        yield from ((kernel, "neon") for kernel in needed_kernels.kernels_of_cache(kv_type))
    for type_, set_name in product(LAYOUTS, SETS) if is_whole else ():
        yield Kernel(".weights.embed:make_embed", (type_, isa.BY_NAME[set_name].inputs), "EMBED"), set_name
        yield Kernel(".weights.pack_kernels:make_pack", (type_, isa.BY_NAME[set_name].inputs), "PACK"), set_name
        for planes in PLANES.values():
            yield Kernel(".matmul.matmul:make_matmul", (type_, planes, set_name), "MATMUL"), set_name


def use(set_name: str) -> None:
    """Let the kernels see the features of a set. Kernels that were compiled before are not stored."""
    host_features.target_features = lambda: SETS[set_name]
    isa.target_features.cache_clear()


def main(*, is_whole: bool) -> None:
    objects = list[bytes]()

    def keep(library: Any) -> None:
        objects.append(compiler._codegen()._tm.emit_object(library._final_module))

    platform.machine = lambda: "arm64"
    vars(atomics).update(_IS_MACOS=True, _CLOCK=8, _FUTEX=None, _WAITS_ON_ADDRESSES=True)
    kernel_cache.read, kernel_cache.write = lambda name: None, lambda name, content: None
    compiler.arm_features = frozenset
    compiler._Codegen = MacCodegen
    compiler._Library._finalize_specific = keep
    compiler._Library.get_pointer_to_function = lambda self, name: int(self._ensure_finalized() is None)
    compiler._Library.serialize_using_object_code = lambda self: (None, None, (objects[-1], None))
    needed = dict(kernels(is_whole=is_whole))
    found = dict[str, str]()
    for kernel, set_name in needed.items():
        use(set_name)
        compiler.compile_command(kernel.label, kernel.make, records_by_name()[kernel.record])
        for name in undefined_symbols(objects[-1]):
            found.setdefault(name, kernel.label)
    print(json.dumps({"kernels": len(needed), "undefined": found}))


if __name__ == "__main__":
    main(is_whole="all" in sys.argv[1:])
