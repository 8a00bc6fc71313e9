"""Machine code that LLVM makes of a module, for this machine or for others."""

import ctypes

import llvmlite.binding as llvm

from infer.compute.backends.cpu.isa import target_features


def optimised_assembly(text: str, triple: str, cpu: str) -> str:
    """Return the assembly that LLVM makes of a module for a CPU."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


def call_native(text: str, name: str, *arguments: int) -> None:
    """Compile a module for this machine, and call a function of it whose arguments are integers of 64 bits."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = ",".join(f"+{feature}" for feature in sorted(target_features()))
    machine = llvm.Target.from_default_triple().create_target_machine(features=features)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(engine.get_function_address(name))(*arguments)
