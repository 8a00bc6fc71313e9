"""A task that needs memory, and a tiny hybrid of `transformers` that is trained on it: its gates are not random.

A text sets letters to digits and asks for them again: in `+a3+b7a3+a5b7a5` each letter without a plus is followed by
the digit that it was last set to. All tokens are bytes, so the tokenizer of `byte_tokenizer` reads the texts.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer

STAGES = ((2, 32), (4, 64), (8, 96))  # number of letters, and of tokens of a text
NUM_LETTERS = STAGES[-1][0]
MAX_STEPS = 300  # steps of a stage; most take about 100
NUM_TRIES = 3  # each with its own seed: with a few seeds, the model does not learn
_BATCH, _LEARNING_RATE, _WARM_UP_STEPS, _RECENT_STEPS, _LEARNT = 16, 2e-3, 20, 8, 0.99

CONFIG = Qwen3_5TextConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    # Attention comes first: a digit follows its letter, so only the state of the second layer can carry it.
    layer_types=["full_attention", "linear_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.05,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=EOS,
)


class RecallText(NamedTuple):
    token_ids: list[int]
    asked: list[int]  # positions of letters whose digit follows from the text before

    @property
    def digits(self) -> list[int]:
        """The token after each of the positions `asked`."""
        return [self.token_ids[position + 1] for position in self.asked]


def make_text(rng: Random, num_letters: int, num_tokens: int) -> RecallText:
    """Return a text of at least `num_tokens` tokens that ends with an answer."""
    token_ids, asked, digit_by_letter = list[int](), list[int](), dict[int, int]()
    while len(token_ids) < num_tokens or asked[-1:] != [len(token_ids) - 2]:
        letter = ord("a") + rng.randrange(num_letters)
        if letter in digit_by_letter and rng.random() < 0.6:
            asked.append(len(token_ids))
        else:
            digit_by_letter[letter] = ord("0") + rng.randrange(10)
            token_ids.append(ord("+"))
        token_ids += [letter, digit_by_letter[letter]]
    return RecallText(token_ids, asked)


def train(folder: Path) -> Any:
    """Train a model, save it to the folder with its tokenizer, and return it. A stage ends when it is learnt.

    Raises RuntimeError if no try has learnt every stage.
    """
    for seed in range(NUM_TRIES):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(CONFIG).float().train()
        _begin_layers(model)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
        rng = Random(seed)
        with _one_thread():
            is_learnt = all(_learns(model, optimizer, rng, *stage) for stage in STAGES)
        if is_learnt:
            model.eval().save_pretrained(folder)
            write_byte_tokenizer(folder)
            return model
    raise RuntimeError(f"{NUM_TRIES} tries of {MAX_STEPS} steps per stage did not learn to recall digits")


@torch.no_grad()
def _begin_layers(model: Any) -> None:
    """Set gates and taps as in the first step of large models' training: heads forget in 10 to 1,000 tokens."""
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            net = layer.linear_attn
            steps = torch.exp(torch.empty_like(net.dt_bias).uniform_(-6.9, -2.3))
            net.dt_bias.copy_(torch.log(torch.expm1(steps)))
            net.A_log.uniform_(0, 2)
            net.conv1d.weight.uniform_(-0.5, 0.5)


def _learns(model: Any, optimizer: torch.optim.Optimizer, rng: Random, num_letters: int, num_tokens: int) -> bool:
    """Train until almost all answers of some steps are right. Return False if they are not after `MAX_STEPS` steps."""
    shares = deque[float](maxlen=_RECENT_STEPS)  # share of right answers in each of the last steps
    for step in range(MAX_STEPS):
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * min(1, (step + 1) / _WARM_UP_STEPS)
        texts = [make_text(rng, num_letters, num_tokens) for _ in range(_BATCH)]
        length = max(len(text.token_ids) for text in texts)
        logits = model(torch.tensor([text.token_ids + [0] * (length - len(text.token_ids)) for text in texts])).logits
        found = torch.cat([logits[row, text.asked] for row, text in enumerate(texts)])
        wanted = torch.tensor([digit for text in texts for digit in text.digits])
        optimizer.zero_grad()
        F.cross_entropy(found, wanted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shares.append((found.argmax(-1) == wanted).float().mean().item())
        if len(shares) == _RECENT_STEPS and min(shares) >= _LEARNT:
            return True
    return False


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: steps are so small that two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
