"""Tokenizers: GGUF-built ones against transformers and a BPE of plain Python; folders and their damage."""

from __future__ import annotations

import json
import random
import shutil
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from make_tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, TRAINING_TEXT, make_tiny_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from freetoken.errors import RequestError, StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.gguf_tokenizer import PRE_TOKENIZERS
from freetoken.loader.tokenizer import Tokenizer, load_tokenizer
from rewrite_gguf import rewrite_metadata

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The capital of France is Paris. It's what they'RE saying: I'LL, we'd, you've, 'tis.",
    "  leading, trailing  and   inner    blanks \t\ttabs\n\n\nnewlines\r\n  \n end  ",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != '__init__'}  # 100%\n\tpass\n",
    "0 1 12 123 1234 12345 3.14159 1e-5 1,000,000 0x7f ١٢٣ ½ Ⅻ ²",
    "x1 y22 z333  4 a5b6 7  8   9",
    "😀😃 👨‍👩‍👧‍👦 🏳️‍🌈 ✅ e\u0301 é \u0061\u030a å ﬁ ½",
    "日本語のテキスト。中文\uff0c测试\uff01 한국어 문장입니다. ภาษาไทย",
    "مرحبا بالعالم، كَيْفَ حَالُكَ؟ नमस्ते दुनिया, हिंदी में क्षत्रिय। বাংলা ভাষা தமிழ்",
    "Привет, как дела? Ελληνικά. עִבְרִית ‏RTL‎",
    "zero\u200bwidth\u00a0nbsp\u3000wide\ufeffbom\u2028line",
    "$100 <=> a^b~c|d + e `code` @user #tag https://example.com/a?b=c&d=%20",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|>",
    "almost <|im_start|and <|im_end",
    "\x00\x01\x7f control",
    "a" * 300,
]


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = [
        *"abcXYZ  \n\t0123456789.,!?'\"-_/$|~",
        "é",
        "e\u0301",
        "ß",
        "日",
        "한",
        "ك",
        "َ",
        "न",
        "ि",
        "😀",
        "\u200d",
        "\r\n",
    ]
    alphabet += ["'s", "'Ll", " the", "ing", "<|im_end|>", "\u00a0", "½"]
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(count)]


CUTS = {
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "default": [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ],
}


