"""Compiles grammars where a crash, a hang or a flood of memory hurts nobody: run as a program by `trial`.

Reads lines of JSON, [kind, text]; answers each with a line of JSON, the error or "". Imports nothing of infer, so that
it starts in a tenth of a second.
"""

import importlib
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

Check = Callable[[str, str], str]

_STACK_BYTES = 4 << 20  # half of what a thread has: whatever passes here has room to spare there


def llguidance_check() -> Check:
    library = importlib.import_module("llguidance")
    tokenizer = library.LLTokenizer("byte")
    limits = library.LLParserLimits(verbose_errors=False)

    def check(kind: str, text: str) -> str:
        matcher = library.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        matcher.compute_bitmask()
        return str(matcher.get_error()) if matcher.is_error() else ""

    return check


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
