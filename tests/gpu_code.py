"""Prints as JSON what the tests ask of the kernels' code: PTX of the sampler, for an H100 or H200; of the others
registers, spills and instructions.

    python gpu_code.py          for some types and sizes
    python gpu_code.py all      for every type, size and architecture

A program of its own: in the tests' process Triton interprets.
"""

import json
import sys

from gpu_compiler import sampler_code, weights_code
from gpu_step_kernels import step_code


def main() -> None:
    is_whole = sys.argv[1:] == ["all"]
    kernels = dict([*weights_code(is_whole), *step_code(is_whole)])
    json.dump({"sampler": dict(sampler_code()), "kernels": kernels}, sys.stdout)


if __name__ == "__main__":
    main()