class PlainBPE:
    """Byte-level BPE as a textbook has it: cut, spell, merge the earliest pair until none is left."""

    def __init__(self, file: GGUFFile) -> None:
        self.pre = file.metadata["tokenizer.ggml.pre"]
        tokens = file.metadata["tokenizer.ggml.tokens"]
        kinds = file.metadata["tokenizer.ggml.token_type"].tolist()
        self.ids = {token: index for index, token in enumerate(tokens) if kinds[index] != 5}
        self.special = [token for token, kind in zip(tokens, kinds) if kind in (3, 4)]
        self.ranks = {tuple(m.split(" ", 1)): rank for rank, m in enumerate(file.metadata["tokenizer.ggml.merges"])}
        printable = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
        rest = iter(range(256, 512))
        self.spelling = {b: chr(b) if b in printable else chr(next(rest)) for b in range(256)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        pattern = "|".join(regex.escape(token) for token in sorted(self.special, key=len, reverse=True))
        for piece in regex.split(f"({pattern})", text):
            if piece in self.special:
                ids.append(self.ids[piece])
                continue
            for word in self.cut(unicodedata.normalize("NFC", piece) if self.pre in ("qwen2", "qwen35") else piece):
                ids += self.merge(word)
        return ids

    def cut(self, text: str) -> list[str]:
        pieces = [text]
        for pattern in CUTS[self.pre]:
            finer = []
            for piece in pieces:
                last = 0
                for match in regex.finditer(pattern, piece):
                    finer += [piece[last : match.start()], match[0]]
                    last = match.end()
                finer.append(piece[last:])
            pieces = [piece for piece in finer if piece]
        return pieces

    def merge(self, word: str) -> list[int]:
        parts = [self.spelling[byte] for byte in word.encode()]
        if self.pre == "llama-bpe" and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while len(parts) > 1:
            rank, at = min((self.ranks.get(pair, 10**9), index) for index, pair in enumerate(pairwise(parts)))
            if rank == 10**9:
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        return [self.ids[part] for part in parts]


def gguf_tokenizer(tmp_path: Path, **options: Any) -> tuple[GGUFFile, Tokenizer]:
    path = make_tiny_model(tmp_path / "t.gguf", format="gguf", num_layers=1, tokenizer_vocab=600, **options)
    checkpoint = open_checkpoint(path)
    assert checkpoint.gguf is not None
    return checkpoint.gguf, load_tokenizer(checkpoint)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_family_matches_plain_python(pre: str, tmp_path: Path) -> None:
    file, ours = gguf_tokenizer(tmp_path, pre=pre)
    plain = PlainBPE(file)
    for text in TEXTS + list(TRAINING_TEXT) + random_texts(300, seed=len(pre)):
        assert ours.encode(text, add_special_tokens=False) == plain.encode(text), text


def test_families_differ_where_they_should(tmp_path: Path) -> None:
    """The check above can fail: no two families cut all the texts alike."""
    cuts = set()
    for pre in PRE_TOKENIZERS:
        file, _ = gguf_tokenizer(tmp_path, pre=pre)
        cuts.add(str([PlainBPE(file).cut(text) for text in TEXTS]))
    assert len(cuts) == len(PRE_TOKENIZERS)


@pytest.mark.parametrize(("pre", "oracle"), [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer)])
def test_qwen_families_match_transformers(pre: str, oracle: Any, tmp_path: Path) -> None:
    file, ours = gguf_tokenizer(tmp_path, pre=pre, arch="qwen3")
    vocabulary = {token: index for index, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata["tokenizer.ggml.merges"]]
    theirs = oracle(vocab=vocabulary, merges=merges, additional_special_tokens=list(SPECIAL_TOKENS))
    for text in TEXTS + random_texts(300, seed=11):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_smollm2_matches_plain_python(smollm2: str) -> None:
    file = GGUFFile.open(smollm2)
    ours, plain = load_tokenizer(open_checkpoint(smollm2)), PlainBPE(file)
    for text in TEXTS + random_texts(500, seed=4):
        assert ours.encode(text, False) == plain.encode(text), text


@pytest.mark.slow
def test_smollm2_matches_transformers(smollm2: str) -> None:
    """transformers leaves out the family's cut around single digits; with the published one in place, all ids agree."""
    path = Path(smollm2)
    ours = load_tokenizer(open_checkpoint(path))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = [text for text in TEXTS + random_texts(200, seed=3) if not regex.search(r"\s\p{N}|\p{N}\p{N}", text)]
    assert len(plain) > 30
    for text in plain:
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False), text
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS + random_texts(500, seed=4):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, False) == ids, text
        assert ours.decode(ids, False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, True) == theirs.decode(ids, True, clean_up_tokenization_spaces=False)
    assert ours.chat_template == theirs.chat_template and ours.size == 49152
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name) == ours.special_tokens[name]


def test_pieces_add_up(smollm2: str, tiny_folder: Path) -> None:
    for path in (smollm2, tiny_folder):
        tokenizer = load_tokenizer(open_checkpoint(path))
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            text = unicodedata.normalize("NFC", text) if path == tiny_folder else text
            assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert all(tokenizer.token_bytes(token) for token in range(tokenizer.size))
        assert tokenizer.token_bytes(tokenizer.size) == tokenizer.token_bytes(-1) == b""
        assert tokenizer.token_text(tokenizer.encode("😀", False)[0]).endswith("\ufffd")


