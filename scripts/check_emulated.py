"""Compare digests of the CPU kernels on other CPUs, emulated by qemu-user, with those of this machine.

    python scripts/check_emulated.py                              some cases on haswell, nehalem, neoverse-n1 and max
    python scripts/check_emulated.py --cpus max --cases attend    cases of `kernel_digests` whose names begin so
    python scripts/check_emulated.py --cases "answer llama: greedy"    an answer of a whole model: minutes
    python scripts/check_emulated.py --all                        every case: hours
    python scripts/check_emulated.py --prepare                    only make AArch64's folder

Nehalem has only SSE. Without FMA, sums of floats are rounded in another way, so its digests are compared with those of
this machine compiled for Nehalem. Digests of single products, as in the embedding, are also compared with this
machine's own.

Needs Debian's package `qemu-user`. For AArch64 a folder with Debian's Python and the wheels (1.2 GB) is made once, with
apt-get and pip, in $INFER_AARCH64 (default ~/.cache/infer-tests/aarch64). The system is not changed. The exit status is
1 if a digest differs, and 2 if something is missing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIGESTS = ROOT / "tests" / "helpers" / "kernel_digests.py"
CASES = ["Q4_0 exact", "Q8_0 exact", "Q8_0 embed"]  # about ten seconds each, because LLVM is emulated as well
FEWER_CASES = {
    "neoverse-n1": ["Q8_0 exact", "Q8_0 embed"],  # `max` has a product of another type
    "max": ["Q4_0 exact"],  # it differs from neoverse-n1 only in its products: i8mm
    "nehalem": ["Q8_0 exact", "Q8_0 embed"],  # its products have one code for every type: `portable`
}
X86, ARM = ("haswell", "max-x86", "nehalem"), ("neoverse-n1", "cortex-a76", "max")
WITHOUT_FMA = ("nehalem",)
SINGLE_PRODUCTS = ("Q4_0 embed", "Q5_0 embed", "Q8_0 embed", "F32 embed", "F16 embed", "BF16 embed")
# Without features that qemu does not emulate, about which it warns.
QEMU_NAMES = {
    "haswell": "Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid", "max-x86": "max", "nehalem": "Nehalem"
}  # fmt: skip
# Python, and the libraries of torch and LLVM.
DEBIAN = (
    "libc6", "libgcc-s1", "libstdc++6", "libgomp1", "libcrypt1", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0",
    "liblzma5", "libuuid1", "libssl3", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib",
)  # fmt: skip
# The last torch whose wheel for AArch64 is built only for CPUs.
WHEELS = (
    "torch==2.10.0", "numba>=0.68,<0.69", "llvmlite", "numpy", "click", "jaxtyping", "wadler_lindig", "jinja2",
    "markupsafe", "llguidance", "msgspec", "safetensors", "tokenizers", "typing_extensions", "filelock", "sympy",
    "mpmath", "networkx", "fsspec",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")


class MissingError(Exception):
    """A missing program or package, and the way to install it."""


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingError(f"{name} is not installed: apt-get install qemu-user")
    return found


def aarch64_folder() -> Path:
    return Path(os.environ.get("INFER_AARCH64") or Path.home() / ".cache" / "infer-tests" / "aarch64")


def make_aarch64(folder: Path) -> None:
    """Make the folder, unless it has these packages.

    It is made under another name and then moved, so that an interrupted run leaves no part of it.
    """
    parts, made_of = repr((DEBIAN, WHEELS)), folder / "made-of"
    if made_of.exists() and made_of.read_text(encoding="utf-8") == parts:
        return
    if shutil.which("apt-get") is None:
        raise MissingError("apt-get is not there: AArch64's Python comes from Debian's packages")
    print(f"Making {folder}, once: Debian's Python and wheels for AArch64 (300 MB to fetch) ...", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        _extract_debian(scratch)
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--only-binary=:all:"]
        target = ["--python-version", "3.11", "--target", str(scratch / "made" / "site")]
        subprocess.run([*install, *platforms, *target, *WHEELS], check=True)
        (scratch / "made" / made_of.name).write_text(parts, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        (scratch / "made").rename(folder)


def _extract_debian(scratch: Path) -> None:
    """Unpack the packages with separate lists, cache and status."""
    for name in ("lists/partial", "cache/archives/partial", "packages", "made"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    places = {"Dir::State::lists": "lists", "Dir::Cache": "cache", "Dir::State::status": "status"}
    settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root"}
    settings |= {name: str(scratch / place) for name, place in places.items()}
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN], check=True, cwd=scratch / "packages")
    for package in sorted((scratch / "packages").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(scratch / "made")], check=True)


def command_for(cpu: str) -> tuple[list[str], str]:
    """Return the command that runs Python on an emulated CPU, and its PYTHONPATH."""
    if cpu in X86:
        # numpy's OpenBLAS chooses its kernels itself, and wrongly without AVX.
        variables = ["-E", "OPENBLAS_CORETYPE=Nehalem"] if cpu in WITHOUT_FMA else []
        return [emulator("qemu-x86_64"), *variables, "-cpu", QEMU_NAMES[cpu], sys.executable], str(ROOT / "src")
    command, folder = [emulator("qemu-aarch64"), "-cpu", cpu], aarch64_folder()
    make_aarch64(folder)
    python = [*command, "-L", str(folder), str(folder / "usr" / "bin" / "python3.11")]
    return python, os.pathsep.join([str(ROOT / "src"), str(folder / "site")])


def digests(
    title: str, python: list[str], path: str, cases: list[str], cache: Path, compiled_for: str = ""
) -> dict[str, str]:
    """Return the digests by case. `compiled_for` names a CPU other than the one that runs.

    Compiled kernels go to a separate cache, because /proc/cpuinfo does not name the emulated CPU.
    """
    environment = {key: value for key, value in os.environ.items() if key != "INFER_ISA"}
    environment |= {"PYTHONPATH": path, "INFER_CACHE": str(cache)}
    if compiled_for:
        environment["NUMBA_CPU_NAME"] = compiled_for
    run = [*python, str(DIGESTS), *cases]
    with subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = {}
        for line in process.stdout:
            name, digest = line.rsplit(None, 1)
            found[name.strip()] = digest
            print(f"{title:<26} {line.rstrip()}", flush=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(run)}: exit status {process.returncode}")
    return found


def all_digests(
    commands: dict[str, tuple[list[str], str]], cases_by_cpu: dict[str, list[str]]
) -> dict[str, dict[str, str]]:
    """Return the digests of this machine, of this machine compiled without FMA, and of each emulated CPU.

    One CPU per core is emulated at a time, the slow ones first.
    """
    here, own = ([sys.executable], str(ROOT / "src")), sorted(set[str]().union(*cases_by_cpu.values()))
    runs = {cpu: (*command, cases_by_cpu[cpu], "") for cpu, command in commands.items()} | {"here": (*here, own, "")}
    runs |= {f"here, compiled for {cpu}": (*here, cases_by_cpu[cpu], cpu) for cpu in commands if cpu in WITHOUT_FMA}
    with tempfile.TemporaryDirectory() as caches, ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = {
            title: pool.submit(digests, title, python, path, cases, Path(caches) / title, compiled_for)
            for title, (python, path, cases, compiled_for) in runs.items()
        }
        return {title: each.result() for title, each in begun.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", nargs="+", choices=[*X86, *ARM], default=["haswell", "nehalem", "neoverse-n1", "max"])
    parser.add_argument("--cases", nargs="+", help="default: a few that take some ten seconds each")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--prepare", action="store_true", help="make the folder for AArch64, and no more")
    options = parser.parse_args()
    cases = {cpu: [] if options.all else options.cases or FEWER_CASES.get(cpu, CASES) for cpu in options.cpus}
    try:
        if options.prepare:
            make_aarch64(aarch64_folder())
            return 0
        commands = {cpu: command_for(cpu) for cpu in options.cpus}
    except MissingError as error:
        print(error, file=sys.stderr)
        return 2
    found = all_digests(commands, cases)
    differing, num_compared = list[str](), 0
    for cpu in commands:
        expected = found["here"]
        if cpu in WITHOUT_FMA:
            single = {name: digest for name, digest in expected.items() if name in SINGLE_PRODUCTS}
            expected = found[f"here, compiled for {cpu}"] | single
        asked = [name for name in expected if not cases[cpu] or name.startswith(tuple(cases[cpu]))]
        differing += [f"{cpu}: {name}" for name in asked if found[cpu].get(name) != expected[name]]
        num_compared += len(asked)
    for each in differing:
        print(f"differs  {each}", file=sys.stderr)
    print(f"{num_compared - len(differing)} digests are equal, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
