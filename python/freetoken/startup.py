"""From raw arguments to a resolved configuration and a tokenizer, without torch; shared by the server and ``Engine``."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from freetoken import environ, hardware
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.demo import demo_model_path
from freetoken.loader.tokenizer import Tokenizer, load_tokenizer
from freetoken.server_args import Config, ServerArgs, model_overrides, resolve


@dataclass(frozen=True)
class Prepared:
    """What both front ends start from."""

    config: Config
    tokenizer: Tokenizer


def prepare(args: ServerArgs) -> Prepared:
    """Open the model's metadata and tokenizer and resolve ``args``.

    Raises :class:`~freetoken.errors.StartupError` or :class:`~freetoken.environ.EnvironmentValueError`, each one
    sentence, for anything that cannot work.
    """
    environ.validate()
    path = args.model_path or demo_model_path()
    checkpoint = open_checkpoint(path, args.load_format, model_overrides(args))
    tokenizer = load_tokenizer(checkpoint, args.tokenizer_path)
    config = resolve(
        args,
        hardware.probe(),
        checkpoint.model,
        model_path=path,
        seed=secrets.randbits(31),
        tokenizer_size=tokenizer.size,
    )
    return Prepared(config, tokenizer)
