"""Texts that are far too long for the context, told by their head (torch-free)."""

from __future__ import annotations

from freetoken.errors import RequestError
from freetoken.server.detokenizer import Tokenizer

HEAD_CHARACTERS = 16
"""Characters for each token of the context that are tokenised of a much longer text, to see whether it can fit."""


def encode_bounded(tokenizer: Tokenizer, text: str, *, special: bool, context: int, param: str) -> list[int]:
    """Token ids of ``text``, unless it is far too long for ``context`` tokens: :class:`RequestError` 400.

    Ten megabytes take seconds and gigabytes to tokenise in full, so such a text is refused for its head alone. The cut may
    split a word and change the tokens around it, but not half of them. A text that is a little too long comes back whole.
    """
    head = HEAD_CHARACTERS * context
    if len(text) > 2 * head:
        count = len(tokenizer.encode(text[:head], add_special_tokens=special))
        if count >= 2 * context:
            raise too_long(f"more than {count // 2}", context, param)
    return tokenizer.encode(text, add_special_tokens=special)


def too_long(tokens: str, context: int, param: str) -> RequestError:
    """The refusal of a prompt of ``tokens`` tokens."""
    return RequestError(
        f"the prompt has {tokens} tokens, and the context holds {context} with at least one for the output "
        "(--context-length)",
        param=param,
        code="context_length_exceeded",
    )
