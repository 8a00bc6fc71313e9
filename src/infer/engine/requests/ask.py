"""`Ask`: a question as it arrived, of which `RequestMaker` makes requests. Loads no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

from infer.compute.sampling.keywords import Params
from infer.engine.step.request_options import RequestOptions, split_options
from infer.sampling_params import CONSTRAINTS, SamplingParams
from infer.text.grammar.grammar import grammar_of


@final
@dataclass(frozen=True)
class Ask:
    """Prompts, and how to answer them, as a caller or the body of an HTTP request asked.

    Each prompt has one answer for each of `params`. Without these it has one answer, by `given` and by `sampling`,
    keywords that change the model's defaults. With `has_variables`, other keywords are variables of the chat template.
    If there are `variables`, prompts must be messages. `token_ids` replace the prompt's own ids, and `respell` changes
    the ids that the template gives. If `is_answered` is false, prompts are only checked.
    """

    prompts: Sequence[Any]
    params: Sequence[SamplingParams] = ()
    options: RequestOptions = field(default_factory=RequestOptions)
    given: Params | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] | None = None
    has_variables: bool = False
    token_ids: Sequence[int] | None = None
    respell: Callable[[list[int]], list[int]] | None = None
    prompt_name: str = "prompt"  # of the body's field
    is_answered: bool = True

    @property
    def is_constrained(self) -> bool:
        """True if a grammar or tools may constrain an answer, which takes time to prepare."""
        params = [each for each in (*self.params, self.given) if isinstance(each, SamplingParams)]
        names = {*self.sampling, *(self.given if isinstance(self.given, Mapping) else ())}
        return bool(self.options.tools) or any(map(grammar_of, params)) or not names.isdisjoint(CONSTRAINTS)

    @classmethod
    def of(
        cls,
        prompt: Any,
        params: Params | None,
        options: RequestOptions | None,
        keywords: Mapping[str, Any],
        *,
        has_variables: bool = False,
    ) -> Self:
        """Return the ask of a call with one prompt. `keywords` may have options and sampling parameters.

        Options among the keywords replace those of `options`. Raises InvalidRequestError for a wrong option.
        """
        options, sampling = split_options(options, keywords)
        return cls([prompt], (), options, params, sampling, has_variables=has_variables)
