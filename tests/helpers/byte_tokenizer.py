"""A tokenizer whose token i is byte i; 256 and 257 end the text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS, END_OF_TURN = 256, 257
VOCAB_SIZE = 258


def write_byte_tokenizer(
    folder: Path, *, merges: Sequence[Any] = (), controls: Sequence[str] = (), added: Sequence[str] = (), **config: str
) -> None:
    """Write a tokenizer. Its ids are those of the bytes, of `merges`, of the two ends, of `controls`, and of `added`.

    `merges` are pairs of ASCII texts, which may have spaces. `added` tokens are not special.
    """
    alphabet = _byte_alphabet()
    spelt = [tuple("".join(alphabet[ord(letter)] for letter in part) for part in merge) for merge in merges]
    vocab = {alphabet[byte]: byte for byte in range(256)}
    vocab |= {left + right: 256 + index for index, (left, right) in enumerate(spelt)}
    fast = Tokenizer(BPE(vocab=vocab, merges=spelt))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<|im_end|>", *controls)])
    fast.add_tokens([AddedToken(text, special=False) for text in added])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} | config))


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
