"""Rules that split text into words before byte-pair encoding, by their names in GGUF files (`tokenizer.ggml.pre`).

A GGUF file names its pre-tokenizer instead of describing it. Each entry here describes it like the models' own
`tokenizer.json`. So a GGUF file and the folder from which it was converted give the same ids. If only llama.cpp's form
(`llama.cpp/src/llama-vocab.cpp`) is known, it is used. Some patterns are rewritten to take linear time: they give the
same pieces, but do not scan a long run again from each of its positions.
"""

import warnings
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

# GGUF's names of vocabularies that mark spaces: with SentencePiece's scores, and with merges.
WITH_SCORES, WITH_MERGES = "llama", "gemma4"


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer. Each step splits the pieces of the previous one.

    The steps are punctuation, patterns, digits, words, and then GPT-2's alphabet.
    """

    patterns: tuple[str, ...] = ()
    punctuation_first: bool = False
    """True if runs of punctuation are pieces."""
    individual_digits: bool = False
    gpt2_words: bool = False
    """True if text is also split by GPT-2's own pattern."""
    digits_of_bytes: bool = False
    """True if, as the last step in GPT-2's alphabet for bytes, runs of digits are split into groups of three."""
    composes: bool = False
    """True if Unicode NFC is applied first."""
    ignore_merges: bool = False
    """True if a word in the vocabulary is always that token, whatever the merges are."""
    adds_bos: bool = False
    num_separators: int = 0
    """Number of end tokens between the two texts of a pair: 1 in BERT's form, 2 in RoBERTa's; 0: no form for pairs."""
    marks_spaces: bool = False
    """True if there are no words and no alphabet for bytes: spaces become ▁, as in SentencePiece, and all is merged."""

    def make(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer of the library, for rules that do not mark spaces."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.punctuation_first:
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if self.individual_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        if self.digits_of_bytes:
            steps.append(pre_tokenizers.Digits(individual_digits=False))
            steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"))
        return pre_tokenizers.Sequence(steps)


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """Return the rules with this name. An unknown name gets the default rules and a warning.

    Words are then split slightly differently than in training.
    """
    if name not in PRE_TOKENIZERS:
        warnings.warn(
            f"pre-tokenizer {name!r} is not known: text is split by 'default', and answers may be worse",
            stacklevel=2,
        )
    return PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"])


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


def _cased_words(suffix: str, without: str = "") -> str:
    """Return a pattern of words that change case at most once, as in tokenizers since o200k.

    `without` excludes characters from both cases.
    """
    first, rest = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{first}*{rest}+{suffix}|{before}{first}+{rest}*{suffix}"


_OTHERS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_OTHERS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_UFAKZEKA = rf"{_LETTERS}|\p{{N}}|{_OTHERS}"
_TEKKEN = rf"{_cased_words('')}|\p{{N}}|{_OTHERS_AND_SLASHES}"
_O200K_WORDS = _cased_words(_CONTRACTIONS + "?")
_O200K = rf"{_O200K_WORDS}|\p{{N}}{{1,3}}|{_OTHERS_AND_SLASHES}"
_YOUTU = rf"{_O200K_WORDS}|\p{{N}}|{_OTHERS_AND_SLASHES}"
_KIMI_WORDS = _cased_words(_CONTRACTIONS + "?", without=r"&&[^\p{Han}]")
_KIMI = rf"\p{{Han}}+|{_KIMI_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# `\s*[\r\n]+` is tried at the start of a run of blanks, not again after each piece.
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|(?<![^\S\r\n])\s*[\r\n]+"
    rf"|{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEEPSEEK3_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_SPARK_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]"
    r"|\s+(?!\S)|\s+"
)
# Letters with case, written as escapes, because editors confuse some with similar letters.
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LAST_SPACES = r"(?<!\s)\s++$"  # `\s+$`, tried once per run
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"

# Digits in threes, counted from the right. First a whole run is a piece. A look at the rest of the piece finds the
# first
# one to three digits, and the others follow directly (`\G`: the end of the last match).
_DIGITS_FROM_THE_RIGHT = (r"\p{N}+", r"\A\p{N}{1,3}(?=(?:\p{N}{3})*\z)|\G(?<=\p{N})\p{N}{3}")
# The same as `\d{1,3}(?=(?:\d{3})*\b)`, but only for runs that end with a word.
_WORD_DIGITS_FROM_THE_RIGHT = (r"(?<!\d)\d++\b", r"\A\d{1,3}(?=(?:\d{3})*\z)|\G(?<=\d)\d{3}")

_GPT2_WORDS = PreTokenizer(gpt2_words=True)
_STARCODER = PreTokenizer(individual_digits=True, gpt2_words=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_ONE_DIGIT = PreTokenizer((_QWEN2,))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS))
_GPT4O = PreTokenizer((_O200K,))
_TINY_AYA = PreTokenizer((*_WORD_DIGITS_FROM_THE_RIGHT, _O200K))
_MARKED = PreTokenizer(marks_spaces=True)

_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum", "exaone4"): _GPT2_WORDS,
    ("mpt", "olmo"): replace(_GPT2_WORDS, composes=True),
    ("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"): replace(
        _GPT2_WORDS, num_separators=2
    ),
    ("modern-bert",): replace(_GPT2_WORDS, composes=True, num_separators=1),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"): _STARCODER,
    ("command-r",): replace(_STARCODER, composes=True),
    (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ): _LLAMA_BPE,
    ("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"): PreTokenizer((_LLAMA3,)),
    ("minicpm5",): PreTokenizer((r"\p{N}{1,3}", _LLAMA3), ignore_merges=True),
    ("jais-2",): PreTokenizer((_JAIS2,)),
    ("qwen2", "stablelm2", "megrez"): replace(_ONE_DIGIT, composes=True),
    ("qwen35",): PreTokenizer((_QWEN35,)),
    ("deepseek-r1-qwen", "kormo", "hunyuan", "solar-open", "grok-2", "f2llmv2"): _ONE_DIGIT,
    ("ufakzeka",): PreTokenizer((_UFAKZEKA,)),
    ("spark2_5",): PreTokenizer((r"\p{N}{1,3}", _CJK, _SPARK_WORDS, r"\p{N}")),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    ("gpt-4o", "kanana2", "talkie", "minimax-m2"): _GPT4O,
    ("llama4",): replace(_GPT4O, adds_bos=True),
    ("tiny_aya", "cohere2moe"): _TINY_AYA,
    ("kimi-k2",): PreTokenizer((_KIMI,)),
    ("youtu",): PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((_BAILING,)),
    ("seed-coder",): PreTokenizer((_SEED,)),
    ("exaone-moe",): PreTokenizer((_EXAONE_MOE,)),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM,), individual_digits=True),
    ("falcon",): PreTokenizer(punctuation_first=True, gpt2_words=True, digits_of_bytes=True),
    ("deepseek-llm",): PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", _DEEPSEEK_LAST_SPACES, _DEEPSEEK_CJK),
        individual_digits=True,
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK), individual_digits=True),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("afmoe",): PreTokenizer((*_DIGITS_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3_WORDS)),
    ("superbpe",): PreTokenizer(_DIGITS_FROM_THE_RIGHT),
    ("gemma4", "sarvam-moe"): _MARKED,
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rules for names, rules in _NAMES.items() for name in names}
