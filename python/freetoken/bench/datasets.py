"""Prompts for the serving and offline benchmarks: random ids, shared prefixes, a prompt file (torch-free)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.errors import StartupError


@dataclass(frozen=True)
class Prompt:
    """``content`` is text or token ids; ``output_len`` the number of tokens to ask for."""

    content: str | list[int]
    output_len: int


def _length(rng: random.Random, longest: int, ratio: float) -> int:
    return rng.randint(max(1, int(longest * ratio)), longest)


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def random_prompts(
    count: int, *, input_len: int, output_len: int, vocab_size: int, range_ratio: float = 1.0, seed: int = 0
) -> list[Prompt]:
    """``count`` prompts of random ids. Lengths are exact with ``range_ratio`` 1, else uniform in ``[ratio * len, len]``."""
    rng = random.Random(seed)
    return [
        Prompt(_ids(rng, _length(rng, input_len, range_ratio), vocab_size), _length(rng, output_len, range_ratio))
        for _ in range(count)
    ]


def shared_prefix_prompts(
    *,
    groups: int,
    prompts_per_group: int,
    prefix_len: int,
    question_len: int,
    output_len: int,
    vocab_size: int,
    seed: int = 0,
) -> list[Prompt]:
    """``groups`` random prefixes, each before ``prompts_per_group`` random questions; in shuffled order."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for _ in range(groups):
        prefix = _ids(rng, prefix_len, vocab_size)
        prompts += [Prompt(prefix + _ids(rng, question_len, vocab_size), output_len) for _ in range(prompts_per_group)]
    rng.shuffle(prompts)
    return prompts


def file_prompts(path: str, *, count: int | None, output_len: int) -> list[Prompt]:
    """Prompts of a file, repeated in order when ``count`` is more than it holds.

    ``.jsonl``: objects with ``prompt`` (text or token ids) and perhaps ``output_len``; anything else: a prompt a line.
    :class:`StartupError` names what is wrong with the file.
    """
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--dataset-path {path}: {error}") from None
    if not lines:
        raise StartupError(f"--dataset-path {path} holds no prompt")
    prompts = [
        _json_prompt(f"{path}:{number}", line, output_len) if path.endswith(".jsonl") else Prompt(line, output_len)
        for number, line in enumerate(lines, 1)
    ]
    if count is None:
        return prompts
    return [prompts[index % len(prompts)] for index in range(count)]


def _json_prompt(where: str, line: str, output_len: int) -> Prompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise StartupError(f"{where}: not JSON: {error}") from None
    content: Any = item.get("prompt") if isinstance(item, dict) else None
    is_ids = isinstance(content, list) and content and all(type(token) is int and token >= 0 for token in content)
    if not (is_ids or (isinstance(content, str) and content)):
        raise StartupError(f"{where}: needs a key 'prompt' with text or token ids")
    length = item.get("output_len", output_len)
    if type(length) is not int or length < 1:
        raise StartupError(f"{where}: output_len must be an integer of at least 1")
    return Prompt(content, length)
