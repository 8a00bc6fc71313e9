"""An extension of Griffe for `make docs`: what is declared elsewhere is shown.

A field that is declared with `parameter(default, …)` shows its default. `LLM` shows its keywords, which are the fields
of `ModelSettings`. A method of `AsyncLLM` with the decorator `_as_in` shows the arguments and the result of the method
of `LLM` that it names.
"""

from typing import Any

import griffe


class Declarations(griffe.Extension):
    """Replaces declarations by what they declare."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = attr.value
        if isinstance(declared, griffe.ExprCall) and str(declared.function) == "parameter":
            attr.value = declared.arguments[0]

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if "Unpack[_ModelKeywords]" in [str(each.annotation) for each in func.parameters]:
            types, settings = func.modules_collection["infer.llm._ModelKeywords"], "infer.model_settings.ModelSettings"
            del func.parameters["settings"]
            for name, each in types.attributes.items():
                value, kind = func.modules_collection[settings][name].value, griffe.ParameterKind.keyword_only
                func.parameters.add(griffe.Parameter(name, annotation=each.annotation, default=value, kind=kind))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for name, method in pkg["async_llm.AsyncLLM"].functions.items():
            if any(str(each.value).startswith("_as_in(") for each in method.decorators):
                shown = {**pkg["text_calls.TextCalls"].functions, **pkg["llm.LLM"].functions}[name]
                method.parameters, method.returns = shown.parameters, shown.returns
