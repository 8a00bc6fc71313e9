"""Fuzzes the readers of files, guided by coverage (Atheris, on libFuzzer).

    python tests/fuzz TARGET SECONDS      one of gguf, safetensors, config, tokenizer, template
    python tests/fuzz all SECONDS         each of them so long, one on each processor
    python tests/fuzz TARGET FILE         once more what was found

A finding is written to build/fuzz, where the corpus grows as well, and the exit status is not 0.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "fuzz"
INSTRUMENTED = ["infer.files", "infer.system.json_limits", "infer.models.families", "infer.text.tokenizer"]
NAMES = ("gguf", "safetensors", "config", "tokenizer", "template")
MOST_BYTES = 16_384
SLOWEST_SECONDS = 10  # of wall time for one input, with instrumented code on a busy machine


def fuzz(name: str, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=[*INSTRUMENTED, *(["jinja2"] if name == "template" else [])]):
        from targets import TARGETS, check
    from json_mutator import JsonMutator

    target = TARGETS[name]
    corpus = BUILD / name
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = list(target.seeds())
    for index, seed in enumerate(seeds):
        (corpus / f"seed-{index:03}").write_bytes(seed)
    mutator = JsonMutator(seeds)

    def mutate(content: bytes, most: int, seed: int) -> bytes:
        changed = mutator.mutate(content, seed) if target.is_json and seed % 4 else None
        if changed is None or len(changed) > most:
            changed = atheris.Mutate(content, len(content))
        return changed

    options = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", f"-timeout={SLOWEST_SECONDS}"]
    options += ["-rss_limit_mb=4096", f"-artifact_prefix={BUILD}/{name}-", "-print_final_stats=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda content: check(target, content), custom_mutator=mutate)
    atheris.Fuzz()


def alone(name: str, seconds: str) -> int:
    """Fuzz in a separate process. Its output is shown if it found something."""
    command = [sys.executable, str(Path(__file__).parent), name, seconds]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = done.stdout[-8000:] if done.returncode else ""
    count = re.search(r"number_of_executed_units: (\d+)", done.stdout)
    print(f"{found}{name}: {count[1] if count else 'no'} inputs, {'a FINDING' if done.returncode else 'all well'}")
    return int(done.returncode != 0)


def main(name: str, what: str) -> int:
    tests = ROOT / "tests"
    sys.path[1:1] = map(str, (ROOT / "src", *sorted(path for path in tests.rglob("[!_]*") if path.is_dir())))
    if name == "all":
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return max(pool.map(lambda each: alone(each, what), NAMES))
    if what.isdigit():
        fuzz(name, int(what))
    else:
        from targets import TARGETS, check

        check(TARGETS[name], Path(what).read_bytes())
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in (*NAMES, "all"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
