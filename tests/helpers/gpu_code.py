"""Prints as JSON what the tests ask of the kernels' code: PTX of the sampler, for an H100 or H200; the tensor cores'
instructions in the tiles that `check_gpu` compares; of the others registers, spills and instructions.

    python gpu_code.py          for some types and sizes
    python gpu_code.py all      for every type, size and architecture

It is a separate program, because in the tests' process Triton interprets kernels.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_compiler import compiled, sampler_code, weights_code
from gpu_step_kernels import step_code

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_sums import DTYPES, TILES, tile_products

PRODUCT = re.compile(r"(w?g?mma)\.(?:mma_async\.)?sync\.aligned\.(?:row\.col\.)?(m\d+n\d+k\d+)")  # of PTX
POINTERS = {"bf16": "*bf16!", "f16": "*fp16!", "tf32": "*fp32!"}


def sums_code(is_whole: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the instructions that multiply, for each type and tile of `gpu_sums`; some of them unless `is_whole`."""
    for name in DTYPES:
        for rows, tokens in TILES if is_whole else ((64, 16), (64, 128), (16, 16)):
            pointer, sizes = POINTERS[name], {"ROWS": rows, "TOKENS": tokens, "DEPTH": 64}
            arguments = {"w": pointer, "x": pointer, "y": "*fp32!", "num_inputs": "i32!", "num_tokens": "i32!", **sizes}
            code = compiled(tile_products, arguments, num_warps=4).asm["ptx"]
            yield f"{name} {rows}x{tokens}", sorted({" ".join(found) for found in PRODUCT.findall(code)})


def main() -> None:
    is_whole = sys.argv[1:] == ["all"]
    kernels = dict([*weights_code(is_whole), *step_code()])
    sums = dict(sums_code(is_whole))
    json.dump({"sampler": dict(sampler_code()), "sums": sums, "kernels": kernels}, sys.stdout)


if __name__ == "__main__":
    main()
