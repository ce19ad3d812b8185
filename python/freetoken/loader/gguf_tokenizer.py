"""Tokenizers from GGUF metadata, built with the ``tokenizers`` library (torch-free).

``tokenizer.ggml.tokens`` is the vocabulary, with kinds in ``token_type`` (1 normal, 2 unknown, 3 control, 4 user-defined,
5 unused, 6 byte). Two models are served:

- ``gpt2``: byte-level BPE. Tokens are spelled in the byte-level alphabet (added ones in clear), merges as "left right", and
  ``tokenizer.ggml.pre`` names how text is cut before merging; the patterns below are the published ones of each family.
- ``llama``: sentencepiece BPE. Blanks are spelled U+2581, any two neighbours merge whose union is a token, the highest of
  ``tokenizer.ggml.scores`` first, and characters outside the vocabulary become ``<0xNN>`` tokens.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BLANK = "\u2581"
MAX_PIECE_CHARACTERS = 256
DEFAULT_TEMPLATE = "default"
SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
# Patterns are applied one after the other; each cuts the pieces the one before left.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "llama-bpe": (_LLAMA3,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_NFC = ("qwen2", "qwen35")
# Families that look a whole piece up before merging, and those that put the bos token first unless told otherwise.
_WHOLE_PIECES = ("llama-bpe",)
_BOS_FIRST = ("llama-bpe",)


def byte_level_parts(pre: str) -> tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer]:
    """Normaliser and pre-tokenizer of the family ``pre`` (a key of :data:`PRE_TOKENIZERS`)."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre]]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizers.NFC() if pre in _NFC else None, pre_tokenizers.Sequence([*cuts, spell])


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Text of the bos, eos, unk and pad tokens that the file names."""
    tokens = _tokens(file)
    found = {}
    for name, key in SPECIAL_KEYS.items():
        token = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token, int) and 0 <= token < len(tokens):
            found[name] = tokens[token]
    return found


def chat_templates(file: GGUFFile) -> dict[str, str]:
    """The chat templates inside the file by name, :data:`DEFAULT_TEMPLATE` for the one without."""
    key, found = "tokenizer.chat_template", {}
    for name, template in file.metadata.items():
        if isinstance(template, str) and (name == key or name.startswith(key + ".")):
            found[name[len(key) + 1 :] or DEFAULT_TEMPLATE] = template
    return found


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer that the metadata of ``file`` describe; :class:`StartupError` when it cannot be built."""
    model = file.metadata.get("tokenizer.ggml.model")
    name = model if isinstance(model, str) else None
    if name == "gpt2":
        tokenizer, bos_first = _byte_level(file)
    elif name == "llama":
        tokenizer, bos_first = _sentencepiece(file), True
    else:
        said = "is missing" if model is None else f"{str(model)[:40]!r} is not served"
        _fail(file, f"tokenizer.ggml.model {said}; pass --tokenizer-path with the folder of the original tokenizer")
    tokens, kinds = _tokens(file), _kinds(file)
    for kind, special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        added = [AddedToken(tokens[int(i)], normalized=False, special=special) for i in np.flatnonzero(kinds == kind)]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([entry for entry in added if entry.content])
    _frame(file, tokenizer, bos_first)
    return tokenizer


def _byte_level(file: GGUFFile) -> tuple[Tokenizer, bool]:
    """The tokenizer without added tokens, and whether its family puts the bos token first."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        _fail(
            file,
            f"tokenizer.ggml.pre {str(pre)[:40]!r} is not served; pass --tokenizer-path with the original tokenizer",
        )
    vocabulary, merges = _vocabulary(file), _merges(file)
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_PIECES))
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        _fail(file, f"the tokenizer cannot be built: {error}")
    normalizer, tokenizer.pre_tokenizer = byte_level_parts(pre)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _BOS_FIRST


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """The tokenizer without added tokens. A blank is put before every stretch of text between added tokens, and one is
    taken off when decoding, unless the file says otherwise."""
    vocabulary = _vocabulary(file)
    unknown = special_tokens(file).get("unk_token")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_scored_merges(file, vocabulary),
            unk_token=unknown if unknown in vocabulary else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spell, unspell = normalizers.Replace(" ", BLANK), [decoders.Replace(BLANK, " "), decoders.ByteFallback()]
    if _flag(file, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), spell])
        tokenizer.decoder = decoders.Sequence([*unspell, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spell
        tokenizer.decoder = decoders.Sequence([*unspell, decoders.Fuse()])
    return tokenizer


def _scored_merges(file: GGUFFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a normal token together from two others, the token with the highest score first."""
    kinds, scores = _kinds(file), file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(kinds) or not np.isfinite(scores).all():
        _fail(file, f"metadata key 'tokenizer.ggml.scores' must hold one number for each of {len(kinds)} tokens")
    normal = {token: index for token, index in vocabulary.items() if kinds[index] == NORMAL}
    merges: list[tuple[str, str]] = []
    for token in sorted(normal, key=lambda token: -float(scores[normal[token]])):
        if len(token) <= MAX_PIECE_CHARACTERS:
            pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
            merges += [(left, right) for left, right in pairs if left in normal and right in normal]
    return merges


def _fail(file: GGUFFile, problem: str) -> NoReturn:
    raise StartupError(f"{file.path}: {problem}")


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        _fail(file, "metadata key 'tokenizer.ggml.tokens' must be a list of strings")
    return tokens


def _kinds(file: GGUFFile) -> np.ndarray:
    tokens, kinds = _tokens(file), file.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return np.ones(len(tokens), dtype=np.int32)
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        _fail(file, f"metadata key 'tokenizer.ggml.token_type' must hold one number for each of {len(tokens)} tokens")
    return kinds


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    tokens = _tokens(file)
    for index, (token, kind) in enumerate(zip(tokens, _kinds(file).tolist())):
        if kind == UNUSED or token == "":
            continue
        if token in vocabulary:
            _fail(file, f"tokens {vocabulary[token]} and {index} are both {token!r}")
        vocabulary[token] = index
    return vocabulary


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        _fail(file, "metadata key 'tokenizer.ggml.merges' must be a list of strings")
    pairs = []
    for index, merge in enumerate(merges):
        left, blank, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and blank and right):
            _fail(file, f"element {index} of metadata key 'tokenizer.ggml.merges' is not two tokens")
        pairs.append((left, right))
    return pairs


def _frame(file: GGUFFile, tokenizer: Tokenizer, bos_first: bool) -> None:
    """Make ``add_special_tokens`` put bos first and eos last where the file asks for it."""
    before = _flag(file, "add_bos_token", bos_first)
    after = _flag(file, "add_eos_token", False)
    framed = [name for name, wanted in (("bos", before), ("eos", after)) if wanted]
    if not framed:
        return
    special, aliases = special_tokens(file), []
    for name in framed:
        token = special.get(f"{name}_token")
        if token is None:
            _fail(file, f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id names no token")
        token_id = int(file.metadata[f"tokenizer.ggml.{name}_token_id"])
        aliases.append({"id": name, "ids": [token_id], "tokens": [token]})
    single = [*(["bos:0"] if before else []), "$A:0", *(["eos:0"] if after else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=aliases
    )


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        _fail(file, f"metadata key 'tokenizer.ggml.{name}' must be a boolean")
    return value
