"""A tokenizer whose token i is byte i; 256 and 257 end the text."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS, END_OF_TURN = 256, 257
VOCAB_SIZE = 258


def write_byte_tokenizer(folder: Path, **config: str) -> None:
    alphabet = _byte_alphabet()
    fast = Tokenizer(BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<|im_end|>", special=True)])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} | config))


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
