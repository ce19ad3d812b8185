"""Pieces of text against the whole: half characters, stop strings across token borders, cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from freetoken.sampling_params import SamplingParams
from freetoken.server.detokenizer import OutputText
from server.fakes import BOS, EOS, PIECES, ByteTokenizer

TEXT = st.text(st.sampled_from("ab c.\nSTOP!é日本🙂👩‍👩‍👧\u0301\ufffd")) | st.text(max_size=12)


class NoisyTokenizer(ByteTokenizer):
    """The same vocabulary without the shortcut for byte-level ones."""

    byte_level = False


def sentencepiece_like() -> ByteTokenizer:
    """A vocabulary of words with leading blanks and bytes to fall back on, decoded by the ``tokenizers`` package."""
    words = ["▁the", "▁", "▁cat", "s", "▁日本", "."]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)

    class Words(NoisyTokenizer):
        special_ids = frozenset()

        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            return backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    return Words()


def pieces(
    tokenizer: ByteTokenizer, ids: list[int], sizes: list[int], **sampling: object
) -> tuple[list[str], str | None]:
    """All pieces of text when ``ids`` come in groups of ``sizes``, and the stop string that ended them."""
    output = OutputText(tokenizer, SamplingParams(**sampling))
    result, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)] if sizes else 1
        text, stopped = output.push(ids[at : at + size])
        result.append(text)
        at, turn = at + size, turn + 1
        if stopped is not None:
            assert output.push([65]) == ("", stopped) and output.flush() == ""
            return result, stopped
    result.append(output.flush())
    return result, output.stopped


def cut(text: str, stops: Sequence[str], keep: bool = False) -> tuple[str, str | None]:
    """The specification: walk the text character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


ANY_TOKENS = st.lists(st.integers(0, 255 + len(PIECES)) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, BOS, EOS]))


@settings(deadline=None, max_examples=150)
@given(ANY_TOKENS, st.lists(st.integers(1, 4), max_size=3), st.booleans())
def test_byte_level_pieces_equal_the_whole(ids: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = ByteTokenizer()
    found, _ = pieces(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(found) == tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=150)
@given(
    TEXT, st.lists(st.integers(1, 4), max_size=3), st.lists(TEXT.filter(bool), max_size=4), st.booleans(), st.booleans()
)
def test_stop_strings_cut_where_they_complete_first(
    text: str, sizes: list[int], stops: list[str], keep: bool, byte_level: bool
) -> None:
    tokenizer = ByteTokenizer() if byte_level else NoisyTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, stopped = pieces(tokenizer, ids, sizes, stop=tuple(stops), no_stop_trim=keep)
    expected, why = cut(text, stops, keep)
    assert ("".join(found), stopped) == (expected, why)


@settings(deadline=None, max_examples=200)
@example("Oéé🙂🙂🙂\ufffd", [4])
@example("\ufffd🙂é" * 20, [3, 1])
@given(TEXT, st.lists(st.integers(1, 4), max_size=3))
def test_window_pieces_equal_the_whole_for_real_text(text: str, sizes: list[int]) -> None:
    tokenizer = NoisyTokenizer()
    found, _ = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False), sizes)
    assert "".join(found) == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*range(256, 262)]) | st.integers(0x20, 0x7E)), st.lists(st.integers(1, 4), max_size=3))
def test_window_keeps_blanks_that_depend_on_the_left_neighbour(ids: list[int], sizes: list[int]) -> None:
    tokenizer = sentencepiece_like()
    found, _ = pieces(tokenizer, ids, sizes)
    assert "".join(found) == tokenizer.decode(ids, True)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NoisyTokenizer()])
def test_half_a_character_waits(tokenizer: ByteTokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams())
    given_out = [output.push([token])[0] for token in "a🙂é".encode()]
    assert given_out == ["a", "", "", "", "🙂", "", "é"]
    assert output.push([0xF0])[0] == ""
    assert output.flush() == "\ufffd"


def test_only_a_possible_stop_is_held_back() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop=("STOP", "zz")))
    assert output.push(list(b"xST")) == ("x", None)
    assert output.push(list(b"O.")) == ("STO.", None)
    assert output.push(list(b"z")) == ("", None)
    assert output.push(list(b"y")) == ("zy", None)
    assert output.push([260]) == ("", None)
    assert output.push([261]) == ("", "STOP")


def test_text_of_the_first_tokens_is_not_searched() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop=("b",), min_new_tokens=4))
    assert output.push(list(b"ab")) == ("ab", None)
    assert output.push(list(b"cb")) == ("c", "b")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NoisyTokenizer()])
@pytest.mark.parametrize("token", [97, 0x80, 0xF0, EOS])
def test_cost_of_a_token_does_not_grow(tokenizer: ByteTokenizer, token: int) -> None:
    output = OutputText(
        tokenizer, SamplingParams(stop=("a" * 900 + "b", "\ufffd" * 1000 + "c"), skip_special_tokens=False)
    )

    def seconds() -> float:
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                output.push([token])
            best = min(best, time.perf_counter() - start)
        return best

    early = seconds()
    for _ in range(10_000):
        output.push([token])
    assert seconds() < 5 * early + 0.01


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NoisyTokenizer()])
def test_special_tokens_that_are_shown(tokenizer: ByteTokenizer) -> None:
    ids = [BOS, *b"a", EOS, *b"b"]
    for shown, text in (((), "ab"), ((EOS,), "a<|im_end|>b"), ((BOS, EOS), "<bos>a<|im_end|>b")):
        output = OutputText(tokenizer, SamplingParams(), shown)
        assert "".join(output.push([token])[0] for token in ids) + output.flush() == text
