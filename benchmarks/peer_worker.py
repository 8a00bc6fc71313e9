"""One side of bench_peers: an engine in a separate process.

    python peer_worker.py llama|llama-bench|infer|transformers      answers JSON lines
    python peer_worker.py llama-texts                               the same, for hidden states of texts by an encoder
    python peer_worker.py llama|infer|transformers cold OPTIONS     loads, prints one token, then the resident memory

The llama side needs only llama-cpp-python, so that it runs in an environment without infer. Tokens are ids without
meaning, and different in every request, so that no side finds its answer in a cache.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from harness import answer_lines
from load import make_prompt

COLD_PROMPT, COLD_TOKENS = [4000, 5000, 6000, 7000], 64
STEP_TOKENS, STEP_TEXTS = 512, 64  # tokens and texts in one step


class Engine(ABC):
    """An engine that decodes greedily. All times are in seconds."""

    @abstractmethod
    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        """Return `prefill`, the time to the first token, and `decode`, the time of the `new_tokens` after it."""

    @abstractmethod
    def runs_on(self) -> str:
        """Return the instruction set of its kernels."""


class LlamaEngine(Engine):
    """llama.cpp through its C interface, so that Python takes little time."""

    def __init__(self, path: str, threads: int, context: int, *, flash: bool = False) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._llama = llama_cpp.Llama(
            path,
            n_threads=threads,
            n_threads_batch=threads,
            n_ctx=context,
            n_batch=512,
            flash_attn=flash,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        self._forget()
        start = time.perf_counter()
        for first in range(0, len(prompt), 512):
            self._decode(prompt[first : first + 512])
        token = self._sample()
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            self._decode([token])
            token = self._sample()
        return {"prefill": prefilled - start, "decode": time.perf_counter() - prefilled}

    def runs_on(self) -> str:
        known = self._api.llama_print_system_info().decode().split("|")
        return " ".join(name.split()[-1] for name, _, value in (part.partition("=") for part in known) if "1" in value)

    def write_logits(self, tokens: list[int], start: int, path: str) -> None:
        """Write the float32 logits after each token, row by row. Tokens before `start` were read before."""
        if start == 0:
            self._forget()
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

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _decode(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _sample(self) -> int:
        return int(self._api.llama_sampler_sample(self._sampler, self._context, -1))


class LlamaBenchEngine(Engine):
    """llama.cpp's own program, which loads the model for each measure, and warms up before it."""

    def __init__(self, path: str, threads: int, context: int, *, program: str, flash: bool = False) -> None:
        self._command = [program, "-m", path, "-t", str(threads), "-fa", str(int(flash)), "-r", "1", "-o", "json"]

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        """Return `decode`, or without new tokens `prefill`: the program times one of them."""
        if new_tokens:
            return {
                "decode": new_tokens / self._run("-p", "0", "-n", str(new_tokens), "-d", str(len(prompt)))["avg_ts"]
            }
        return {"prefill": len(prompt) / self._run("-p", str(len(prompt)), "-n", "0")["avg_ts"]}

    def runs_on(self) -> str:
        found = self._run("-p", "1", "-n", "0")
        return f"build {found['build_number']}, {found['backends']}, {found['cpu_info']}"

    def _run(self, *options: str) -> dict[str, Any]:
        found = subprocess.run(
            [*self._command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        (result,) = json.loads(found.stdout)
        return dict(result)


class InferEngine(Engine):
    def __init__(self, path: str, threads: int, context: int, **options: Any) -> None:
        from infer import LLM

        if options.pop("ranks", False):  # one rank per thread
            options, threads = options | {"tensor_parallel": threads}, 1
        self._llm = LLM(path, threads=threads, max_seq_len=context, **options)

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        timing = self._llm.generate(prompt, temperature=0, max_new_tokens=new_tokens + 1, ignore_eos=True).timing
        return {"prefill": timing.prefill_time_s, "decode": timing.total_time_s - timing.prefill_time_s}

    def runs_on(self) -> str:
        backend = self._llm.model.backend
        return backend.instruction_set() or backend.description()


class TransformersEngine(Engine):
    """The weights of a folder, or the dequantised weights of a GGUF file, in torch."""

    def __init__(self, path: str, threads: int, context: int, *, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch, file = torch, Path(path)
        folder, options = (file, {}) if file.is_dir() else (file.parent, {"gguf_file": file.name})
        self._model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), attn_implementation="sdpa", **options
        )

    def measure(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        with self._torch.inference_mode():
            start = time.perf_counter()
            out = self._model(self._torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            prefilled = time.perf_counter()
            for _ in range(new_tokens):
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return {"prefill": prefilled - start, "decode": time.perf_counter() - prefilled}

    def runs_on(self) -> str:
        return str(self._torch.backends.cpu.get_cpu_capability())


class LlamaTexts:
    """An encoder in llama.cpp, with flash attention, which is twice as fast.

    As in its server, a step has at most 512 tokens of several texts.
    """

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._llama = llama_cpp.Llama(
            path,
            embedding=True,
            pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN,
            n_threads=threads,
            n_threads_batch=threads,
            n_ctx=STEP_TOKENS,
            n_batch=STEP_TOKENS,
            n_ubatch=STEP_TOKENS,
            n_seq_max=STEP_TEXTS,
            flash_attn=True,
            verbose=False,
        )

    def seconds(self, texts: list[list[int]]) -> float:
        """Compute texts of the same length. Return the seconds."""
        per_step = max(1, STEP_TOKENS // len(texts[0]))
        began = time.perf_counter()
        for start in range(0, len(texts), per_step):
            self._encode(texts[start : start + per_step])
        return time.perf_counter() - began

    def _encode(self, texts: list[list[int]]) -> None:
        batch = self._api.llama_batch_init(STEP_TOKENS, 0, 1)
        tokens = [(text, place, token) for text, ids in enumerate(texts) for place, token in enumerate(ids)]
        batch.n_tokens = len(tokens)
        for i, (text, place, token) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
        status = self._api.llama_encode(self._llama.ctx, batch)
        self._api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_encode returned {status}")
        self._api.llama_get_embeddings_seq(self._llama.ctx, 0)[0]


ENGINES: dict[str, type[Engine]] = {
    "llama": LlamaEngine, "llama-bench": LlamaBenchEngine, "infer": InferEngine, "transformers": TransformersEngine,
}  # fmt: skip


def serve_texts() -> None:
    made = dict[str, LlamaTexts]()

    def load(**options: Any) -> None:
        made["engine"] = LlamaTexts(**options)

    answer_lines(load=load, seconds=lambda texts: made["engine"].seconds(texts), requantize=requantize)


def serve(kind: str) -> None:
    made = dict[str, Any]()

    def load(**options: Any) -> str:
        made["engine"] = ENGINES[kind](**options)
        return made["engine"].runs_on()

    def measure(prompt_tokens: int, new_tokens: int, seed: int) -> dict[str, float]:
        return made["engine"].measure(make_prompt(prompt_tokens, seed), new_tokens)

    answer_lines(
        load=load, measure=measure, logits=lambda **request: made["engine"].write_logits(**request),
        requantize=requantize,
    )  # fmt: skip


def requantize(source: str, target: str, file_type: str) -> None:
    """Use llama.cpp's own quantiser, for a source of any type."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    options.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")


def run_cold(kind: str, options: dict[str, Any]) -> None:
    """Answer once in a new process. The parent has the clock, because it started before this process did."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[kind](**options)
    engine.measure(COLD_PROMPT, 0)
    print("first token", file=answers, flush=True)
    engine.measure(COLD_PROMPT, COLD_TOKENS)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    print(pages * resource.getpagesize(), file=answers, flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["llama-texts"]:
            serve_texts()
        case [kind]:
            serve(kind)
        case [kind, "cold", options]:
            run_cold(kind, json.loads(options))
        case _:
            sys.exit(__doc__)
