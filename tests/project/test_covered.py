"""No list of modules, files or packages silently covers less than before.

A folder that moves takes its files out of a glob without an error. So each count here may rise, but not fall. If files
were removed on purpose, lower the count in the same commit.
"""

import ast
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import infer
import test_house
from infer.compute.backends.cpu.host import kernel_cache
from infer.engine.prefixes import prefix_disk
from infer.engine.runner.runner import Runner
from path_cases import World
from shapes import SOURCE, checked_modules
from syntax import nodes_below
from test_house import ROOT, module_name, project_files, syntax_trees

pytestmark = pytest.mark.slow

NUM_MODULES = 473
NUM_CHECKED = 348
NUM_PREFIX_SOURCES = 253
NUM_KERNEL_SOURCES = 98
NUM_PROJECT_FILES = 1170
NUM_TEST_FILES = 297
NUM_NAMED_ONCE = 248
NUM_KERNEL_MAKERS = 63
NUM_NAMES_IN_STRINGS = 76  # without the logger `infer.server`, which is no module

# Modules that the runner uses, but that compute no keys and values.
COMPUTE_NO_VALUES = (
    *("infer.errors", "infer.model_settings", "infer.outputs", "infer.parameters", "infer.request_limits"),
    *("infer.compute.sampling", "infer.sampling_params", "infer.system", "infer.text"),
)
# Names of loggers, of fields in logs, and of metadata in files: no modules, although they begin like one.
NO_MODULES = (
    *("infer.access", "infer.call", "infer.connection", "infer.disconnect_phase", "infer.prompts", "infer.server"),
    *("infer.queue_seconds", "infer.request", "infer.stdin", "infer.usage"),
)
# Constants that the launching Python code uses, and no kernel.
NOT_KERNELS = ("infer.compute.operands.feed_forwards", "infer.system.status_line", "infer.system.torch_threads")
NOT_KERNELS += ("infer.compute.quantization", "infer.files")  # whose sources name the packed experts
# Texts about code that never was or that is gone.
WITHOUT_IMPORTS = ("CHANGELOG.md", "docs/dev/log.md", "tests/project/test_promises.py")
KERNELS = "infer.compute.backends.cpu"


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules, by their dotted names."""
    named = {module_name(SOURCE / name): tree for name, tree in syntax_trees().items()}
    return {name.removesuffix(".__init__"): tree for name, tree in named.items()}


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports(module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of `infer` that a module imports or names in a string, each with the imported names."""
    for node in nodes_below(trees()[module]):
        if isinstance(node, ast.ImportFrom) and node.module in trees():
            names = [alias.name for alias in node.names]
            inner = [name for name in names if f"{node.module}.{name}" in trees()]
            yield from ((f"{node.module}.{name}", ["*"]) for name in inner)
            yield str(node.module), [name for name in names if name not in inner]
        elif isinstance(node, ast.Constant) and node.value in trees():
            yield str(node.value), ["*"]


def strings() -> Iterator[tuple[str, str]]:
    """Yield each string of the sources, with its module."""
    for module, tree in trees().items():
        for node in nodes_below(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield module, node.value


def exists(name: str) -> bool:
    """Return True if a dotted name is a module, or an attribute of one."""
    owner, _, attribute = name.rpartition(".")
    return name in trees() or (owner in trees() and attribute in words_of(owner))


@cache
def words_of(module: str) -> frozenset[str]:
    path = SOURCE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return frozenset(re.findall(r"\w+", file.read_text(encoding="utf-8")))


@pytest.mark.slow(cases=1)
def test_prefixes_name_the_code_of_all_packages() -> None:
    found = prefix_disk.sources()
    assert len(found) >= NUM_PREFIX_SOURCES
    assert {path.suffix for path in found.values()} == {".py", ".cl"}
    assert all(path.is_file() and path.is_relative_to(SOURCE) for path in found.values())


def test_prefixes_name_the_code_of_all_that_the_runner_uses() -> None:
    """A change of any module from which the runner computes keys and values makes the stored pages useless."""
    starts = ("infer.engine.runner", "infer.engine.tensor_parallel", "infer.models")
    used = {m for m in trees() if is_in(m, *starts) and not is_in(m, *prefix_disk.WITHOUT_VALUES)}
    waiting = list(used)
    while waiting:
        new = {module for module, _ in imports(waiting.pop())} - used - {"infer"}
        used |= new
        waiting += new
    assert len(used) > 200
    used -= {module for module in used if len(trees()[module].body) == 1}  # a docstring computes nothing
    assert sorted(m for m in used if not is_in(m, *prefix_disk.PACKAGES, *COMPUTE_NO_VALUES)) == []
    assert [module for module in used if is_in(module, *prefix_disk.WITHOUT_VALUES)] == []


@pytest.mark.slow(cases=1)
def test_a_missing_package_of_prefixes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infer_without_sources").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("infer.no_such_package", "infer_without_sources"):
        monkeypatch.setattr(prefix_disk, "PACKAGES", ("infer.system", package))
        with pytest.raises(ModuleNotFoundError, match=f"{package} has no sources"):
            prefix_disk.sources()


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["inner/kernel.py", "kernel.cl"])
def test_prefixes_of_changed_code_have_another_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "infer_changing_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prefix_disk, "PACKAGES", ("infer_changing_package",))
    code = prefix_disk._code.__wrapped__
    found = [code(), code()]
    for text in ("x = 1", "x = 2"):
        (package / name).write_text(text)
        found.append(code())
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.slow(cases=1)
def test_prefixes_of_other_libraries_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for library in ("none", "torch", "numpy", "numba", "llvmlite", "triton"):
        monkeypatch.setattr(prefix_disk, "version", lambda name, own=library: "2" if name == own else "1")
        found.append(prefix_disk._code.__wrapped__())
    assert len(set(found)) == 6


