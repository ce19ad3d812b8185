"""A random GGUF file of the size and layout of the published 27B ternary model, for measuring speed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO

import gguf
import numpy as np
from tiny_gguf import PACKED_TYPES, is_folded, known_type, write_hadamard, write_metadata
from tiny_spec import CHAT_TEMPLATE, SPECIAL_TOKENS, TinyModel, hf_config

from freetoken.loader.gguf_names import gguf_tensors
from freetoken.loader.tokenizer import BYTE_OF_CHARACTER
from freetoken.models.parse import parse_hf_config

FULL_SIZE = TinyModel(
    arch="qwen3_5",
    hidden_size=5120,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    intermediate_size=17408,
    max_position_embeddings=262144,
    rope_theta=1e7,
    linear_key_heads=16,
    linear_value_heads=48,
    linear_key_dim=128,
    linear_value_dim=128,
    hadamard=1024,
    gdn_v_grouped=True,
)
VOCABULARY = 248320
FIRST_SPECIAL = 248044
# Rows drawn for each matrix; the rest repeats them.
DRAWN_ROWS = 1024


def write_full_size(path: Path, spec: TinyModel = FULL_SIZE, vocabulary: int = VOCABULARY) -> Path:
    """Write the file (7.2 GB as it stands), tensor by tensor; returns ``path``.

    Matrices are a thousand random ternary rows over and over, with scales that keep activations in range; the vocabulary is
    synthetic, of the true size: bytes, pairs of bytes and pairs of these with a byte, with their merges.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    model = parse_hf_config(hf_config(spec, vocabulary), None, "full")
    shapes = {source: shape for source, (_, shape) in gguf_tensors(model).items()}
    folded = [name for name in shapes if is_folded(name, spec)]
    writer = gguf.GGUFWriter(path, "qwen35")
    write_metadata(writer, spec, "pq2_0")
    write_hadamard(writer, spec, {shapes[name][-1] for name in folded}, folded)
    _write_vocabulary(writer, vocabulary)
    kind, elements, size = PACKED_TYPES["pq2_0"]
    packed = {*folded, "token_embd.weight"}
    for name, shape in shapes.items():
        if name in packed:
            row = shape[1] // elements * size
            with known_type(kind, elements, size):
                writer.add_tensor_info(name, (shape[0], row), np.dtype(np.uint8), shape[0] * row, raw_dtype=kind)  # type: ignore[arg-type]
        else:
            narrow = _is_bfloat16(name)
            raw = gguf.GGMLQuantizationType.BF16 if narrow else gguf.GGMLQuantizationType.F32
            nbytes = math.prod(shape) * (2 if narrow else 4)
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    out, generator = writer.fout[0], np.random.default_rng(spec.seed)
    for name, shape in shapes.items():
        writer.write_padding(out, out.tell())
        if name in packed:
            _write_rows(out, _random_rows(shape, generator), shape[0])
        else:
            _small(name, shape, generator).tofile(out)
    writer.write_padding(out, out.tell())
    writer.close()
    return path


def _is_bfloat16(name: str) -> bool:
    return name.split(".")[-2] in ("ssm_alpha", "ssm_beta")


def _write_rows(out: IO[bytes], drawn: np.ndarray, rows: int) -> None:
    """``rows`` rows, those of ``drawn`` over and over."""
    for start in range(0, rows, len(drawn)):
        drawn[: rows - start].tofile(out)


def _random_rows(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """The rows that a matrix of ``shape`` repeats."""
    rows, width = shape
    drawn = min(DRAWN_ROWS, rows)
    codes = generator.integers(0, 3, (drawn, width // 128, 32, 4), dtype=np.uint8)
    scales = generator.uniform(0.8, 1.2, (drawn, width // 128, 1)) * math.sqrt(1.5 / width)
    quads = (codes << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(3).astype(np.uint8)
    return np.concatenate((scales.astype("<f2").view(np.uint8), quads), 2).reshape(drawn, -1)


def _small(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Norms of 1, decays as a fresh model has them, and noise of the variance of one over the inputs."""
    if name.endswith(("norm.weight", "dt.bias")):
        return np.ones(shape, dtype=np.float32)
    if name.endswith("ssm_a"):
        return -generator.uniform(0.01, 16.0, shape).astype(np.float32)
    noise = (generator.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
    return gguf.quants.quantize(noise, gguf.GGMLQuantizationType.BF16) if _is_bfloat16(name) else noise


def _write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    alphabet = list(BYTE_OF_CHARACTER)
    tokens, merges = list(alphabet), []
    last = min(FIRST_SPECIAL, size - len(SPECIAL_TOKENS))
    while len(tokens) < last:
        # Every earlier token with every byte, in order: pairs of bytes first.
        left, right = divmod(len(tokens) - 256, 256)
        merges.append(f"{tokens[left]} {alphabet[right]}")
        tokens.append(tokens[left] + alphabet[right])
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    tokens += SPECIAL_TOKENS
    kinds += [gguf.TokenType.UNUSED] * (size - len(tokens))
    tokens += [f"[PAD{token}]" for token in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(last + 2)
    writer.add_bos_token_id(last)
    writer.add_pad_token_id(last)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
