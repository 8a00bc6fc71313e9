"""Prints as JSON the facts of the kernels' code: registers, spills, instructions, and PTX of the sampler.

    python gpu_code.py          for some types, sizes and architectures, by the keys of `KINDS`
    python gpu_code.py all      for every type, size and architecture

Triton compiles them without a GPU. It is a separate program, because in the tests' process Triton interprets kernels.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_compiler import compiled, sampler_code, weights_code
from gpu_step_kernels import attention_code, expert_code, state_code, step_code, unusual_code

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


Facts = Iterator[tuple[str, Any]]
KINDS: dict[str, Callable[[bool], Facts]] = {"weights": weights_code, "steps": lambda is_whole: step_code()}
KINDS |= {"sums": sums_code, "sampler": lambda is_whole: sampler_code(), "attention": attention_code}
KINDS |= {"unusual attention": unusual_code, "experts": expert_code, "states": state_code}
ONLY_IN_ALL = ("unusual attention", "experts")


if __name__ == "__main__":
    is_whole = sys.argv[1:] == ["all"]
    kinds = {kind: code_of for kind, code_of in KINDS.items() if is_whole or kind not in ONLY_IN_ALL}
    json.dump({kind: dict(code_of(is_whole)) for kind, code_of in kinds.items()}, sys.stdout)
