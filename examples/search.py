"""Search a folder of text files by meaning, and answer a question from the passages found, with their sources.

python examples/search.py FOLDER "a question" Qwen/Qwen3-Embedding-0.6B smollm2 [Qwen/Qwen3-Reranker-0.6B]
"""

import sys
from pathlib import Path

from infer import LLM


def passages_of(folder: Path) -> list[tuple[str, str]]:
    """Return the paragraphs of the folder's text files, each with the name of its file."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md", ".rst")]
    texts = [(path, path.read_text(encoding="utf-8", errors="replace")) for path in files]
    return [(str(path.relative_to(folder)), part.strip()) for path, text in texts for part in text.split("\n\n")
            if part.strip()]  # fmt: skip


def search(question: str, passages: list[str], embedder: str, reranker: str | None, count: int = 3) -> list[int]:
    """Return the indices of the passages that fit a question best."""
    with LLM(embedder) as llm:
        prompt_name = "query" if "query" in llm.prompt_names else None
        query = llm.embed([question], prompt_name=prompt_name)
        found = (query @ llm.embed(passages, truncate=True).T)[0].argsort(descending=True).tolist()
    if reranker is None:
        return found[:count]
    candidates = found[: 5 * count]
    with LLM(reranker) as llm:
        best = llm.rerank(question, [passages[each] for each in candidates], count, truncate=True)
    return [candidates[each.index] for each in best]


def main(folder: str, question: str, embedder: str, generator: str = "smollm2", reranker: str | None = None) -> None:
    passages = passages_of(Path(folder))
    best = search(question, [text for _, text in passages], embedder, reranker)
    context = "\n\n".join(f"[{number}] {passages[place][1]}" for number, place in enumerate(best, 1))
    with LLM(generator) as llm:
        asked = f"{context}\n\nAnswer from the numbered passages above: {question}"
        print(llm.chat([{"role": "user", "content": asked}], max_new_tokens=200).text)
    for number, place in enumerate(best, 1):
        print(f"[{number}] {passages[place][0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
