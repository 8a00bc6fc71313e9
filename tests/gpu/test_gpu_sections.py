"""Claims about the sections of `check_gpu`. In Triton's interpreter, each runs on the host."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import infer
from gguf_files import write_model
from watched import python_command

pytest.importorskip("triton", reason="Triton is not installed")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import check_gpu
import gpu_sections
from infer.compute.backends.cuda.layouts import LAYOUTS

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
TINY = gpu_sections.Setting(CPU, is_tiny=True, model=None)
# torch's and Triton's own requirements, as their metadata have them; jaxtyping's is wadler_lindig.
ALLOWED = (
    "torch", "torchgen", "functorch", "triton", "numpy", "jaxtyping", "typing_extensions", "wadler_lindig", "sympy",
    "mpmath", "networkx", "filelock", "jinja2", "markupsafe", "fsspec", "setuptools", "_distutils_hack",
    "pkg_resources", "infer", "cuda",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _without_poison(quick_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_POISON")  # contexts are timed without being written


def results_of(name: str, setting: gpu_sections.Setting = TINY) -> list[dict[str, object]]:
    found = list(gpu_sections.RUN_BY_NAME[name](setting))
    assert json.loads(json.dumps(found)) == found
    assert all(result.get("is_right", True) for result in found)
    return found


def test_every_section_has_its_function_and_every_type_its_section() -> None:
    assert list(gpu_sections.RUN_BY_NAME) == [section.name for section in check_gpu.SECTIONS]
    size = check_gpu.TYPES_PER_SECTION
    assert (check_gpu.NUM_WEIGHT_SECTIONS - 1) * size < len(LAYOUTS) <= check_gpu.NUM_WEIGHT_SECTIONS * size


def test_a_profile_has_the_times_of_every_step_and_kernel() -> None:
    found = results_of("profile, Q4_K")
    assert [(each["context"], each["tokens"]) for each in found] == list(product((4,), (1, 2, 5)))
    assert [each["rows"] for each in found] == [1, 2, 1]
    for each in found:
        assert 0 < each["host_us"] <= each["step_us"]
        assert each["launches"] == sum(kernel["per_step"] for kernel in each["kernels"].values()) > 0


def test_sums_of_tiles_are_compared_bit_by_bit() -> None:
    found = results_of("sums")
    assert {(each["type"], each["is_wide"]) for each in found} == set(product(("f16", "tf32"), (False, True)))
    assert all(each["differ"] == 0 and each["error"] < 1e-6 for each in found)


def test_a_file_writes_text_that_plain_torch_finds_probable(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    found = results_of("file", TINY._replace(model=path))
    assert ([each["op"] for each in found][-1], len(found)) == ("file, beside plain torch", 5)
    assert found[-1]["same_best"] == 1


def test_answers_do_not_depend_on_their_number(folder: Path) -> None:
    assert {each["at_once"] for each in results_of("answers", TINY._replace(model=folder))} == {1, 8}


@pytest.mark.slow(rest=0)
def test_speeds_after_a_context_and_memory_beside_its_estimate_are_measured() -> None:
    assert [(each["rows"], each["after"]) for each in results_of("contexts, time")] == [(2, 70)]
    found = results_of("memory")
    assert {each["part"] for each in found if "part" in each} > {"weights", "cache", "workspace"}
    assert all(each["estimated"] > 0 for each in found if "estimated" in each)


def test_products_are_timed_and_one_gpu_is_not_several() -> None:
    assert all(each["microseconds"] > 0 for each in results_of("products, time"))
    assert results_of("several GPUs") == [{"skipped": "0 GPUs are here, and this needs two"}]
    assert results_of("machine")[0]["torch"] == torch.__version__


@pytest.mark.slow(rest=0)
def test_sections_need_torch_triton_numpy_and_jaxtyping_alone() -> None:
    folders = [str(Path(module.__file__ or "").parent) for module in (check_gpu, infer)]
    code = f"""
import os, sys
sys.path[:0] = [{folders[0]!r}, os.path.dirname({folders[1]!r})]
allowed = {ALLOWED!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        found = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        specs = (each.find_spec(name, path, target) for each in found)
        spec = next((spec for spec in specs if spec), None)
        origin = getattr(spec, "origin", None) or ""
        if "site-packages" in origin and name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return spec
sys.meta_path.insert(0, Refuse())
sys.argv = ["gpu_sections.py", "sums", "--device", "cpu", "--tiny"]
import gpu_models, gpu_sections
model = gpu_models.make_model("tiny", "Q4_0", gpu_sections.torch.device("cpu"), 32)
gpu_models.make_runner(model, 1, 32).cache.reserve(0, 1)
gpu_sections.main()
"""
    done = subprocess.run(python_command(code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["op"] for line in done.stdout.splitlines()} == {"sums"}
