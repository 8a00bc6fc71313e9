"""Compiles grammars where a crash, a hang or a flood of memory hurts nobody: run as a program by `sandbox`.

Reads lines of JSON, [kind, text]; answers each with a line of JSON, the error or "". Imports nothing of infer, so that
it starts in a tenth of a second.
"""

import importlib
import json
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

Check = Callable[[str, str], str]

_NUM_WALKS, _WALK_BYTES = 2, 8  # of texts that are begun, so that what cannot be followed is found here
_STACK_BYTES = 4 << 20  # half of what a thread has: whatever passes here has room to spare there


def llguidance_check() -> Check:
    library = importlib.import_module("llguidance")
    tokenizer = library.LLTokenizer("byte")

    def check(kind: str, text: str) -> str:
        limits = llguidance_limits(library, text)
        compiled = library.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        for seed in range(_NUM_WALKS):
            matcher, rng = compiled.deep_copy(), random.Random(seed)
            for _ in range(_WALK_BYTES):
                mask = matcher.compute_bitmask()
                if matcher.is_error():
                    return str(matcher.get_error())
                allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
                if not allowed:
                    break
                matcher.consume_token(rng.choice(allowed))
        return ""

    return check


def llguidance_limits(library: Any, text: str) -> Any:
    """The library's own limit is 2,000 items at one place, and 64 KiB of Lark may have 13,000 alternatives there.

    The fuel of texts that are read without a mask (drafts, forced text) is twenty times its own, 0.4 s: else words of
    `(\\S+\\s+){0,49}` in at most 500 characters end after 55. That of a mask stays what it is.

    What has few alternatives is given few items: an ambiguous grammar could else take a second for a token. Schemas
    and patterns, which begin with a brace here, are not ambiguous so.
    """
    num_items = 20_000 if text.startswith("{") else min(max(4_000, 2 * text.count("|")), 20_000)
    return library.LLParserLimits(
        verbose_errors=False,
        max_items_in_row=num_items,
        step_max_items=10 * num_items,
        initial_lexer_fuel=20_000_000,
    )


def xgrammar_check() -> Check:
    library = importlib.import_module("xgrammar")
    tokens = [bytes([byte]) for byte in range(256)]
    info = library.TokenizerInfo([*tokens, b"</s>"], library.VocabType.RAW, stop_token_ids=[256])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def check(kind: str, text: str) -> str:
        try:
            matcher = library.GrammarMatcher(compile_with_xgrammar(compiler, library, kind, text))
        except Exception as error:  # tvm_ffi raises whatever C++ threw
            return str(error) or type(error).__name__
        mask = library.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(mask)
        return "" if mask.any() else "no text fulfils it"

    return check


def compile_with_xgrammar(compiler: Any, library: Any, kind: str, text: str) -> Any:
    if kind == "json_schema":
        return compiler.compile_json_schema(text, any_whitespace=False, separators=(", ", ": "), strict_mode=False)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "ebnf":
        return compiler.compile_grammar(library.Grammar.from_ebnf(text))
    return compiler.compile_lark(text)


CHECKS: dict[str, Callable[[], Check]] = {"llguidance": llguidance_check, "xgrammar": xgrammar_check}


def limit(what: int, count: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (count if hard < 0 else min(count, hard), hard))


def main(backend: str, memory_bytes: int) -> None:
    limit(resource.RLIMIT_STACK, _STACK_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    check = CHECKS[backend]()
    limit(resource.RLIMIT_DATA, memory_bytes)
    print('""', flush=True)
    for line in sys.stdin:
        print(json.dumps(check(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
