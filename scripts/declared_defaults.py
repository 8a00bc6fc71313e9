"""An extension of Griffe for `make docs`: a field that is declared with `parameter(default, …)` shows its default."""

from typing import Any

import griffe


class DeclaredDefaults(griffe.Extension):
    """Replaces each declaration by its default, before the fields become signatures."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = attr.value
        if isinstance(declared, griffe.ExprCall) and str(declared.function) == "parameter":
            attr.value = declared.arguments[0]
