"""`check_gpu`'s section on several GPUs: nothing of a model on one device is placed on another."""

from collections.abc import Iterator
from typing import Any

import torch

from gpu_models import GREEDY, SHAPES, generated, make_model, make_runner, random_ids


def check_gpus(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Check that a model on cuda:1 writes what it writes on cuda:0, and leaves the memory of cuda:0 as it was."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        yield {"skipped": f"{count} GPUs are here, and this needs two"}
        return
    texts, shape = list[list[int]](), "tiny" if is_tiny else "two layers"
    for index in (1, 0):  # the second device first: until then the first has no context
        place = torch.device("cuda", index)
        model = make_model(shape, "Q4_0", place, 256)
        prompt = random_ids(20, 0, SHAPES[shape]["vocab_size"])
        texts.append(generated(make_runner(model, 1, 256), [prompt], 64, 16, **GREEDY)[0])
        if index == 1:
            stats = torch.cuda.memory_stats(0) if torch.cuda.is_initialized() else {}
            taken = stats.get("reserved_bytes.all.peak", 0)
            yield {"op": "bytes on cuda:0", "error": taken, "is_right": taken == 0}
    yield {"op": "the same text on cuda:1", "error": float(texts[0] != texts[1]), "is_right": texts[0] == texts[1]}
