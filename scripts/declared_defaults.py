"""Extensions of Griffe for `make docs`: defaults and signatures that are declared elsewhere are shown.

A field that is declared with `parameter(default, …)` shows its default. A method with the decorator `_as_in(LLM.x)`
shows the arguments and the result of `LLM.x`.
"""

from typing import Any

import griffe


class DeclaredDefaults(griffe.Extension):
    """Replaces each declaration by its default, before the fields become signatures."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = attr.value
        if isinstance(declared, griffe.ExprCall) and str(declared.function) == "parameter":
            attr.value = declared.arguments[0]


class DeclaredSignatures(griffe.Extension):
    """Gives methods of `AsyncLLM` the arguments of the methods that their decorators name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for function in pkg["async_llm.AsyncLLM"].functions.values():
            for decorator in function.decorators:
                if str(decorator.value).startswith("_as_in(LLM."):
                    function.parameters = pkg["llm.LLM"][function.name].parameters
                    function.returns = pkg["llm.LLM"][function.name].returns