@pytest.mark.slow(cases=1)
def test_prefixes_of_other_machines_and_layouts_have_other_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of another instruction set may have other bits, and pages of another size have other tokens."""
    runner = Runner(world.model, 256, num_slots=1, pool_pages=4, settings=world.settings)
    found = [prefix_disk.prefix_fingerprint({}, runner)]
    backend, memory = type(runner.model.backend), type(runner.cache.memory)
    others = ((backend, "instruction_set"), (torch.backends.cpu, "get_cpu_capability"), (memory, "page_bytes"))
    for target, name in others:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, lambda *given: 1)
            found.append(prefix_disk.prefix_fingerprint({}, runner))
    assert len(set(found)) == 4


def test_compiled_kernels_name_all_of_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel_cache.sources()
    assert len(found) >= NUM_KERNEL_SOURCES
    modules = [module for module in trees() if is_in(module, KERNELS)]
    assert len(modules) + len(kernel_cache.CONSTANTS) == len(found)
    monkeypatch.setattr(kernel_cache, "CONSTANTS", ("infer.compute.operands.no_such_module",))
    with pytest.raises(ModuleNotFoundError, match="no_such_module has no source"):
        kernel_cache.sources()


def test_compiled_kernels_name_the_constants_of_other_packages() -> None:
    used = (each for module in trees() if is_in(module, KERNELS) for each in imports(module))
    others = ((other, names) for other, names in used if other != "infer" and not is_in(other, KERNELS))
    found = {other for other, names in others if any(name.isupper() or name == "*" for name in names)}
    known = ("sampling.constants", "quantization.ggml_grids", "operands.limits")
    assert found >= {f"infer.compute.{name}" for name in known}
    assert sorted(found - {*kernel_cache.CONSTANTS, *NOT_KERNELS}) == []


def test_every_maker_of_a_kernel_exists() -> None:
    makers = [text for module, text in strings() if is_in(module, KERNELS) and re.fullmatch(r"\.[\w.]+:\w+[a-z]", text)]
    assert len(makers) >= NUM_KERNEL_MAKERS
    for module, function in (maker.split(":") for maker in makers):
        assert callable(getattr(importlib.import_module(module, KERNELS), function)), module


def test_every_module_in_a_string_exists() -> None:
    names = [text for _, text in strings() if re.fullmatch(r"infer(\.[a-z]\w*)+", text)]
    found = [name for name in names if not is_in(name, *NO_MODULES)]
    assert len(found) >= NUM_NAMES_IN_STRINGS
    assert [name for name in found if not exists(name)] == []


def test_every_import_in_a_text_leads_to_code() -> None:
    """Programs that tests start, and examples of pages, import by names that stand in strings."""
    statement = re.compile(r"^ *from (infer[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    found = []
    for path in project_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".py", ".md") and name not in WITHOUT_IMPORTS:
            for module, names in statement.findall(path.read_text(encoding="utf-8")):
                found += [(name, module, each.split(" as ")[0].strip()) for each in names.split(",")]
    assert len(found) > 2000
    assert [each for each in found if not is_importable(*each[1:])] == []


def is_importable(module: str, name: str) -> bool:
    public = {*infer.__all__, "__version__"}
    return f"{module}.{name}" in trees() or (name in public if module == "infer" else exists(f"{module}.{name}"))


def test_shapes_are_checked_in_as_many_modules() -> None:
    assert len(trees()) >= NUM_MODULES
    known = tuple(checked_modules())
    assert all(find_spec(module) is not None for module in known)
    assert len([module for module in trees() if is_in(module, *known)]) >= NUM_CHECKED


def test_rules_of_the_house_see_as_many_files() -> None:
    assert len(project_files()) >= NUM_PROJECT_FILES
    assert len(test_house.python_files_of_tests()) >= NUM_TEST_FILES
    assert len(test_house.files_named_once()) >= NUM_NAMED_ONCE


@pytest.mark.slow(cases=1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of former names
def test_every_module_can_be_imported() -> None:
    for module in sorted(trees().keys() - {"infer.__main__"}):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise


def test_settings_of_the_project_name_existing_modules_and_files() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    names = set(re.findall(r'"(infer(?:\.\w+)+)(?:\.\*)?"', text))
    assert len(names) > 50
    assert [name for name in sorted(names) if not exists(name)] == []
    settings = tomllib.loads(text)
    for pattern in settings["tool"]["ruff"]["lint"]["per-file-ignores"]:
        assert glob(str(ROOT / pattern)), pattern


def test_every_other_file_is_in_the_wheel() -> None:
    listed = subprocess.run(["git", "ls-files", "."], cwd=SOURCE, capture_output=True, text=True, check=True).stdout
    others = {name for name in listed.splitlines() if not name.endswith(".py")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["infer"]
    found = {name for pattern in patterns for name in glob(pattern, root_dir=SOURCE, recursive=True)}
    assert sorted(others - found) == []
    assert len(others) >= 30
    assert all(glob(pattern, root_dir=SOURCE, recursive=True) for pattern in patterns)
