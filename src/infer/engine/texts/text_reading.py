"""How texts and pairs of texts become ids, each within the context."""

from collections.abc import Callable, Iterable
from typing import Any

from infer.engine.requests.host import Host
from infer.engine.requests.prompt_encoding import Prompt, prompt_ids
from infer.engine.step.request import check_prompt
from infer.engine.texts.text_ids import ReadText, TextIds
from infer.errors import ContextLengthError, InvalidRequestError
from infer.text.tokenizer.pairs import EncodedPair

Check = Callable[[], None]


def read_texts(
    host: Host, given: Iterable[Any], read: Callable[[Any], ReadText], check: Check, name: str = "text"
) -> TextIds:
    """Return what the model reads for each text. `check` is called before each, and may raise.

    Raises the errors of `read` and of `check_prompt` with the number of the text. `name` is the word for a text there.
    """
    limits, texts = host.requests.limits, list[ReadText]()
    for index, each in enumerate(given):
        check()
        try:
            text = read(each)
            texts.append(text._replace(ids=check_prompt(limits, text.ids, room=0)))
        except InvalidRequestError as error:
            raise type(error)(f"{name} {index}: {error}") from error
    return TextIds(texts, limits.max_seq_len)


def read_text(host: Host, text: Prompt, *, truncate: bool) -> ReadText:
    """Return a text, ids or messages as the model reads them, cut to the context.

    The tokens that the tokenizer adds after each text stay at the end. Raises ContextLengthError without `truncate`.
    """
    most = host.requests.limits.max_seq_len
    if not truncate and isinstance(text, str) and (least := host.tokenizer.least_num_tokens(text)) > most:
        raise _too_long(f"at least {least}", most)
    ids = prompt_ids(text, host.tokenizer, None)
    if len(ids) <= most:
        return ReadText(ids)
    if not truncate:
        raise _too_long(str(len(ids)), most)
    end = host.tokenizer.ending_ids if isinstance(text, str) else []
    return ReadText(ids[: most - len(end)] + end, is_cut=True)


def read_pair(
    host: Host, encode: Callable[[str, str], EncodedPair], first: str, second: str, *, truncate: bool
) -> ReadText:
    """Return what `encode` makes of two texts, with the second text cut to the context.

    Raises ContextLengthError for a pair that does not fit the context, or, with `truncate`, if the first is too long.
    """
    tokenizer, most = host.tokenizer, host.requests.limits.max_seq_len
    if not truncate and (least := tokenizer.least_num_tokens(first + second)) > most:
        raise _too_long(f"at least {least}", most)
    pair, own = encode(first, second), list[int]()
    if len(pair.ids) <= most:
        return ReadText(pair.ids, second_start=pair.second_start)
    if truncate:
        own = tokenizer.encode(second, add_special_tokens=False, parse_special=False)
    while (surplus := len(pair.ids) - most) > 0:
        if len(own) < surplus:
            if not truncate:
                raise _too_long(str(len(pair.ids)), most)
            problem = f"the first text of the pair has {len(pair.ids) - len(own)} tokens with its prompt"
            raise ContextLengthError(
                f"{problem} and the context holds {most}: only the second text is cut, so shorten the first or raise "
                "max_seq_len"
            )
        own = own[: len(own) - surplus]
        pair = encode(first, tokenizer.decode(own, skip_special_tokens=False))
    return ReadText(pair.ids, is_cut=True, second_start=pair.second_start)


def _too_long(count: str, most: int) -> ContextLengthError:
    message = f"the text has {count} tokens and the context holds {most}"
    return ContextLengthError(f"{message}: shorten it, raise max_seq_len or pass truncate=True")
