"""The tokenizer of a checkpoint, from a Hugging Face folder or a GGUF file (free of torch and transformers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from freetoken.errors import RequestError, StartupError
from freetoken.loader import gguf_tokenizer
from freetoken.loader.checkpoint import Checkpoint, TokenizerFiles
from freetoken.loader.gguf_split import open_gguf
from freetoken.loader.safetensors import read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_WORD_BLANK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet of GPT-2, inverted: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


class Tokenizer:
    """Text to token ids and back.

    ``size`` is the largest id plus one. ``special_tokens`` maps ``bos_token``, ``eos_token``, ``unk_token`` and
    ``pad_token`` to their text where the model has them (what chat templates are given); the properties of the same names
    give ``None`` otherwise. ``special_ids`` are left out by ``decode(..., skip_special_tokens=True)``. ``chat_template``
    is the Jinja source or ``None``, ``named_templates`` holds those for special purposes by name (``tool_use``, say).
    ``byte_level`` says that the pieces of a text are its bytes, cut anywhere.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: dict[str, str],
        chat_template: str | None,
        named_templates: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.named_templates = named_templates or {}
        added = backend.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.byte_level, self._byte_fallback = _decoder_kinds(backend)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised. ``add_special_tokens`` frames it as the
        model wants (bos, say). :class:`RequestError` for text that is not Unicode (half a surrogate pair)."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the text holds half a surrogate pair, which is not a character") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no valid UTF-8 become U+FFFD, ids the tokenizer does not know are left out."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled ``text`` in the vocabulary, or ``None``."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for, possibly part of a character; empty for an unknown id."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token) if 0 <= token < self.size else None
        if piece is None:
            return b""
        if self.byte_level:
            values = [BYTE_OF_CHARACTER.get(character) for character in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_WORD_BLANK, " ").encode()

    def token_text(self, token: int) -> str:
        """:meth:`token_bytes` as text; what is not valid UTF-8 becomes U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")


def _decoder_kinds(backend: Backend) -> tuple[bool, bool]:
    """Whether pieces are spelled in the byte-level alphabet, and whether ``<0xNN>`` pieces are bytes."""
    if backend.decoder is None:
        return False, False
    state = json.loads(backend.decoder.__getstate__())
    kinds = {state.get("type")} | {entry.get("type") for entry in state.get("decoders", [])}
    return "ByteLevel" in kinds, "ByteFallback" in kinds


def load_tokenizer(checkpoint: Checkpoint, tokenizer_path: str | None = None) -> Tokenizer:
    """The tokenizer of ``checkpoint``, or the one at ``tokenizer_path`` (a folder, a tokenizer.json or a .gguf file, of a split one any part).

    Raises :class:`StartupError` in one sentence when it is missing, damaged or of a kind that is not served.
    """
    if tokenizer_path is None:
        return _load(checkpoint.tokenizer())
    path = Path(tokenizer_path).expanduser()
    if not path.exists():
        raise StartupError(f"tokenizer path {path} does not exist")
    if path.is_dir():
        return _load(TokenizerFiles(folder=path))
    if path.suffix.lower() == ".gguf":
        return _load(TokenizerFiles(gguf=open_gguf(path)))
    return _from_folder(path.parent, path)


def byte_tokenizer(size: int) -> Tokenizer:
    """A stand-in for random weights without a tokenizer: ids 0 to 255 are the bytes of UTF-8, each later id ``n`` up to
    ``size`` reads as the word ``n``. It has no special tokens and no chat template.
    """
    alphabet = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    blank = alphabet[0x20]
    vocabulary = {alphabet[i] if i < 256 else f"{blank}{i}": i for i in range(max(size, 256))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, None)


def _load(files: TokenizerFiles) -> Tokenizer:
    if files.gguf is not None:
        backend = gguf_tokenizer.build_tokenizer(files.gguf)
        templates = gguf_tokenizer.chat_templates(files.gguf)
        default = templates.pop(gguf_tokenizer.DEFAULT_TEMPLATE, None)
        return Tokenizer(backend, gguf_tokenizer.special_tokens(files.gguf), default, templates)
    assert files.folder is not None
    return _from_folder(files.folder, files.folder / "tokenizer.json")


def _from_folder(folder: Path, file: Path) -> Tokenizer:
    if not file.exists():
        raise StartupError(f"{folder} has no {file.name}; pass --tokenizer-path with a folder that has one")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{file}: cannot be read: {error}") from None
    try:
        backend = Backend.from_str(text)
        backend.encode("a")  # a post-processor that names a missing token shows only in use
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics that derive from BaseException
        problem = (str(error).splitlines() or ["unknown"])[0]
        raise StartupError(f"{file}: not a tokenizer that can be read: {problem}") from None
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else {}
    templates = _folder_templates(folder, config)
    default = templates.pop(gguf_tokenizer.DEFAULT_TEMPLATE, None)
    return Tokenizer(backend, _special_tokens(folder, config), default, templates)


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    map_file = folder / "special_tokens_map.json"
    mapped = read_json(map_file) if map_file.exists() else {}
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name) or mapped.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: ``chat_template.jinja`` with ``additional_chat_templates/NAME.jinja``, before
    ``chat_template.json``, before ``tokenizer_config.json``, where a list names several."""
    default = folder / "chat_template.jinja"
    if default.exists():
        files = {gguf_tokenizer.DEFAULT_TEMPLATE: default}
        files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {name: _read_template(file) for name, file in files.items()}
    wrapped = folder / "chat_template.json"
    found = (read_json(wrapped) if wrapped.exists() else config).get("chat_template")
    if isinstance(found, str):
        return {gguf_tokenizer.DEFAULT_TEMPLATE: found}
    named = {entry.get("name"): entry.get("template") for entry in found or () if isinstance(entry, dict)}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{file}: cannot be read: {error}") from None
