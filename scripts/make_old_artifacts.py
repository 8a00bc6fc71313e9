"""Make the files of `tests/data/old` again, or those of another commit: a tiny model, and what `infer` wrote for it.

Run it with the sources of the commit, from the root of the project:

    git worktree add ../old COMMIT
    PYTHONPATH=../old/src:tests/helpers .venv/bin/python scripts/make_old_artifacts.py tests/data/old

`tests/project/test_old_artifacts.py` reads the files with the sources of today.
"""

import contextlib
import io
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from byte_tokenizer import END_OF_TURN, EOS, VOCAB_SIZE, write_byte_tokenizer
from infer import LLM, SamplingParams
from infer.cli import main

HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 32, 2, 16, 48, 2
MODIFIED_NS = 1_700_000_000 * 10**9  # time of the weights' file, which names the prefixes too
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LETTERS = [*range(32, 127)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "allowed_token_ids": LETTERS}
SAMPLED = GREEDY | {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2, "seed": 7}
PROMPT = "".join(chr(97 + (7 * index + index // 9) % 26) for index in range(150))  # two pages and a part of one
ROWS: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": "Once upon a time", **GREEDY},
    {"id": "sampled", "prompt": "Once upon a time", **GREEDY, "temperature": 1.0},
    {"id": "chat", "messages": [{"role": "user", "content": "hello"}], **GREEDY},
    {"custom_id": "openai", "method": "POST", "url": "/v1/completions",
     "body": {"model": "model", "prompt": "The end", "max_tokens": 12, "temperature": 0, "seed": 3}},
]  # fmt: skip
NUM_WHOLE_ROWS = 2  # the third line of the unfinished output is cut


def make_model(folder: Path) -> None:
    """Write a Llama whose weights are integers of a fixed sequence, divided by a constant, in bfloat16."""
    folder.mkdir(parents=True)
    numbers = random.Random(0)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "eos_token_id": [EOS, END_OF_TURN],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: _weights(shape, numbers) for name, shape in _shapes().items()}, folder / "model.safetensors")
    write_byte_tokenizer(folder, chat_template=TEMPLATE)


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for index in range(LAYERS):
        at = f"model.layers.{index}"
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", HEAD_DIM), ("v", HEAD_DIM)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes


def _weights(shape: tuple[int, ...], numbers: random.Random) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = torch.tensor([numbers.randint(-127, 127) for _ in range(count)]).reshape(shape) / 256
    return (values + 1 if len(shape) == 1 else values).bfloat16()


def run_command(*arguments: str) -> tuple[str, str]:
    """Run a command. Return its stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([*arguments]) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def make_session(llm: LLM, path: Path) -> dict[str, Any]:
    """Save a session. Return its messages, and the ids of two answers that continue it."""
    session = llm.session(system="be brief")
    session.send("hello", SamplingParams(**GREEDY))
    session.save(path, note={"topic": "old files"})
    asked = {"greedy": GREEDY, "sampled": SAMPLED}
    answers = {name: session.fork().send("and now", SamplingParams(**params)) for name, params in asked.items()}
    return {"messages": session.messages} | {name: answer.token_ids for name, answer in answers.items()}


def make_prefixes(model: Path, folder: Path) -> list[int]:
    """Fill a folder with the pages of a prompt. Return the ids of its answer."""
    stores = [module for name, module in sys.modules.items() if name.endswith(".kvcache.prefix_store")]
    stores[0].base_folder = lambda: folder  # its package has another name in other commits
    found = []
    for _ in range(2):  # the second process would find the pages
        with LLM(model, prefix_disk="1GB") as llm:
            found.append(llm.generate(PROMPT, SamplingParams(**SAMPLED)))
    assert found[1].disk_tokens == 128
    assert found[1].token_ids == found[0].token_ids
    return found[0].token_ids


def make_batch(folder: Path) -> None:
    """Write rows, the lines of all rows, and the output of a run that was killed within its third line."""
    folder.mkdir()
    rows, whole = folder / "rows.jsonl", folder / "whole.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run_command("batch", str(rows), str(whole), "--model", "model", "--batch-size", "1", "--quiet")
    lines = whole.read_text().splitlines(keepends=True)
    half = lines[NUM_WHOLE_ROWS][: len(lines[NUM_WHOLE_ROWS]) // 2]
    (folder / "unfinished.jsonl").write_text("".join(lines[:NUM_WHOLE_ROWS]) + half)


def make_permalinks() -> list[dict[str, str]]:
    """Return the permalinks of a completion and of an answer in a chat, with the answers' texts."""
    letters = ["--allowed-token-ids", ",".join(map(str, LETTERS)), "-n", "12"]
    asked = [["Once upon a time", "--seed", "7", "--temperature", "1"], ["hello", "--chat", "--temperature", "0"]]
    found = []
    for arguments in asked:
        text, told = run_command("generate", *arguments, *letters, "--permalink", "--quiet", "--model", "model")
        found.append({"url": told.splitlines()[-1], "text": text})
    return found


def run() -> None:
    folder = Path(sys.argv[1]).resolve()
    for name in ("model", "prefixes", "batch"):
        shutil.rmtree(folder / name, ignore_errors=True)
    make_model(folder / "model")
    os.utime(folder / "model" / "model.safetensors", ns=(MODIFIED_NS, MODIFIED_NS))
    os.chdir(folder)  # so that the outputs name the model `model`
    with LLM("model") as llm:
        made: dict[str, Any] = {"session": make_session(llm, folder / "session.safetensors")}
    made["prompt"] = {"text": PROMPT, "answer": make_prefixes(folder / "model", folder)}
    make_batch(folder / "batch")
    made |= {"greedy": GREEDY, "sampled": SAMPLED, "modified_ns": MODIFIED_NS}
    made["permalinks"] = make_permalinks()
    (folder / "answers.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    run()
