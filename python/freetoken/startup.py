"""From raw arguments to a resolved configuration and a tokenizer, without torch; shared by the server and ``Engine``."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from freetoken import environ, hardware, server_args
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.demo import demo_model_path
from freetoken.loader.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from freetoken.models.config import ModelConfig
from freetoken.resolve import resolve
from freetoken.server_args import Config, ServerArgs


@dataclass(frozen=True)
class Opened:
    """What the start needs to know of a checkpoint before any weight is read."""

    path: str
    model: ModelConfig
    tokenizer: Tokenizer


def open_model(args: ServerArgs) -> Opened:
    """Read the model's description and its tokenizer; :class:`~freetoken.errors.StartupError` when they are not usable.

    Random weights (``--load-format dummy``) of a folder without a tokenizer get one of plain bytes.
    """
    path = args.model_path or str(demo_model_path())
    checkpoint = open_checkpoint(path, args.load_format, server_args.model_overrides(args))
    if args.load_format == "dummy" and args.tokenizer_path is None and not _has_tokenizer(Path(path)):
        return Opened(path, checkpoint.model, byte_tokenizer(checkpoint.model.vocab_size))
    return Opened(path, checkpoint.model, load_tokenizer(checkpoint, args.tokenizer_path))


def _has_tokenizer(path: Path) -> bool:
    return path.is_file() or (path / "tokenizer.json").exists() or any(path.glob("*.gguf"))


def configure(args: ServerArgs, opened: Opened) -> Config:
    """Check the environment and decide every ``auto``; :class:`~freetoken.errors.StartupError` or
    :class:`~freetoken.environ.EnvironmentValueError`, each one sentence, for what cannot work.
    """
    environ.validate()
    return resolve(
        args,
        hardware.probe(),
        opened.model,
        model_path=opened.path,
        seed=secrets.randbits(31),
        tokenizer_size=opened.tokenizer.size,
    )


def prepare(args: ServerArgs) -> tuple[Config, Tokenizer]:
    """:func:`open_model` and :func:`configure` in one, for callers in the same process."""
    opened = open_model(args)
    return configure(args, opened), opened.tokenizer


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer again, in a process that was given the configuration alone."""
    path = Path(config.model_path)
    if config.load_format == "dummy" and config.tokenizer_path is None and not _has_tokenizer(path):
        return byte_tokenizer(config.model.vocab_size)
    checkpoint = open_checkpoint(config.model_path, config.load_format, config.model_overrides)
    return load_tokenizer(checkpoint, config.tokenizer_path)
