"""A tiny Qwen3 checkpoint that speaks like Qwen3.5: its special tokens, its marks, and a chat template in its ways."""

from __future__ import annotations

import json
from pathlib import Path

from make_tiny_model import make_tiny_model
from tokenizers import AddedToken, Tokenizer

from server.templates import QWEN35

# As published: roles are special tokens, the marks of thoughts and calls are not.
SPECIAL = ("<|object_ref_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_qwen_folder(path: Path) -> Path:
    """Write the checkpoint; ``path``."""
    make_tiny_model(path, arch="qwen3", extra_vocab=16, max_position_embeddings=4096)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(QWEN35, encoding="utf-8")
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
