"""Two turns of a conversation, rendered by the model's own chat template."""

import sys

from infer import LLM, SamplingParams


def main(model: str = "smollm2", max_new_tokens: str = "48") -> None:
    llm = LLM(model)
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    for question in ("What is the capital of France?", "And what is it famous for?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(temperature=0, max_new_tokens=int(max_new_tokens))).text
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
