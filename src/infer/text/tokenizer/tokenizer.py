"""The tokenizer of a model, from its folder or from the metadata of a GGUF file.

`tokenizers` converts text to ids. Ids are converted to text through one table of bytes, so that `decode` and the
streaming `Detokenizer` cannot differ. Instances may be shared between threads.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

import tokenizers

from infer.errors import InvalidRequestError
from infer.system.sized_cache import SizedCache
from infer.text.templates.chat_template import ChatTemplate
from infer.text.templates.special_tokens import SpecialTexts
from infer.text.tokenizer.decoding_rules import Bound, make_length_bound, make_token_bytes, read_decoding_rules
from infer.text.tokenizer.detokenizer import Detokenizer
from infer.text.tokenizer.gguf_vocabulary import END_NAMES
from infer.text.tokenizer.infill import InfillMarks, find_marks
from infer.text.tokenizer.tokenizer_files import read_folder, read_gguf
from infer.text.tokenizer.tokenizers_library import (
    MAX_TOKENS,
    EncodedPair,
    encode,
    encode_pair,
    make_text_backend,
    read_vocabulary,
)

_MOST_TEMPLATE_BYTES, _LEAST_BYTES, _BYTES_PER_CHARACTER = 8 << 20, 1_000, 4


@final
class Tokenizer:
    """Converter between text and ids, and from conversations to ids. `load_tokenizer` makes it.

    Args:
        backend: The tokenizer of the `tokenizers` package.
        named_tokens: The template's `bos_token`, `eos_token`, and so on.
        end_token_ids: Ids that end an answer. Ids outside the vocabulary are ignored.
        chat_templates: Chat templates by name.
        vocabulary: The text of each id, if it is already known.

    Examples:
        >>> tokenizer = load_tokenizer("smollm2")
        >>> tokenizer.decode(tokenizer.encode("Hello"))
        'Hello'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        end_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        self.backend = backend
        self._named_tokens = dict(named_tokens)
        self._chat_templates = dict(chat_templates or {})
        self._probed = SizedCache[ChatTemplate](_MOST_TEMPLATE_BYTES)  # requests may have their own templates
        self.allow_special = False  # the default for messages, which a call can change
        self._text_backend = make_text_backend(backend)  # two backends, because changing a flag would need a lock
        added = backend.get_added_tokens_decoder()
        self._added_token_ids = frozenset(added)
        names = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(names.values())
        added_ids = backend.encode("").ids
        cls_id = self._id_of(named_tokens.get("cls_token"))  # encoders begin a text with this token
        begins_with_cls = cls_id is not None and added_ids[:1] == [cls_id]
        self.bos_token_id = cls_id if begins_with_cls else self._id_of(named_tokens.get("bos_token"))
        self.eos_token_ids = self._end_ids(end_token_ids, names)
        self.adds_bos = self.bos_token_id is not None and added_ids[:1] == [self.bos_token_id]
        self._first_ids = added_ids[: self.adds_bos]
        self.ending_ids = added_ids[self.adds_bos :]  # ids that `encode` adds after a text
        self._vocabulary = vocabulary
        self._rules = read_decoding_rules(backend.decoder)

    def __repr__(self) -> str:
        names = [f"{self.vocab_size:,} tokens", "adds BOS" if self.adds_bos else "adds no BOS"]
        return f"Tokenizer({', '.join([*names, 'chat template' if self._chat_templates else 'no chat template'])})"

    @classmethod
    def from_folder(cls, path: Path, num_rows: int | None = None) -> Self:
        """Return the tokenizer of a folder.

        Args:
            path: Folder with a `tokenizer.json` and, if present, other JSON files of a tokenizer.
            num_rows: Number of rows of the model's embedding. The name of an added token without a row is plain text.

        Raises:
            ModelError: A file is missing or breaks its format.

        Examples:
            >>> tokenizer = Tokenizer.from_folder(Path("path/to/model"))  # doctest: +SKIP
        """
        return cls(**read_folder(path, num_rows)._asdict())

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], num_rows: int | None = None) -> Self:
        """Return the tokenizer of a GGUF file. Tokens of type control are special.

        Args:
            metadata: The key-values of the file.
            num_rows: As for `from_folder`.

        Raises:
            ModelError: A key is missing, or its value breaks the format.

        Examples:
            >>> from infer.files import open_checkpoint
            >>> Tokenizer.from_gguf(open_checkpoint("smollm2").metadata).vocab_size
            49152
        """
        return cls(**read_gguf(metadata, num_rows)._asdict())

    @property
    def eos_token_id(self) -> int | None:
        """The first of the ids that end an answer, or None. `eos_token_ids` has all these ids.

        It is the id of the files' `eos_token`. If that token does not end an answer, it is the smallest id that does.

        Examples:
            >>> tokenizer = load_tokenizer("smollm2")
            >>> tokenizer.eos_token_id in tokenizer.eos_token_ids
            True
        """
        named = self._id_of(self._named_tokens.get("eos_token"))
        return named if named in self.eos_token_ids else min(self.eos_token_ids, default=None)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The raw bytes of each id. For a special token they are its text."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            ids = read_vocabulary(self.backend)
            num_ids = max(ids.values(), default=-1) + 1
            vocabulary = [self.backend.id_to_token(token_id) or "" for token_id in range(num_ids)]
        self._vocabulary = None
        return make_token_bytes(vocabulary, self._rules, self._added_token_ids)

    @property
    def rewrites_text(self) -> bool:
        """True if the decoder replaces text across tokens, so that a text is not the joined bytes of its tokens."""
        return self._rules.rewrites_text

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: The text.
            add_special_tokens: True to add BOS in front if the model expects it.
            parse_special: True if the text of a special token becomes its control id, not the ids of plain text.

        Raises:
            InvalidRequestError: The text cannot be spelled.

        Examples:
            >>> llm.tokenizer.encode("Once upon a time")
            [6403, 1980, 253, 655]
        """
        if not parse_special:
            ids = self._encode_as_text(text)
            return [*self._first_ids, *ids, *self.ending_ids] if add_special_tokens else ids
        return encode(self.backend, text, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the ids of two texts in the model's form for pairs. Special tokens in the texts are plain text.

        Args:
            first: The first text, such as a query.
            second: The second text, such as a document.

        Raises:
            InvalidRequestError: The tokenizer has no form for pairs, or a text cannot be spelled.

        Examples:
            >>> pair = tokenizer.encode_pair("A premise.", "A hypothesis.")  # doctest: +SKIP
        """
        pair, spelled = encode_pair(self._text_backend, first, second)
        self._check_forged(spelled)
        return pair

    def least_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of any encoding, in much less time than `encode`.

        Args:
            text: The text.

        Returns:
            The bound, or 0 if nothing is known.

        Examples:
            >>> llm.tokenizer.least_num_tokens("Once upon a time") <= 4
            True
        """
        return self._length_bound(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, the same as a detokenizer's stream.

        Args:
            ids: The ids.
            skip_special_tokens: True to leave out special tokens.

        Examples:
            >>> llm.tokenizer.decode(llm.tokenizer.encode("Once upon a time"))
            'Once upon a time'
        """
        return self.make_detokenizer(skip_special_tokens).decode(ids)

    def make_detokenizer(
        self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] | None = None
    ) -> Detokenizer:
        """Return a converter that makes text from ids one by one.

        Args:
            skip_special_tokens: As for `decode`.
            prompt_ids: The ids of the prompt, if the ids are those of an answer. Its text is the decoded prompt and
                answer without the decoded prompt.

        Examples:
            >>> detokenizer = llm.tokenizer.make_detokenizer()
            >>> "".join([detokenizer.push(each) for each in llm.tokenizer.encode("naïve ☕")] + [detokenizer.flush()])
            'naïve ☕'
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return Detokenizer(self.token_bytes, skipped, self._rules.of_text, self._first_bytes, prompt_ids)

    def _first_bytes(self, token_id: int) -> bytes:
        text = self.backend.id_to_token(token_id)
        found = None if text is None else self._rules.first_bytes(text)
        return self.token_bytes[token_id] if found is None else found

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        """Names of all chat templates of the model."""
        return tuple(self._chat_templates)

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """Sources of all chat templates of the model."""
        return tuple(self._chat_templates.values())

    @property
    def chat_template(self) -> str | None:
        """Source of the template for a plain conversation, or None."""
        return self._chat_templates.get("default")

    def template_source(self, chosen: str | None, *, has_tools: bool) -> str:
        """Return the source of a template.

        Args:
            chosen: The name of a template, or its text. None: the model's template for this kind of conversation.
            has_tools: True for a conversation with tools.

        Raises:
            InvalidRequestError: There is no such template.

        Examples:
            >>> "<|im_start|>" in llm.tokenizer.template_source(None, has_tools=False)
            True
        """
        return self._template(chosen, () if has_tools else None).source

    def special_ids_in(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the special tokens in some texts, with their ids.

        Args:
            texts: The texts.

        Examples:
            >>> llm.tokenizer.special_ids_in(["Hello<|im_end|>"])
            {'<|im_end|>': 2}
        """
        found = {name for text in texts for name in self._special_texts.found_in(text)}
        return {name: token_id for name in found if (token_id := self._id_of(name)) is not None}

    @cached_property
    def infill_marks(self) -> InfillMarks | None:
        """The marks around two texts between which the model can write, or None for a model without marks."""
        return find_marks(self._added_ids)

    def encode_infill(
        self, before: str, after: str, files: Sequence[tuple[str, str]] = (), max_tokens: int | None = None
    ) -> list[int]:
        """Return the prompt for the text between two others.

        Args:
            before: The text before.
            after: The text after.
            files: Names and texts of other files of the project, which come first.
            max_tokens: Leave out the first files until the prompt has at most this many tokens.

        Raises:
            InvalidRequestError: The model has no marks for this.

        Examples:
            >>> ids = coder.encode_infill("def add(a, b):", "return total")  # doctest: +SKIP
        """
        if self.infill_marks is None:
            raise InvalidRequestError("the model has no tokens to fill in text: continue a prompt instead")
        room = None if max_tokens is None else max_tokens - len(self._first_ids)
        return self._first_ids + self.infill_marks.prompt(before, after, files, self._encode_plain, room)

    def _encode_plain(self, text: str) -> list[int]:
        return self.encode(text, False, parse_special=False) if text else []

    def replace_chat_template(self, source: str) -> None:
        """Use a template in place of the model's own.

        Args:
            source: The text of the template.

        Raises:
            InvalidRequestError: The template is broken.

        Examples:
            >>> tokenizer = load_tokenizer("smollm2")
            >>> tokenizer.replace_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
            >>> tokenizer.render_chat_template([{"role": "user", "content": "Hello"}])
            'Hello'
        """
        ChatTemplate(source, self._named_tokens).check()
        self._chat_templates = {"default": source}

    def check_chat_template(self) -> None:
        """Render a short conversation.

        Raises:
            InvalidRequestError: The template is missing or broken.

        Examples:
            >>> llm.tokenizer.check_chat_template()
        """
        self._template(None, None).check()

    def render_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **variables: Any
    ) -> str:
        """Return the conversation as the text that the model was trained on.

        Args:
            messages: The messages.
            chat_template: The name of one of the model's templates, or a template itself. None: the model's own.
            variables: `add_generation_prompt` (True by default), `continue_final_message`, `tools`, `documents`, and
                variables of the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: The template is missing, refuses the messages, or leaves out the user's last one.

        Examples:
            >>> text = llm.tokenizer.render_chat_template([{"role": "user", "content": "Hello"}])
            >>> text[-32:]
            '|im_end|>\\n<|im_start|>assistant\\n'
        """
        return self._template(chat_template, variables.get("tools")).render(messages, True, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        allow_special: bool | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of the rendered conversation.

        Args:
            messages: The messages.
            chat_template: As for `render_chat_template`.
            allow_special: True if the text of a special token in a message becomes its control id. None: the value of
                the attribute `allow_special`.
            variables: As for `render_chat_template`.

        Raises:
            InvalidRequestError: The template is missing, refuses the messages, or leaves out the user's last one; or a
                message cannot be spelled.

        Examples:
            >>> len(llm.tokenizer.encode_chat([{"role": "user", "content": "Hello"}]))
            31
        """
        template = self._template(chat_template, variables.get("tools"))
        if self.allow_special if allow_special is None else allow_special:
            return self.encode(template.render(messages, True, **variables), add_special_tokens=False)
        ids: list[int] = []
        for text, is_control in template.render_marked(messages, self._special_texts, **variables):
            ids += self._encode_control(text) if is_control else self._encode_as_text(text)
        return ids

    def _encode_control(self, text: str) -> list[int]:
        """Return the ids of the template's own text.

        Raises InvalidRequestError if a normalizer makes a special token of other characters, which came from a message.
        """
        ids = self.encode(text, add_special_tokens=False)
        own_ids = self.special_token_ids - self._unknown_ids
        if sum(map(own_ids.__contains__, ids)) > len(self._special_texts.found_in(text)):
            raise InvalidRequestError(
                "a message contains characters that this tokenizer turns into a special token: remove them"
            )
        return ids

    def _encode_as_text(self, text: str) -> list[int]:
        ids = encode(self._text_backend, text, add_special_tokens=False)
        self._check_forged(ids)
        return ids

    def _check_forged(self, ids: Sequence[int]) -> None:
        forged = self.special_token_ids.intersection(ids) - self._unknown_ids
        if forged:
            name = self.backend.id_to_token(min(forged))
            raise InvalidRequestError(f"a message contains {name!r}, which this tokenizer cannot spell: remove it")

    def _template(self, chosen: str | None, tools: Any) -> ChatTemplate:
        templates = self._chat_templates
        if chosen is not None and not isinstance(chosen, str):
            raise InvalidRequestError(f"chat_template must be the text or the name of a template, got {chosen!r:.80}")
        if chosen is None:
            chosen = "tool_use" if tools is not None and "tool_use" in templates else "default"
        elif chosen not in templates and "{" in chosen:
            return self._made(chosen)
        if not templates:
            raise InvalidRequestError(
                "the model has no chat template: use generate() with plain text, or an instruct version of the model"
            )
        if chosen not in templates:
            raise InvalidRequestError(f"chat_template must be one of {', '.join(sorted(templates))}, got {chosen!r}")
        return self._made(templates[chosen])

    def _made(self, source: str) -> ChatTemplate:
        num_bytes = _LEAST_BYTES + _BYTES_PER_CHARACTER * len(source)
        return self._probed.get_or_make(source, lambda: ChatTemplate(source, self._named_tokens), lambda _: num_bytes)

    @cached_property
    def _length_bound(self) -> Bound:
        return make_length_bound(self.backend, self.token_bytes)

    @cached_property
    def _special_texts(self) -> SpecialTexts:
        return SpecialTexts(
            [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]
        )

    @cached_property
    def _unknown_ids(self) -> frozenset[int | None]:
        return frozenset({self._id_of(self._named_tokens.get("unk_token"))})

    def _added_ids(self, names: Iterable[str]) -> dict[str, int]:
        found = {name: self._id_of(name) for name in names}
        return {name: token_id for name, token_id in found.items() if token_id in self._added_token_ids}

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)

    def _is_token(self, token_id: int) -> bool:
        """Return True if the vocabulary has the id. A configuration may name end tokens that are not in it."""
        return 0 <= token_id < MAX_TOKENS and self.backend.id_to_token(token_id) is not None

    def _end_ids(self, given: Iterable[int], names: Mapping[str, int]) -> frozenset[int]:
        """Return the ids that end an answer: the given ones, that of `eos_token`, and those with names of ends."""
        ends = {*filter(self._is_token, given), *(token_id for text, token_id in names.items() if text in END_NAMES)}
        if (eos := self._id_of(self._named_tokens.get("eos_token"))) is not None:
            ends.add(eos)
        if (end := names.get("<|end|>")) is not None:  # it ends an answer of Phi, but only a message of gpt-oss
            (ends.discard if "<|return|>" in names else ends.add)(end)
        return frozenset(ends)
