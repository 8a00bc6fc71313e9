"""Calls of `LLM` that compute whole texts: their log-probabilities, vectors, ranks and labels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from infer.compute.sampling.keywords import Params
from infer.engine.requests.ask import Ask
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_encoding import Prompt
from infer.engine.step.request_options import RequestKeywords, RequestOptions
from infer.engine.texts.text_ids import VectorOptions
from infer.engine.texts.text_tasks import TextOrPair, embed, labels, prompt_logprobs, rerank
from infer.engine.texts.token_trace import ids_to_score, logits_of, trace_token
from infer.outputs import Classification, Pooling, RankedDocument, SampleTrace, TokenLogprob


class TextCalls(ABC):
    """The calls of a model that generate no text."""

    @property
    @abstractmethod
    def host(self) -> Host:
        """The loaded model with its engine. Raises ClosedError after `close`."""

    def prompt_logprobs(self, prompt: Prompt, *, num: int = 0) -> list[TokenLogprob | None]:
        """Return the log-probability of each token of a prompt.

        They are computed from the raw logits. The logits of at most 64 tokens are in memory.

        Args:
            prompt: A text, token ids, or messages.
            num: Number of likeliest alternatives per token.

        Returns:
            One entry per token; None for the first token.

        Raises:
            InvalidRequestError: An argument breaks a rule.
            ClosedError: The model is closed.

        Examples:
            >>> [each and each.rank for each in llm.prompt_logprobs("The capital of France is Paris.")]
            [None, 2923, 1, 2, 1, 1, 1]
        """
        return prompt_logprobs(self.host, prompt, num=num).run()

    def sample_trace(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
        prompt_ids: Sequence[int] | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> SampleTrace:
        """Return how the token of a step is sampled, stage by stage. It is the token that `generate` returns.

        Args:
            prompt: A text, token ids, or messages, which are rendered as `chat` does.
            params: As for `generate`.
            step: The step; 1 follows the prompt.
            num_candidates: Number of candidate tokens in the trace.
            prompt_ids: The prompt's ids if they are spelled differently, as a session's may be.
            options: Options of the request besides its sampling. None: the default options.
            keywords: Fields of `SamplingParams` and of `RequestOptions`. Sampling fields exclude `params`.

        Raises:
            InvalidRequestError: An argument breaks a rule, or the answer ends before the step.
            ClosedError: The model is closed.

        Examples:
            >>> trace = llm.sample_trace("The capital of France is", temperature=0)
            >>> trace.chosen.text, round(trace.chosen.probabilities[0], 2)
            (' Paris', 0.77)
        """
        host, ask = self.host, Ask.of(prompt, params, options, keywords)
        return trace_token(host, replace(ask, token_ids=prompt_ids), step, num_candidates)

    def embed(
        self,
        texts: Sequence[Prompt],
        pooling: Pooling | None = None,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Float[Tensor, "texts size"]:
        """Return one vector per text, made from the hidden states after the last norm.

        Models that were trained for embeddings return vectors that can be compared.

        Args:
            texts: Texts, lists of token ids, or conversations.
            pooling: "mean", "last", "cls", "max", "weightedmean" or "mean_sqrt_len". None: the pooling that the model
                was made for, otherwise the mean.
            prompt_name: Name of a prompt in the model's files, such as "query", to put before each text. None: the
                default prompt of the files, if any.
            dimensions: Number of first dimensions to keep. None: the files' `truncate_dim`, otherwise all.
            normalize: True for vectors of length 1, False for any length. None: the setting in the files, or True.
            truncate: True to cut texts that do not fit the context, with a `TruncationWarning`. False refuses them.

        Returns:
            float32 vectors, `[texts, dimensions]`.

        Raises:
            InvalidRequestError: An argument breaks a rule, or a text does not fit the context.
            ClosedError: The model is closed.
            ModelError: The model's states are not finite.

        Examples:
            >>> vectors = llm.embed(["Cats sleep on warm roofs.", "The bridge was built in 1932."])
            >>> query = llm.embed(["where do cats sleep?"])
            >>> vectors.shape, int((query @ vectors.T).argmax())
            (torch.Size([2, 576]), 0)
        """
        options = VectorOptions(pooling, prompt_name, dimensions, normalize, truncate)
        return embed(self.host, texts, options).run()

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        instruction: str | None = None,
        *,
        truncate: bool = False,
    ) -> list[RankedDocument]:
        """Return documents by their relevance to a query, the most relevant first.

        The model must be a reranker, such as Qwen3-Reranker or bge-reranker-v2-m3. With an embedding model, the score
        is the cosine of the two vectors.

        Args:
            query: The query.
            documents: The documents.
            top_n: Number of documents to return. None: all.
            instruction: The task, in one sentence. None: the one that the model was trained with.
            truncate: True to cut documents that do not fit the context, with a `TruncationWarning`. False refuses them.

        Returns:
            The documents with their places in `documents` and their scores. A reranker scores
            from 0 to 1, unless the files of a cross-encoder say that its logits are the scores.

        Raises:
            InvalidRequestError: An argument breaks a rule, a document does not fit, or the model is not a reranker.
            ClosedError: The model is closed.
            ModelError: The model's states are not finite.

        Examples:
            >>> with LLM("smollm2", reranker="qwen3") as ranker:
            ...     best = ranker.rerank("where do cats sleep?", ["In 1932.", "Cats sleep on roofs."], top_n=1)
            >>> best[0].document
            'Cats sleep on roofs.'
        """
        return rerank(self.host, query, documents, top_n, instruction, truncate=truncate).run()

    def classify(self, texts: Sequence[TextOrPair], *, truncate: bool = False) -> list[Classification]:
        """Return the labels of each text with their probabilities, the most probable first.

        The model must be a classifier, such as a `Qwen3ForSequenceClassification` or `BertForSequenceClassification`.

        Args:
            texts: Texts, lists of token ids, or pairs of texts.
            truncate: True to cut texts that do not fit the context, with a `TruncationWarning`. False refuses them.

        Returns:
            One `Classification` per text.

        Raises:
            InvalidRequestError: An argument breaks a rule, a text does not fit, or the model is not a classifier.
            ClosedError: The model is closed.
            ModelError: The model's states are not finite.

        Examples:
            >>> found = LLM("path/to/classifier").classify(["The food was cold."])[0]  # doctest: +SKIP
            >>> found.label, found.probability  # doctest: +SKIP
            ('negative', 0.93)
        """
        return labels(self.host, texts, truncate=truncate).run()

    def logits(self, token_ids: Sequence[int], *, last: int | None = None) -> Float[Tensor, "tokens vocab"]:
        """Return float32 logits after every token, or after the last few.

        Args:
            token_ids: The tokens.
            last: Number of last tokens whose logits are returned. None: all tokens.

        Returns:
            Logits, `[tokens, vocab]`, 4 bytes × vocab per token.

        Raises:
            InvalidRequestError: An argument breaks a rule.
            ClosedError: The model is closed.

        Examples:
            >>> ids = llm.tokenizer.encode("The capital of France is")
            >>> logits = llm.logits(ids)
            >>> llm.tokenizer.decode([int(logits[-1].argmax())])
            ' Paris'
        """
        host = self.host
        return host.loop.call(logits_of(host, ids_to_score(host, token_ids), last)).get()
