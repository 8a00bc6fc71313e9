"""Runs every OpenCL kernel once in Oclgrind, which reports accesses out of bounds and races. It is a separate program.

python tests/helpers/opencl_checked.py            nothing is reported
python tests/helpers/opencl_checked.py bounds     a kernel that writes past its buffer is added; `race` adds a race
"""

# ruff: noqa: E402  # the platform is chosen before pyopencl is imported

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests/compute/backends"))
os.environ |= {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_MAX_ERRORS": "10", "PYOPENCL_NO_CACHE": "1"}

import opencl_platform

opencl_platform.use_oclgrind()

from infer.compute import ops
from infer.compute.backends.opencl import backend as opencl_backend
from infer.compute.backends.opencl import runtime
from infer.compute.backends.opencl.launches import scope
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, Projection, RopeTable
from layer_caches import make_layer
from steps import join
from test_cpu_kernels import make_weight

CPU = torch.device("cpu")
PLANTED = {
    "bounds": "kernel void planted(global float *x) { x[get_global_id(1) + 1] = 1.0f; }",
    "race": "kernel void planted(global float *x) { x[get_global_id(0) / 2 % 4] += 1.0f; }",
}


def check_projections(type_: str, precision: ops.Precision) -> None:
    """Run products whose rows do not fill a group, with fewer tokens than a work item takes."""
    weight, x, norm = make_weight(type_, 40, 256), torch.randn(3, 256), Norm(torch.rand(256), 1e-5)
    projection = ops.prepare(Projection((weight,), torch.zeros(40)), CPU, precision)
    ops.embed(projection.parts[0], torch.tensor([0, 39]), 1.0)
    ops.head(x, torch.tensor([2]), norm, projection, 30.0)
    ops.project_add(torch.zeros(3, 40), Activations(x), projection, Norm(torch.rand(40), 1e-5))
    for parts in ((weight, weight), (weight, make_weight("F16", 40, 256))):
        ops.norm_gate(x, norm, ops.prepare(Projection(parts), CPU, precision), "gelu")


def check_attention(kv_type: str, dim: int) -> None:
    """Run attention with windows, sinks and their separate queries, in two chunks, page by page."""
    angles = torch.rand(1, 64, dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    heads = Heads(2, 1, dim, 1.0, rope, Norm(torch.rand(dim), 1e-5), Norm(torch.rand(dim), 1e-5), 20.0)
    layer = make_layer(heads, 2, 300, kv_type, window=20)
    pages = replace(layer.pages, sinks=torch.tensor([3, 17]), last_position=30, shifts=torch.tensor([0, 0]))
    for start, count in ((0, 3), (30, 2)):
        step = join([Step.of([0] * count, start, row=row) for row in range(2)])
        ops.attend(Activations(torch.randn(2 * count, 4 * dim)), heads, replace(layer, pages=pages), step)


def main(planted: str | None) -> None:
    opencl_backend.check_known_product = lambda *_: None  # Oclgrind's SiLU is wrong; its reports are not
    backend = ops.backend_named("opencl:oclgrind")
    made = backend.kernels._runtime
    if planted is not None:
        real = runtime._text
        runtime._text = lambda source: real(source) + (PLANTED[planted] if source == "rows.cl" else "")
        with scope(made, 4) as run:
            run.launch("rows.cl", "planted", 1 if planted == "bounds" else 4, [torch.zeros(4)])
        return
    with ops.using(backend):
        for type_, precision in (("Q4_1", "exact"), ("Q6_K", "fast"), ("IQ4_XS", "exact"), ("BF16", "exact")):
            check_projections(type_, precision)
        for kv_type, dim in (("f32", 20), ("f16", 32), ("q4", 32)):
            check_attention(kv_type, dim)


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
