"""One side of bench_peers: an engine in a process of its own that answers JSON lines.

    python peer_worker.py llama|infer|transformers    requests on stdin, one answer a line on stdout
    python peer_worker.py llama|infer cold OPTIONS    load, say one token, then how much is resident

The llama side needs nothing but llama-cpp-python, so that it runs in an environment without infer.
Tokens are ids without meaning, and different in every request, so that no side finds its answer in a cache.
"""

import ctypes
import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TextIO

COLD_PROMPT = "Once upon a time"
COLD_TOKENS = 64


class Engine(ABC):
    """What both sides can do. All times are in seconds."""

    @abstractmethod
    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        """Greedy: `prefill`, the time to the first token, and `decode`, that of the `new_tokens` after it."""

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def runs_on(self) -> str:
        """The instructions that its kernels use."""


class LlamaEngine(Engine):
    """llama.cpp through its C interface: the loop costs it next to nothing in Python. Variant: "", or "flash"."""

    def __init__(self, path: str, threads: int, context: int, variant: str) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._llama = llama_cpp.Llama(
            path,
            n_threads=threads,
            n_threads_batch=threads,
            n_ctx=context,
            n_batch=512,
            flash_attn=variant == "flash",
            verbose=False,
        )
        self._context = self._llama.ctx
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        start = time.perf_counter()
        for first in range(0, len(prompt), 512):
            self._decode(prompt[first : first + 512])
        token = self._sample()
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            self._decode([token])
            token = self._sample()
        return {"prefill": prefilled - start, "decode": time.perf_counter() - prefilled}

    def encode(self, text: str) -> list[int]:
        return self._llama.tokenize(text.encode())

    def runs_on(self) -> str:
        known = self._api.llama_print_system_info().decode().split("|")
        return " ".join(name.split()[-1] for name, _, value in (part.partition("=") for part in known) if "1" in value)

    def write_logits(self, tokens: list[int], start: int, path: str) -> None:
        """float32 logits after each of the tokens, row by row; those before `start` were read before."""
        if start == 0:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        batch = self._api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = ctypes.c_float * (len(tokens) * self._llama.n_vocab())
        logits = ctypes.cast(self._api.llama_get_logits(self._context), ctypes.POINTER(rows))
        Path(path).write_bytes(bytes(logits.contents))

    def _decode(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _sample(self) -> int:
        return self._api.llama_sampler_sample(self._sampler, self._context, -1)


class InferEngine(Engine):
    """Variant: a precision."""

    def __init__(self, path: str, threads: int, context: int, variant: str) -> None:
        from infer import LLM, SamplingParams

        self._params = SamplingParams
        options = {} if variant == "exact" else {"precision": variant}  # exact is the default
        self._llm = LLM(path, threads=threads, max_seq_len=context, **options)

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        params = self._params(temperature=0, max_new_tokens=new_tokens + 1, ignore_eos=True)
        timing = self._llm.generate(prompt, params).timing
        return {"prefill": timing.prefill_time_s, "decode": timing.total_time_s - timing.prefill_time_s}

    def encode(self, text: str) -> list[int]:
        return self._llm.tokenizer.encode(text)

    def runs_on(self) -> str:
        from infer.backends.cpu.isa import instruction_set

        return instruction_set().name


class TransformersEngine(Engine):
    """The weights dequantised, in torch. Variant: a dtype."""

    def __init__(self, path: str, threads: int, context: int, variant: str) -> None:
        import torch

        from bench_transformers import TransformersEngine as Model

        torch.set_num_threads(threads)
        self._model = Model(path, getattr(torch, variant))
        self._runs_on = torch.backends.cpu.get_cpu_capability()

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        return self._model.measure(prompt, new_tokens)._asdict()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def runs_on(self) -> str:
        return self._runs_on


ENGINES: dict[str, type[Engine]] = {"llama": LlamaEngine, "infer": InferEngine, "transformers": TransformersEngine}


def make_prompt(length: int, seed: int) -> list[int]:
    """Ids from 1,000 to 30,999, which every model here has; another seed, another sequence."""
    state, ids = seed * 2654435761 % 2**32, []
    for _ in range(length):
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append(1000 + (state >> 8) % 30000)
    return ids


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(kind: str, answers: TextIO) -> None:
    engine = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            match request.pop("do"):
                case "load":
                    start = time.perf_counter()
                    engine = ENGINES[kind](**request)
                    answer = {"load": time.perf_counter() - start, "runs_on": engine.runs_on()}
                case "measure":
                    assert engine is not None, "load a model first"
                    prompt = make_prompt(request["prompt_tokens"], request["seed"])
                    answer = engine.measure(prompt, request["new_tokens"])
                case "logits":
                    assert isinstance(engine, LlamaEngine), "load a model of llama.cpp first"
                    engine.write_logits(**request)
                    answer = {"path": request["path"]}
                case "requantize":
                    answer = requantize(**request)
                case unknown:
                    raise ValueError(f"unknown request {unknown}")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def requantize(source: str, target: str, file_type: str) -> dict[str, str]:
    """llama.cpp's own quantiser, from whatever type the source has."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    options.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    return {"target": target}


def run_cold(kind: str, options: dict[str, Any], answers: TextIO) -> None:
    """The parent holds the clock: it started before this process did."""
    engine = ENGINES[kind](**options)
    prompt = engine.encode(COLD_PROMPT)
    engine.measure(prompt, 0)
    print("first token", file=answers, flush=True)
    engine.measure(prompt, COLD_TOKENS)
    print(resident_bytes(), file=answers, flush=True)


def main() -> None:
    # Whatever a library prints goes to stderr: stdout carries the protocol alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    match sys.argv[1:]:
        case [kind]:
            serve(kind, answers)
        case [kind, "cold", options]:
            run_cold(kind, json.loads(options), answers)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
