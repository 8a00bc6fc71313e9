"""The program of a rank that runs the kernels for GPUs in Triton's interpreter, on CPU tensors."""

from infer.compute import ops
from infer.engine.tensor_parallel.follower import main
from quick_interpreter import quick_interpreter

if __name__ == "__main__":
    with ops.using("cuda"), quick_interpreter():
        main()
