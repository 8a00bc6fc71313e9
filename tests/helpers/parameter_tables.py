"""Tables of the docs and TypedDicts of keywords, which are written from the declarations of parameters and options.

As a program it writes them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import click
from click.core import UNSET

import infer.engine.step.request_options as request_options
import infer.model_settings as model_settings
import infer.sampling_params as sampling_params
from infer.cli.command_options import DiskOption, ServedOptions
from infer.cli.option_fields import apply_options, decorators_of
from infer.cli.server_options import ClientOptions, LimitOptions, ModelsOptions, ProcessOptions, SchedulingOptions
from infer.cli.subcommands import infer as command_line
from infer.engine.step.request_options import OPTIONS, RequestOptions
from infer.model_settings import SETTINGS
from infer.sampling_params import ALIASES, PARAMETERS, SamplingParams
from infer.serving.protocols.foreign import FOREIGN

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "infer"
DOCS = ROOT / "docs" / "reference"
FLAGS: dict[str, tuple[type, ...]] = {
    "flags for the choice of models": (ModelsOptions,),
    "flags for clients": (ClientOptions,),
    "flags for processes": (ProcessOptions,),
    "flags for steps and waiting": (SchedulingOptions,),
    "flags for limits": (LimitOptions,),
    "flags for the model": (ServedOptions, DiskOption),
}
_COUNT = re.compile(r"(?P<name>[A-Z_]+): Final = (?P<value>[^#\n]+?)(?:  # (?P<words>.*))?")


def written() -> dict[Path, str]:
    """Return the whole text of each file that has a written part."""
    parts = {
        DOCS / "sampling.md": [("names of SamplingParams", _names(SamplingParams))],
        DOCS / "request-options.md": [("names of RequestOptions", _names(RequestOptions))],
        DOCS / "defaults.md": [("limits", _limits())],
        ROOT / "docs" / "server" / "flags.md": [(name, _flags(kinds)) for name, kinds in FLAGS.items()],
    }
    found = {path: _with_parts(path.read_text(encoding="utf-8"), each) for path, each in parts.items()}
    sampling = _keywords(sampling_params, "SamplingParams", ALIASES)
    requests = _keywords(request_options, "RequestOptions", {})
    settings = _keywords(model_settings, "ModelSettings", {})
    taken = {name: declared.takes for name, declared in SETTINGS.items() if declared.takes}
    settings = [f"{name}: {taken.get(name, kind)}" for name, _, kind in (each.partition(": ") for each in settings)]
    for path, name, lines in (
        (SOURCE / "llm.py", "_ModelKeywords", settings),
        (SOURCE / "compute/sampling/keywords.py", "SamplingKeywords", sampling),
        (SOURCE / "engine/step/request_options.py", "RequestKeywords", requests),
    ):
        found[path] = _with_fields(path.read_text(encoding="utf-8"), name, lines)
    return found


def _with_parts(text: str, parts: list[tuple[str, str]]) -> str:
    for name, table in parts:
        begin, end = f"<!-- {name}: written by tests/helpers/parameter_tables.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    return text


def _with_fields(text: str, name: str, lines: list[str]) -> str:
    """Return the source with these fields in a TypedDict, after its docstring."""
    return re.sub(
        rf'(class {name}\(.*\n    """[^"]*"""\n\n)(?:    \w+: .*\n)+',
        lambda found: found[1] + "".join(f"    {line}\n" for line in lines),
        text,
    )


def _keywords(module: object, name: str, aliases: dict[str, str]) -> list[str]:
    """Return the fields of a dataclass with their annotations, and aliases behind the field that they stand for."""
    tree = ast.parse(Path(str(vars(module)["__file__"])).read_text(encoding="utf-8"))
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    lines = list[str]()
    for field in found.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            annotation = ast.unparse(field.annotation).replace("'", '"')
            names = [field.target.id, *(alias for alias, meant in aliases.items() if meant == field.target.id)]
            lines += [f"{each}: {annotation}" for each in names]
    return lines


def _names(cls: type) -> str:
    declared = PARAMETERS if cls is SamplingParams else OPTIONS
    lines = ["| field | default | valid | in bodies | other names there |", "|---|---|---|---|---|"]
    for field in fields(cls):
        own = declared[field.name]
        in_body = own.body_name or (field.name if own.bodies else "")
        same = [each for each, foreign in FOREIGN.items() if in_body in foreign.same_as and each != in_body]
        assert field.default is not MISSING
        rule = own.kind.rule.replace("|", "\\|")
        cells = [f"`{field.name}`", repr(field.default), rule, _code([in_body] if in_body else [])]
        lines.append(f"| {' | '.join(cells)} | {_code(sorted(same) if in_body else [])} |")
    return "\n".join(lines) + "\n"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _flags(kinds: tuple[type, ...]) -> str:
    """Return the table of those flags of `infer serve` that these classes declare."""
    declared = apply_options([each for kind in kinds for each in decorators_of(kind)], lambda: None)
    names = {each.name for each in declared.__click_params__}  # type: ignore[attr-defined]
    options = [option for option in command_line.commands["serve"].params if isinstance(option, click.Option)]
    rows = [row_of_flag(each) for each in options if not each.hidden and each.name in names]
    return "\n".join(["| flag | default | |", "|---|---|---|", *rows]) + "\n"


def row_of_flag(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    described, _, default = (option.help or "").partition("  [default: ")
    if default:
        default = default.removesuffix("]")
    elif option.default not in (UNSET, None, False):
        default = str(option.default)
    return f"| {names} | {default} | {described} |".replace("  ", " ")


def _limits() -> str:
    lines = ["| `infer.request_limits` | | |", "|---|---|---|"]
    lines += [f"| `{name}` | {value:,} | {words} |" for name, value, words in _counts()]
    return "\n".join(lines) + "\n"


def _counts() -> Iterator[tuple[str, int, str]]:
    values: dict[str, int] = {}
    text = (SOURCE / "request_limits.py").read_text(encoding="utf-8")
    exec(compile(text, "request_limits", "exec"), values)
    for line in text.splitlines():
        if found := _COUNT.fullmatch(line):
            yield found["name"], values[found["name"]], found["words"] or ""


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
