"""Rules of the project that ruff, mypy and import-linter cannot check. Each test is a rule."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import infer
from extent import IS_WHOLE
from shapes import SOURCE, checked, checked_modules
from syntax import nodes_below
from watched import python_command

ROOT = SOURCE.parents[1]
TREES: dict[str, ast.Module] = {}
SOURCES = sorted(SOURCE.rglob("*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ""}

# A function may import these: heavy dependencies that most programs never need, loaded on their first use.
LAZY_DEPENDENCIES = {
    *("huggingface_hub", "importlib", "llguidance", "prompt_toolkit", "prometheus_client", "ray", "torch", "triton"),
    *("uvicorn", "xgrammar"),
}
LIGHT_MODULES = "infer, infer.sampling_params, infer.outputs, infer.errors, infer.cli, infer.files"
# Modules that answer --help, or are imported, before torch is: they may load the rest of infer late.
LAZY_FRONT = ("__init__.py", "__main__.py", "cli/", "serving/batch_file/workers.py")


def module_name(path: Path) -> str:
    return ".".join(["infer", *path.relative_to(SOURCE).with_suffix("").parts])


def syntax_trees() -> dict[str, ast.Module]:
    """Return the syntax trees of the package by the paths of its files, parsed once for several files of tests."""
    if not TREES:
        TREES.update((str(path.relative_to(SOURCE)), ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES)
    return TREES


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "library"), [(LIGHT_MODULES, "torch"), ("infer.llm, infer.compute.ops", "triton")])
def test_light_modules_load_no_torch_and_only_the_kernels_for_gpus_load_triton(modules: str, library: str) -> None:
    code = f"import sys, {modules}; print({library!r} in sys.modules)"
    done = subprocess.run(python_command(code), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.slow  # `make test` checks no shapes
def test_a_wrong_shape_is_caught_at_the_call() -> None:
    from infer.compute.operands.step import Step

    tokens = torch.zeros(3, dtype=torch.int64)
    assert len(Step(tokens, tokens, tokens, tokens[:1]).tokens) == 3
    with pytest.raises(TypeCheckError):
        Step(tokens, tokens[:2], tokens, tokens[:1])
    with pytest.raises(TypeCheckError):
        Step(tokens.float(), tokens, tokens, tokens[:1])


@pytest.mark.slow  # `make test` checks no shapes
def test_arguments_and_results_are_checked_together() -> None:
    @checked
    def first_rows(x: Float[Tensor, "rows columns"], count: int, names: list[str]) -> Float[Tensor, "rows columns"]:
        return x[:count]

    x = torch.zeros(3, 2)
    assert torch.equal(first_rows(x, 3, ["a"]), x)
    assert (checked(module_name) is module_name) is not IS_WHOLE, "without arrays only with INFER_TESTS=all"
    for wrong in (
        lambda: first_rows(x, 2, ["a"]),
        lambda: first_rows(x[0], 2, ["a"]),
        lambda: first_rows(x.int(), 3, ["a"]),
        lambda: first_rows(x, 3.0, ["a"]),  # type: ignore[arg-type]
        lambda: first_rows(x, 3, [1]),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeCheckError):
            wrong()


def test_every_module_but_compiled_kernels_is_checked() -> None:
    names, known = [module_name(path) for path in SOURCES], tuple(checked_modules())
    backends = [f"infer.compute.backends.{name}" for name in ("__init__", "cpu", "cuda")]
    allowed = ("infer.__", "infer.compute.__init__", *backends)
    assert [name for name in names if not name.startswith((*known, *allowed))] == []


def test_no_file_name_occurs_twice() -> None:
    """A part may have its own file in each backend, and one more where it is defined, such as `noise`."""
    names = files_named_once()
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def files_named_once() -> list[str]:
    parts = ("infer.compute.backends.", "infer.models.families.", "infer.models.layers.", "infer.models.tensors")
    # Names in several protocols, and those of a route beside its protocol.
    again = ("__init__.py", "ask.py", "events.py", "messages.py", "ollama.py", "retrieval.py", "ray_serve.py")
    return [path.name for path in SOURCES if path.name not in again and not module_name(path).startswith(parts)]


@pytest.mark.slow
def test_no_hasattr_global_or_type_checking() -> None:
    found = []
    for name, tree in syntax_trees().items():
        for node in nodes_below(tree):
            called = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if isinstance(node, ast.Global) or called in ("hasattr", "TYPE_CHECKING"):
                found.append(f"{name}:{node.lineno}")
    assert found == []


@pytest.mark.slow
def test_functions_import_only_heavy_dependencies() -> None:
    found = []
    for name, tree in syntax_trees().items():
        is_front = name.startswith(LAZY_FRONT) and not name.startswith("cli/bench/")
        for function in nodes_below(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for module in (each for node in nodes_below(function) for each in imported_modules(node)):
                    is_lazy_front = is_front and module.startswith("infer.")
                    if module.split(".")[0] not in LAZY_DEPENDENCIES and not is_lazy_front:
                        found.append(f"{name}:{function.name} imports {module}")
    assert found == []


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "."] if isinstance(node, ast.ImportFrom) else []


def test_kernel_modules_export_every_op() -> None:
    ops = importlib.import_module("infer.compute.ops")
    reference = importlib.import_module("infer.compute.backends.reference")
    tree = ast.parse((SOURCE / "compute/ops/__init__.py").read_text(encoding="utf-8"))
    called = {
        node.func.attr
        for node in nodes_below(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ".kernels" in ast.unparse(node.func)
    } & {name for name in vars(ops) if not name.startswith("_")}
    assert "attend" in called
    cuda = importlib.import_module("infer.compute.backends.cuda")
    refused = {"add_experts", "gate_inputs", "gated_delta_net", "per_layer_inputs", "short_conv"}
    refused |= {"add_text_inputs", "append_keys", "norm_activate", "project_add_norm"}  # by its `check_layers`
    for module in (reference, ops.backend_of(torch.device("cpu")).kernels, cuda):
        missing = called - set(vars(module)) - (refused if module is cuda else set())
        assert sorted(missing) == [], module.__name__


def test_no_test_asserts_a_time() -> None:
    clock, found = re.compile(r"perf_counter|monotonic\(|time\.time\("), []
    for path in python_files_of_tests():
        if clock.search(text := path.read_text(encoding="utf-8")):
            asserts = [node for node in nodes_below(ast.parse(text)) if isinstance(node, ast.Assert)]
            found += [f"{path.relative_to(ROOT)}:{each.lineno}" for each in asserts if clock.search(ast.unparse(each))]
    assert found == []
    assert hypothesis.settings().deadline is None


def python_files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def test_files_name_no_registry_and_no_path_of_this_machine() -> None:
    options = ("--index" + "-url", "--find" + "-links", "--reg" + "istry")
    here = (f"{ROOT}/", f"{Path.home()}/")
    pattern = re.compile("|".join(map(re.escape, (*options, *here))))
    found = []
    for path in project_files():
        if path.suffix in TEXT_SUFFIXES:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(ROOT)}: {each[0]}" for each in pattern.finditer(text)]
    assert found == []


def project_files() -> list[Path]:
    folders = ("src", "tests", "benchmarks", "examples", "scripts", "docs", ".ci")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def test_the_stub_for_type_checkers_lists_every_public_name() -> None:
    stub = ast.parse((SOURCE / "__init__.pyi").read_text())
    names = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(infer.__all__)