def test_special_tokens(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(tiny_folder))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "hi" and tokenizer.decode(ids, False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert (tokenizer.bos_token, tokenizer.unk_token, tokenizer.size) == ("<|im_start|>", None, 384)
    assert tokenizer.token_id("<|im_end|>") == 2 and tokenizer.token_id("no such token") is None
    assert tokenizer.token_text(1) == "<|im_start|>"


def test_half_a_surrogate_pair_is_a_request_error(tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        load_tokenizer(open_checkpoint(tiny_folder)).encode("a\ud800b")


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_bos_is_put_first_where_the_model_says_so(format: str, tmp_path: Path) -> None:
    for add_bos in (False, True):
        path = tmp_path / f"{add_bos}{'.gguf' if format == 'gguf' else ''}"
        tokenizer = load_tokenizer(open_checkpoint(make_tiny_model(path, format=format, add_bos=add_bos)))
        bare = tokenizer.encode("hi", add_special_tokens=False)
        assert tokenizer.encode("hi", add_special_tokens=True) == ([1, *bare] if add_bos else bare)
        assert tokenizer.encode("", add_special_tokens=True) == ([1] if add_bos else [])


def test_eos_user_defined_unused_and_empty_tokens(tiny_gguf: Path, tmp_path: Path) -> None:
    metadata = GGUFFile.open(tiny_gguf).metadata
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.token_type"].tolist()
    known = len(tokens) - 5
    tokens[known : known + 3], kinds[known : known + 3] = ["<é think>", "", "[x]"], [4, 1, 5]
    change = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = load_tokenizer(open_checkpoint(rewrite_metadata(tiny_gguf, tmp_path / "x.gguf", change)))
    ids = tokenizer.encode("a<é think>b[x]")
    assert ids[0] == 1 and ids[-1] == 2 and known in ids and known + 2 not in ids
    assert tokenizer.size == known + 1 and known not in tokenizer.special_ids
    assert tokenizer.token_bytes(known) == "<é think>".encode()


class PlainSentencePiece:
    """Merge the two neighbours whose union is the token of highest score, the leftmost of equals, until none is left."""

    def __init__(self, file: GGUFFile) -> None:
        tokens, kinds = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"].tolist()
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.scores = {
            t: s for t, s, k in zip(tokens, file.metadata["tokenizer.ggml.scores"].tolist(), kinds) if k == 1
        }
        self.prefix = "\u2581" if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
        self.special = [token for token, kind in zip(tokens, kinds) if kind in (2, 3, 4)]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text):
            if piece in self.special:
                ids.append(self.ids[piece])
            elif piece:
                ids += self.merge(list(self.prefix + piece.replace(" ", "\u2581")))
        return ids

    def merge(self, parts: list[str]) -> list[int]:
        while True:
            found = [(-self.scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in self.scores]
            if not found:
                break
            at = min(found)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids: list[int] = []
        for part in parts:
            ids += [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids


def sentencepiece_metadata(size: int) -> dict[str, Any]:
    """Metadata as a sentencepiece BPE model leaves them: later merges have lower scores, all characters the lowest."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(TRAINING_TEXT, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learned = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    pieces = [token for token, _ in learned if len(token) > 1] + [token for token, _ in learned if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<user>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("prefix", [None, False])
def test_sentencepiece_matches_plain_python(prefix: bool | None, tiny_gguf: Path, tmp_path: Path) -> None:
    change = sentencepiece_metadata(500) | {"tokenizer.ggml.add_space_prefix": prefix}
    path = rewrite_metadata(tiny_gguf, tmp_path / "spm.gguf", change)
    ours, plain = load_tokenizer(open_checkpoint(path)), PlainSentencePiece(GGUFFile.open(path))
    texts = TEXTS + list(TRAINING_TEXT) + random_texts(500, seed=8) + ["hi<s> there</s><user>x <unk>y", "<0x41>"]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == plain.encode(text), text
        assert ours.encode(text) == [1, *ids]
        if not any(token in text for token in ("<s>", "</s>", "<user>", "<unk>")):
            assert ours.decode(ids) == text
            pieces = b"".join(ours.token_bytes(token) for token in ids).decode()
            assert pieces == (" " + text if prefix is None and text else text)
    assert ours.special_ids == {0, 1, 2} and ours.size == len(change["tokenizer.ggml.tokens"])


def test_sentencepiece_matches_transformers(tiny_gguf: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(tiny_gguf, tmp_path / "spm.gguf", sentencepiece_metadata(500))
    ours = load_tokenizer(open_checkpoint(path))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS + random_texts(300, seed=9):
        if text.strip() == text and "<" not in text:
            assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False), text


BAD_GGUF: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "t5"}, "'t5' is not served; pass --tokenizer-path"),
    ({"tokenizer.ggml.model": [1, 2]}, "tokenizer.ggml.model"),
    ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    ({"tokenizer.ggml.model": 7}, "'7' is not served"),
    ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre 'falcon' is not served"),
    ({"tokenizer.ggml.pre": ["smollm"]}, "tokenizer.ggml.pre"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": [1, 2, 3]}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type"),
    ({"tokenizer.ggml.token_type": None, "tokenizer.ggml.tokens": ["a", "a"]}, "both 'a'"),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
    ({"tokenizer.ggml.merges": ["ab"]}, "element 0"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, "cannot be built"),
    ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
    ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id"),
    ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id"),
]


@pytest.mark.parametrize(("change", "word"), BAD_GGUF)
def test_bad_tokenizer_metadata(change: dict[str, Any], word: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(tiny_gguf, tmp_path / "bad.gguf", change)
    with pytest.raises(StartupError, match=word) as caught:
        load_tokenizer(open_checkpoint(path))
    assert "\n" not in str(caught.value)


def test_tokenizer_path(tiny_folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf)
    expected = load_tokenizer(open_checkpoint(tiny_folder)).encode("hello 12")
    for path in (tiny_folder, tiny_folder / "tokenizer.json"):
        held = load_tokenizer(checkpoint, str(path))
        assert held.encode("hello 12") == expected and held.eos_token == "<|im_end|>"
    assert load_tokenizer(open_checkpoint(tiny_folder), str(tiny_gguf)).chat_template == CHAT_TEMPLATE
    with pytest.raises(StartupError, match="does not exist"):
        load_tokenizer(checkpoint, str(tmp_path / "none"))


def test_broken_folders(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "f"))
    checkpoint = open_checkpoint(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        load_tokenizer(checkpoint)
    missing = [{"SpecialToken": {"id": "absent", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    framed = json.loads((tiny_folder / "tokenizer.json").read_text())
    framed["post_processor"] = {"type": "TemplateProcessing", "single": missing, "pair": missing, "special_tokens": {}}
    for text in ("{}", "[]", "nonsense", '{"model": {"type": "BPE"}}', "\ufeff", b"\xff", json.dumps(framed)):
        (folder / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(StartupError, match=r"tokenizer\.json"):
            load_tokenizer(checkpoint)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        load_tokenizer(checkpoint)


def test_where_a_folder_keeps_its_template_and_specials(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "f"))
    checkpoint = open_checkpoint(folder)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>", "bos_token": "other"}))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.chat_template == "D" and tokenizer.named_templates == {"tool_use": "T"}
    assert (tokenizer.bos_token, tokenizer.unk_token, tokenizer.eos_token) == ("<s>", "<unk>", None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert load_tokenizer(checkpoint).chat_template == "J"
    (folder / "chat_template.jinja").write_text("{{ jinja }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.chat_template == "{{ jinja }}" and tokenizer.named_templates == {"tool_use": "{{ tools }}"}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja"):
        (folder / name).unlink()
    bare = load_tokenizer(checkpoint)
    assert bare.chat_template is None and bare.special_tokens == {}


def test_a_gguf_file_with_several_templates(tiny_gguf: Path, tmp_path: Path) -> None:
    change = {"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]}
    tokenizer = load_tokenizer(open_checkpoint(rewrite_metadata(tiny_gguf, tmp_path / "named.gguf", change)))
    assert tokenizer.chat_template == CHAT_TEMPLATE and tokenizer.named_templates == {"tool_use": "T"}


def test_byte_fallback_and_truncation_of_a_folder(tiny_folder: Path, tmp_path: Path) -> None:
    """A sentencepiece-like tokenizer: blanks are written as U+2581 and unknown bytes as <0xNN>; saved truncation is off."""
    vocabulary = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
        "\u2581": 257,
        "a": 258,
        "\u2581a": 259,
    }
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(tiny_folder), str(tmp_path))
    ids = tokenizer.encode("a aé a")
    assert ids == [258, 259, 0xC3 + 1, 0xA9 + 1, 259]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids) == "a aé a"
    assert tokenizer.size == 260
