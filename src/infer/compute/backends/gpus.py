"""NVIDIA GPUs that torch and the environment report, and the reason if none can be used, in one line with a fix.

No other module asks torch which GPUs exist. CUDA_VISIBLE_DEVICES hides and orders them before torch sees any.
"""

import os
from importlib.util import find_spec
from typing import NamedTuple

import torch

LEAST_CAPABILITY = (7, 0)  # Volta: older ones have no kernels of Triton's


class Gpu(NamedTuple):
    number: int
    name: str
    capability: tuple[int, int]
    total_bytes: int

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name}, sm_{major}{minor}, {self.total_bytes / 2**30:.0f} GiB"


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch sees, in the order of their indices."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(index, each.name, (each.major, each.minor), each.total_memory) for index, each in enumerate(found)]


def trouble_with(index: int | None) -> str | None:
    """Return the reason why cuda, or cuda:index, cannot be used, and the fix; None if it can be used."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA: install one for CUDA (pytorch.org/get-started), or use device='cpu'"
    gpus = visible_gpus()
    if not gpus:
        return _why_none()
    if (index or 0) >= len(gpus):
        names = ", ".join(f"cuda:{gpu.number} is a {gpu.name}" for gpu in gpus)
        return f"there is no cuda:{index}: {names}"
    gpu = gpus[index or 0]
    if gpu.capability < LEAST_CAPABILITY:
        return f"{gpu} is too old: the kernels need Volta (sm_70) or newer, use device='cpu'"
    return None


def has_triton() -> bool:
    return find_spec("triton") is not None


def is_of_use() -> bool:
    """Return True if the first GPU can run our kernels. device="auto" uses the GPU then."""
    return has_triton() and trouble_with(None) is None


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of a GPU's memory can still be allocated: free ones, and those that torch reserved but does
    not use.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _why_none() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip().strip("-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: unset it, or name one"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        why = ""
    except (RuntimeError, AssertionError) as error:
        why = str(error)
    if "too old" in why:
        return (
            f"the NVIDIA driver is too old for CUDA {torch.version.cuda}, which torch is built for: update the driver, "
            "or install a torch for an older CUDA"
        )
    if "no NVIDIA driver" in why:
        return "there is no NVIDIA driver here: install one, or use device='cpu'"
    return "torch sees no CUDA device here: use device='cpu'"
