"""Trials of a grammar by llguidance and by xgrammar: it is compiled, and asked for the tokens that it allows.

They run in a process that may hang, crash or run out of memory (`prepare.preparing_child`).
"""

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from infer.errors import InvalidRequestError
from infer.system.processor_limit import OverLimitError, limited
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.libraries import ENFORCED, compile_with_xgrammar, llguidance_limits, source_of
from infer.text.grammar.reading import Read, read_grammar
from infer.text.grammar.schema_search import SEARCH_SECONDS

Try = Callable[[Source], str]

COMPILE_SECONDS = 2.0  # processor seconds of the library
_NUM_WALKS, _WALK_BYTES = 2, 8  # short random texts, which find grammars that cannot be followed


def llguidance_try(library: Any, tokenizer: Any = None) -> Try:
    """Return a trial that runs in a fork of this process, which may hang or overflow its stack."""
    follow = llguidance_follow(library, tokenizer)
    return lambda source: _in_a_fork(follow, source)


def llguidance_follow(library: Any, tokenizer: Any = None) -> Try:
    """Return a trial that compiles a source and follows it for a few bytes.

    The first 256 ids of the tokenizer must be the bytes. None is a tokenizer with only these ids.
    """
    tokenizer = tokenizer or library.LLTokenizer("byte")

    def follow(source: Source) -> str:
        limits = llguidance_limits(library, source.text)
        compiled = library.LLMatcher(tokenizer, source.text, log_level=0, limits=limits)
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

    return follow


def xgrammar_try(library: Any) -> Try:
    """Return a trial that runs in this process, because the library may have threads.

    SIGPROF ends the process if the trial takes too long.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    info = library.TokenizerInfo([*tokens, b"</s>"], library.VocabType.RAW, stop_token_ids=[256])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def follow(source: Source) -> str:
        before = signal.signal(signal.SIGPROF, signal.SIG_DFL)
        left = signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)[0]
        try:
            matcher = library.GrammarMatcher(compile_with_xgrammar(compiler, library, source.kind, source.text))
        except Exception as error:  # tvm_ffi raises any exception of C++
            return str(error) or type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_PROF, left)
            signal.signal(signal.SIGPROF, before)
        mask = library.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(mask)
        return "" if mask.any() else "no text fulfils it"

    return follow


TRIES: dict[str, Callable[[Any], Try]] = {"llguidance": llguidance_try, "xgrammar": xgrammar_try}


def _in_a_fork(follow: Try, source: Source) -> str:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program that ignores it, such as a worker of Ray, passes this on
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
            os.close(reading)
            with open(writing, "w", encoding="utf-8", errors="replace") as file:
                file.write(follow(source))
        except BaseException:  # no library should raise it: reported as a crash
            os._exit(1)
        os._exit(0)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as file:
            found = file.read()
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGPROF:
        return f"takes more than {COMPILE_SECONDS:g} s to compile: make it smaller or less ambiguous"
    return "too large or too deep to compile" if status else found


def read_within(
    library: Any, name: str, try_: Try, grammar: Grammar, seconds: float, search_seconds: float = SEARCH_SECONDS
) -> Read:
    """Read and try a grammar within a limit of processor seconds. The time of forks counts only in a search.

    Raises InvalidRequestError if the grammar is refused or takes too much time or memory.
    """
    try:
        with limited(seconds):
            source = partial(source_of, name, library)
            return read_grammar(grammar, ENFORCED[name], source, try_, search_seconds)
    except OverLimitError:
        raise InvalidRequestError(f"{grammar.where}: takes more than {seconds:g} s to read: make it smaller") from None
    except MemoryError:
        raise InvalidRequestError(f"{grammar.where}: takes too much memory: make it smaller") from None
