"""Token ids to text, piece by piece: half characters and possible stop strings are held back (torch-free).

Used by the HTTP process for streams and by the offline engine. The cost of a token does not grow with the length of the
text before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from freetoken.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
_COMMIT_MARGIN = 4


class Tokenizer(Protocol):
    """What the server needs of a tokenizer.

    ``size`` is the number of ids it knows; ``special_ids`` are those that ``decode(..., skip_special_tokens=True)``
    leaves out; ``token_text`` is one token as text and ``token_bytes`` as the bytes it contributes. A tokenizer whose
    ``decode`` is exactly the UTF-8 text of the joined bytes (with replacement characters for invalid ones) may say so
    with a true attribute ``byte_level``; it is then decoded without calling ``decode``. One with chat templates for
    special purposes has them in ``named_templates``.
    """

    @property
    def size(self) -> int: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...
    def token_text(self, token: int) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


class _ByteDecoder:
    """For byte-level vocabularies: an incremental UTF-8 decoder over the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes_of(token) for token in ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowDecoder:
    """For any other vocabulary: decodes a short window of tokens twice and takes the difference.

    ``_ids[: _read]`` is text already given out, kept as context because a token's text may depend on its left neighbour
    (a leading space, say); ``_ids[_read :]`` is held while it ends in half a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._decode(self._ids)
        end = len(self._ids)
        if text.endswith(REPLACEMENT):
            if end - self._read <= _MAX_HELD_TOKENS:
                return ""
            text, end = self._settled(text)
        return self._take(text, end)

    def _settled(self, text: str) -> tuple[str, int]:
        """Text and length of the leading tokens that later ones cannot change, when all of them decode to ``text``.

        No character has more than four bytes, so the last four tokens may be part of one that is not complete; where a
        character lies across the cut, the leading text is not how ``text`` begins.
        """
        last = len(self._ids) - _COMMIT_MARGIN
        for end in range(last, last - _COMMIT_MARGIN, -1):
            leading = self._decode(self._ids[:end])
            if text.startswith(leading):
                return leading, end
        return self._decode(self._ids[:last]), last

    def flush(self) -> str:
        return self._take(self._decode(self._ids), len(self._ids)) if self._ids else ""

    def _take(self, text: str, end: int) -> str:
        context = self._decode(self._ids[: self._read]) if self._read else ""
        new = text[len(context) :]
        if new or end - self._read > _MAX_HELD_TOKENS:
            del self._ids[: self._read]
            self._read = end - self._read
        return new


class OutputText:
    """Text of one growing output.

    ``push`` takes new ids and returns the text that is certain by now; ``flush`` gives the rest at the end. All pieces
    together equal ``tokenizer.decode`` of all ids, cut at the first stop string. The stop string that completes first
    ends the text (of those that complete together, the longest), so the cut does not depend on token borders; text of
    the first ``min_new_tokens`` tokens is not searched. ``shown`` are special ids whose text is part of the output even
    where special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, shown: Collection[int] = ()) -> None:
        self._decoder: _ByteDecoder | _WindowDecoder
        special = frozenset(tokenizer.special_ids).difference(shown)
        self._special = special if sampling.skip_special_tokens else frozenset()
        if getattr(tokenizer, "byte_level", False):
            self._decoder = _ByteDecoder(tokenizer)
        else:
            # What must not be seen is left out before it comes to the decoder.
            self._decoder = _WindowDecoder(tokenizer, skip_special_tokens=False)
        self._stops = sampling.stop
        self._keep_stop = sampling.no_stop_trim
        self._unsearched = sampling.min_new_tokens - 1
        self._held = ""
        self._longest = max(map(len, self._stops), default=0)
        self._starts: dict[str, list[str]] = {}
        for stop in self._stops:
            self._starts.setdefault(stop[0], []).append(stop)
        self.stopped: str | None = None

    def push(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """``(text certain by now, the stop string that ended it or None)``; nothing comes after a stop."""
        if self.stopped is not None:
            return "", self.stopped
        text = ""
        if self._stops and self._unsearched > 0:
            early, ids = ids[: self._unsearched], ids[self._unsearched :]
            self._unsearched -= len(early)
            text = self._decode(early)
        if not self._stops:
            return self._decode(ids), None
        return text + self._search(self._decode(ids)), self.stopped

    def flush(self) -> str:
        """Everything held back, half characters as U+FFFD; empty after a stop."""
        if self.stopped is not None:
            return ""
        text = self._search(self._decoder.flush())
        held, self._held = self._held, ""
        return text if self.stopped is not None else text + held

    def _decode(self, ids: Sequence[int]) -> str:
        if self._special:
            ids = [token for token in ids if token not in self._special]
        return self._decoder.push(ids) if ids else ""

    def _search(self, new: str) -> str:
        text = self._held + new
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (found is None or (at + len(stop), at) < found[:2]):
                found = (at + len(stop), at, stop)
        if found is not None:
            end, start, self.stopped = found
            self._held = ""
            return text[: end if self._keep_stop else start]
        keep = self._first_possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def _first_possible_start(self, text: str) -> int:
        """First position from which ``text`` runs into the beginning of a stop string; ``len(text)`` if there is none.

        Positions passed over once can never match later, so over a whole output each is looked at once.
        """
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            for stop in self._starts.get(text[at], ()):
                if stop.startswith(text[at:]):
                    return at
        return len(text)
