"""Old name of `infer.serving.distributed.ray_serve`, which works for one release: Ray's configs have it as a path."""

import warnings

from infer.serving.distributed.ray_serve import app

__all__ = ["app"]

warnings.warn(
    "infer.distributed.ray_serve:app is now infer.serving.distributed.ray_serve:app: change `import_path`",
    FutureWarning,  # which is shown: Ray imports this, not the user's own code
    stacklevel=2,
)
