"""A text that is far too long is refused for its head; every other one is tokenised as a whole."""

from __future__ import annotations

import pytest

from freetoken.errors import RequestError
from freetoken.server.prompt_length import HEAD_CHARACTERS, encode_bounded
from server.conftest import Served, serving
from server.fakes import ByteTokenizer

CONTEXT = 10
HEAD = HEAD_CHARACTERS * CONTEXT


class WordTokenizer(ByteTokenizer):
    """One id for each run of letters between spaces."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        return [len(word) for word in text.split()]


def encode(text: str) -> tuple[list[int], list[int]]:
    """Ids, and the lengths of what was tokenised."""
    tokenizer = WordTokenizer()
    ids = encode_bounded(tokenizer, text, special=True, context=CONTEXT, param="prompt")
    return ids, [len(part) for part in tokenizer.encoded]


def test_short_and_a_little_too_long_texts_are_tokenised_once() -> None:
    for text in ("a a", "a " * CONTEXT, "a " * HEAD):
        assert encode(text) == ([1] * text.count("a"), [len(text)])


def test_a_long_text_of_few_tokens_passes() -> None:
    text = ("x" * 100 + " ") * 9
    assert encode(text) == ([100] * 9, [HEAD, len(text)])


def test_far_too_long_is_refused_for_its_head() -> None:
    tokenizer = WordTokenizer()
    with pytest.raises(RequestError, match=r"the prompt has more than 40 tokens, and the context holds 10") as caught:
        encode_bounded(tokenizer, "a " * 100_000, special=False, context=CONTEXT, param="messages")
    assert caught.value.param == "messages" and caught.value.code == "context_length_exceeded"
    assert [len(text) for text in tokenizer.encoded] == [HEAD]


@pytest.mark.parametrize("chat", [False, True])
def test_over_http(chat: bool) -> None:
    def ask(served: Served, text: str) -> str:
        answer = served.chat(text) if chat else served.complete(text)
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    with serving(context_length=20) as served:
        assert "has more than" in ask(served, "word " * 2000)
        assert sum(map(len, served.tokenizer.encoded)) < 2000
        assert "tokens, and the context holds 20" in ask(served, "word " * 20)
        # Counting is no generation: the whole text counts.
        assert served.post("/tokenize", {"prompt": "a" * 2000}).json()["count"] == 2001
