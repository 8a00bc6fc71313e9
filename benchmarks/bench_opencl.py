"""OpenCL beside the CPU's own kernels: decode and prefill in turns, the share of bandwidth, and launches a token.

    python benchmarks/bench_opencl.py                                 a minute; PoCL is `pip install pyopencl[pocl]`
    python benchmarks/bench_opencl.py --device opencl:intel --rounds 5

The report goes to benchmarks/reports/.
"""

from statistics import median

from command_line import REPORTS, make_parser
from infer import LLM
from infer.bench.speed import Speed, Workload, measure
from infer.runner.caches import make_cache
from machine import write_report


def num_launches(llm: LLM) -> int:
    cache = make_cache(llm.model, 16)
    cache.reserve(0, 1)
    recorded = llm.model.backend.capture(lambda step: llm.model.forward(step, cache), 1, 1)
    return recorded.num_launches


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=3)
    parser.add_argument("--device", default="opencl")
    arguments = parser.parse_args()
    workload = Workload(prompt_tokens=512, new_tokens=64, context=64, repeats=1)
    models = {device: LLM(arguments.model, device=device, max_seq_len=1024) for device in ("cpu", arguments.device)}
    found: dict[str, list[Speed]] = {device: [] for device in models}
    for _ in range(arguments.rounds):
        for device, llm in models.items():
            found[device].append(measure(llm, workload))
    opencl, launches = models[arguments.device].model.backend, num_launches(models[arguments.device])
    print(f"{opencl.description()}: {launches} launches a token")
    for device, speeds in found.items():
        decode = median(speed.decode_tokens_per_second for speed in speeds)
        prefill = median(speed.prefill_tokens_per_second for speed in speeds)
        share = median(speed.bandwidth_share for speed in speeds)
        print(
            f"{device:<12} decode {decode:6.1f} tok/s ({share:.0%} of bandwidth)   prefill of 512 {prefill:7.1f} tok/s"
        )
    settings = vars(arguments) | {"opencl": opencl.description(), "launches": launches}
    results = {device: [speed.to_json() for speed in speeds] for device, speeds in found.items()}
    write_report(REPORTS, "opencl", settings, results)


if __name__ == "__main__":
    main()
