"""An extension of Griffe for `make docs`: a field that is declared with `parameter(default, …)` shows its default.

`LLM` shows its keywords, which are the fields of `ModelSettings`.
"""

from typing import Any

import griffe


class DeclaredDefaults(griffe.Extension):
    """Replaces each declaration by its default, before the fields become signatures."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = attr.value
        if isinstance(declared, griffe.ExprCall) and str(declared.function) == "parameter":
            attr.value = declared.arguments[0]

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if "Unpack[_ModelKeywords]" in [str(each.annotation) for each in func.parameters]:
            types, settings = func.modules_collection["infer.llm._ModelKeywords"], "infer.model_settings.ModelSettings"
            del func.parameters["settings"]
            for name, each in types.attributes.items():
                default = func.modules_collection[settings][name].value
                func.parameters.add(griffe.Parameter(name, annotation=each.annotation, default=default,
                                                     kind=griffe.ParameterKind.keyword_only))  # fmt: skip
