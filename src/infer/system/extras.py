"""The command that installs an extra of this package. Loads nothing."""


def install_extra(name: str) -> str:
    """Return the fix for a package that is missing: the command that installs its extra.

    Until a release is on the package index, the only place that everybody has is a clone (docs/install.md).
    """
    return f"run pip install '.[{name}]' in the clone of infer"
