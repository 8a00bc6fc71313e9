"""Several concurrent answers in a program with an event loop. Each step computes one token of each answer."""

import asyncio
import sys

from infer import AsyncLLM

PROMPTS = ["The best thing about the sea is", "The best thing about the mountains is", "The best thing about cities is"]


async def tell(llm: AsyncLLM, prompt: str, max_new_tokens: int) -> None:
    stream = llm.stream(prompt, temperature=0, max_new_tokens=max_new_tokens, stop=["\n"])
    pieces = [piece.text async for piece in stream]  # leaving the loop early would end the answer
    print(prompt, "".join(pieces).strip(), sep=" ", flush=True)


async def main(model: str = "smollm2", max_new_tokens: str = "32") -> None:
    async with AsyncLLM(model) as llm:
        await asyncio.gather(*(tell(llm, prompt, int(max_new_tokens)) for prompt in PROMPTS))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
