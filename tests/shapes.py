"""Shapes and types checked at every call of `infer`: the import hook that conftest installs before anything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import install_import_hook

SOURCE = Path(__file__).parents[1] / "src" / "infer"

# jaxtyping decorates methods one by one, where beartype cannot know the class that Self stands for.
_configuration = BeartypeConf(hint_overrides=FrozenDict({Self: Any}))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    return beartype(conf=_configuration)(function)


def checked_modules() -> list[str]:
    """All of `infer` but the kernels that a compiler reads: it cannot read a check's wrapper."""
    names = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return [
        "infer.kernels.reference",
        *(f"infer.{name}" for name in sorted(names - {"__init__", "__main__", "kernels"})),
    ]


def install() -> None:
    install_import_hook(checked_modules(), "shapes.checked")
