"""The real server on SmolLM2 against transformers on the same file: twenty prompts at once, 64 greedy tokens each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from oracle import Generated, Oracle
from servers import Server

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.demo import demo_model_path
from freetoken.loader.tokenizer import Tokenizer, load_tokenizer
from freetoken.messages import TokenLogprob

TOKENS = 64
AGAIN = "long, off the prefix cache"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"

PARAGRAPH = (
    "The lighthouse stood at the end of a long stone pier, and every evening the keeper walked out to light the lamp. "
    "In summer the walk took ten minutes; in winter, with ice on the stones and the wind from the north, it could take "
    "an hour. He carried a can of oil, a box of matches wrapped in waxed paper, and a piece of bread in case the sea rose "
    "behind him and he had to stay until morning. The ships that passed never knew his name. They saw a light, turned "
    "their bows a little to the west, and went on to the harbour, where people waited for sugar, iron and letters. "
)


def chat(*turns: str) -> str:
    """ChatML of turns that alternate from the user on, ready for the assistant's next one."""
    roles = ("user", "assistant")
    body = "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
    return f"{SYSTEM}{body}<|im_start|>assistant\n"


PROMPTS = {
    "one word": "Once",
    "fact": "The capital of France is",
    "chat": chat("What is the capital of France?"),
    "chat of three turns": chat(
        "Hi, I am Ada.", "Hello Ada! How can I help?", "Write a haiku about the sea, with my name."
    ),
    "chat with a list": chat("Name five fruits and their colours, one a line."),
    "python": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    "c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\t",
    "json": '{"users": [{"id": 1, "name": "Ann", "tags": ["a", "b"]}, {"id": 2, "name":',
    "sql": "SELECT customers.name, SUM(orders.total)\nFROM customers\nJOIN",
    "html": "<!DOCTYPE html>\n<html>\n  <head>\n    <title>",
    "french": "Il était une fois, dans un petit village près de la mer, une fille qui",
    "german": "Die Straßen der Stadt waren leer, und über den Dächern",
    "russian": "Москва — столица",
    "chinese": "人工智能是计算机科学的一个",
    "emoji": "Happy birthday! 🎉🎂 Here are some ideas for a party 🥳:\n",
    "list": "Shopping list:\n1. Milk\n2. Eggs\n3.",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "table": "| Year | Sales |\n|------|-------|\n| 2019 | 1,204 |\n| 2020 |",
    "blanks": "   \n\n\t\t  \n    x    =   \n",
    "long": PARAGRAPH * 2 + "\n\nQuestion: What did the keeper carry?\nAnswer:",
}


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of the SmolLM2 GGUF; skips where the demo package is absent."""
    try:
        return demo_model_path()
    except StartupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def answers(smollm2: str) -> dict[str, dict[str, Any]]:
    """What the server says to each prompt, all of them asked at once; then to the longest once more."""
    with Server("--model-path", smollm2, "--device", "cpu", "--dtype", "float32") as server:

        def ask(text: str) -> dict[str, Any]:
            sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            body = {"text": text, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3}
            reply = httpx.post(f"{server.url}/generate", json=body, timeout=240)
            assert reply.status_code == 200, reply.text
            return reply.json()

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            replies = dict(zip(PROMPTS, pool.map(ask, PROMPTS.values())))
        return {**replies, AGAIN: ask(PROMPTS["long"])}


@pytest.fixture(scope="session")
def oracle(smollm2: str) -> Oracle:
    return Oracle(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


def generated(prompt: list[int], answer: dict[str, Any]) -> Generated:
    meta = answer["meta_info"]
    entries = [
        TokenLogprob(token, value, [t for _, t, _ in top], [v for v, _, _ in top])
        for (value, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"])
    ]
    return Generated(prompt, answer["output_ids"], entries)


@pytest.mark.slow
def test_greedy_text_of_twenty_prompts(
    oracle: Oracle, answers: dict[str, dict[str, Any]], tokenizer: Tokenizer
) -> None:
    assert len(PROMPTS) == 20
    items = []
    for name, answer in answers.items():
        prompt = tokenizer.encode(PROMPTS["long"] if name == AGAIN else PROMPTS[name])
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == len(prompt)
        assert meta["completion_tokens"] == len(answer["output_ids"]) == TOKENS
        assert meta["finish_reason"] == {"type": "length", "length": TOKENS}
        assert answer["text"] == tokenizer.decode(answer["output_ids"])
        items.append(generated(prompt, answer))
    assert max(len(item.prompt) for item in items) >= 250
    assert answers[AGAIN]["meta_info"]["cached_tokens"] >= 240
    assert "Paris" in answers["chat"]["text"]
    # Ties are fine where both logits are close, as long as nearly every token needs no such excuse.
    assert oracle.check(items) <= 3
