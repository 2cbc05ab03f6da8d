"""Byte-level BPE with the GLM special tokens, in the file layout of the released checkpoints.

The 256 bytes are always in the vocabulary, so every text can be encoded and nothing maps to "unknown". Special tokens
come last. A special token's *string* is ordinary text unless the caller sets `allow_special=True`, so text of users and
tools can never become a role marker.
"""

from __future__ import annotations

import codecs
import copy
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from glm5.chat.split_pattern import SPLIT, any_of, pieces
from glm5.chat.tokenizer_files import (
    DEFAULT_TEMPLATE_VERSION,
    TEMPLATE_FILE,
    TemplateSetting,
    checked,
    chosen_template,
    read_text,
    reason_of,
    stored_template,
)
from glm5.errors import CheckpointError, ConfigError, TooLongError

if TYPE_CHECKING:
    from glm5.chat.formats import ChatFormat

SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
VISIBLE_MARKERS = SPECIAL_TOKENS[21:31]
"""The special tokens that are part of an answer's text. All others have no text and match no stop string."""
STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_ENCODED_CHARACTERS = 1 << 20  # in one call of the library

# A conversation cannot be rendered or ended without these; a foreign tokenizer may lack the others.
_REQUIRED = (*STOP_TOKENS, "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", *VISIBLE_MARKERS)


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters map to themselves, other bytes to U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printable)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def _valid_unicode(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates (JSON can carry both); the tokenizer library refuses them."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Tokenizer:
    """Text to ids and back. Build one with `train`, `byte_level` or `load`."""

    def __init__(self, tokenizer_json: str, template: str | TemplateSetting = DEFAULT_TEMPLATE_VERSION) -> None:
        """`tokenizer_json` is the content of a tokenizer.json. Raises ValueError for an unsupported kind."""
        data = checked(json.loads(tokenizer_json))
        self._json = tokenizer_json
        self._template = TemplateSetting(template, origin="the caller") if isinstance(template, str) else template
        self.special: dict[str, int] = {token["content"]: token["id"] for token in data["added_tokens"]}
        missing = [name for name in _REQUIRED if name not in self.special]
        if missing:
            raise ValueError(f"the special token {missing[0]} is missing")
        # The library object gets no added tokens, so it sees only text; special tokens are handled here. The released
        # files do not flag all of them as special, so the library's own switch would not keep them out of plain text. A
        # tokenizer file may also have truncation or padding set, which must not touch our texts.
        plain = {**data, "added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
        self._bpe = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self._bytes = self._byte_table(data["model"])
        self._special_ids = frozenset(self.special.values())
        self._special_pattern = re.compile(any_of(self.special))
        self.vocab_size = len(self._bytes)
        self._longest = max(map(len, self._bytes))
        self._most = 0
        self._left: int | None = None  # how many more ids are allowed; None for no limit
        self.pad_token_id = self.special["<|endoftext|>"]
        self.stop_token_ids: tuple[int, ...] = tuple(self.special[name] for name in STOP_TOKENS)

    def _byte_table(self, model: dict[str, Any]) -> list[bytes]:
        if model["type"] != "BPE" or not set(_BYTE_OF_CHAR) <= set(model["vocab"]):
            raise ValueError("it is not byte-level BPE with all 256 bytes")
        table = {token_id: text.encode() for text, token_id in self.special.items()}
        for text, token_id in model["vocab"].items():
            if not set(text) <= set(_BYTE_OF_CHAR):
                raise ValueError(f"the token {text!r} is not made of byte-level characters")
            table[token_id] = bytes(_BYTE_OF_CHAR[char] for char in text)
        if set(table) != set(range(len(model["vocab"]) + len(self.special))):
            raise ValueError("its ids have gaps or duplicates")
        return [table[token_id] for token_id in range(len(table))]

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, template_version: str = DEFAULT_TEMPLATE_VERSION
    ) -> Tokenizer:
        """Learn merges from `texts`; the same texts give the same tokenizer.

        `vocab_size` counts bytes, merges and special tokens; texts with too few pairs give a smaller result.
        """
        smallest = len(_BYTE_OF_CHAR) + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise ConfigError(
                f"vocab_size is {vocab_size}, but 256 bytes and {len(SPECIAL_TOKENS)} special tokens need at least "
                f"{smallest}; choose a larger vocab_size."
            )
        bpe = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
            ]
        )
        bpe.post_processor = processors.ByteLevel(trim_offsets=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            initial_alphabet=sorted(_BYTE_OF_CHAR),
            special_tokens=[],
            show_progress=False,
        )
        bpe.train_from_iterator(map(_valid_unicode, texts), trainer)
        bpe.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
        return cls(bpe.to_str(pretty=True), template_version)

    @classmethod
    def byte_level(cls, template_version: str = DEFAULT_TEMPLATE_VERSION) -> Tokenizer:
        """No merges: one id per byte, then the special tokens."""
        return cls.train([], len(_BYTE_OF_CHAR) + len(SPECIAL_TOKENS), template_version)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """Converts conversations to prompts for this tokenizer's model. Raises CheckpointError for a chat template that
        is not Jinja."""
        from glm5.chat.formats import ChatFormat  # imports this module

        return ChatFormat(self._template)

    @functools.cached_property
    def silent_ids(self) -> frozenset[int]:
        """The special tokens outside `VISIBLE_MARKERS`."""
        return frozenset(i for name, i in self.special.items() if name not in VISIBLE_MARKERS)

    @functools.cached_property
    def closing_ids(self) -> frozenset[int]:
        """The tokens with a ">". Only they can complete a marker, such as `</think>`."""
        return frozenset(i for i, text in enumerate(self._bytes) if b">" in text)

    @property
    def template_version(self) -> str:
        """A key of `glm5.chat.RULES`. Raises ConfigError for a checkpoint with another chat template."""
        version = self._template.version or self.chat_format.version
        if version is None:
            raise ConfigError(
                f"The chat template of this tokenizer ({self._template.origin}) is not a GLM-5 template. Serving "
                'works with it, but training does not: set "glm5_template_version" in tokenizer_config.json.'
            )
        return version

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read a directory (or its tokenizer.json).

        `chat_template`, a version such as "5.2" or the path of a Jinja file, overrides the directory. The directory's
        own is `glm5_template_version` in tokenizer_config.json, else the file chat_template.jinja, else `chat_template`
        in tokenizer_config.json.

        Raises:
            CheckpointError: a file is missing, too large or damaged.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        text = read_text(file)
        template = stored_template(file.parent) if chat_template is None else chosen_template(chat_template)
        try:
            return cls(text, template)
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise CheckpointError(
                f"{file} is not a GLM tokenizer: {reason_of(error)}; restore the file or train a tokenizer."
            ) from error

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer can load."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "TokenizersBackend",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        }
        if self._template.version is not None:
            config["glm5_template_version"] = self._template.version
        if self._template.source is not None:
            (directory / TEMPLATE_FILE).write_bytes(self._template.source.encode())
        (directory / "tokenizer.json").write_bytes(self._json.encode())
        (directory / "tokenizer_config.json").write_bytes((json.dumps(config, indent=2) + "\n").encode())

    def hash(self) -> str:
        """SHA-256 of tokenizer.json: equal hashes mean equal ids for every text."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def equals(self, other: Tokenizer) -> bool:
        """Whether the two have the same tokenizer.json, however it is formatted."""
        return self._json == other._json or json.loads(self._json) == json.loads(other._json)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`. With `allow_special`, strings of special tokens become their ids: only for trusted text."""
        if not allow_special:
            return self.encode_batch([text])[0]
        self.check_characters(len(text))
        ids: list[int] = []
        for piece, special in self.split_special(text):
            ids += self._spend([self.special[piece]]) if special else self.encode(piece)
        return ids

    def split_special(self, text: str) -> Iterator[tuple[str, bool]]:
        """`text` cut around the strings of special tokens, as (piece, whether it is one); no piece is empty."""
        start = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > start:
                yield text[start : match.start()], False
            yield match[0], True
            start = match.end()
        if start < len(text):
            yield text[start:], False

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, in parallel, with special token strings as plain text. The library takes some 300
        bytes of memory per byte of text, so it gets long texts in pieces, and few of them at a time."""
        self.check_characters(sum(map(len, texts)))  # refuse before spending seconds and gigabytes
        found: list[list[int]] = [[] for _ in texts]
        batch: list[tuple[int, str]] = []
        size = 0

        def encode() -> None:
            for (number, _), ids in zip(batch, self._bpe_ids([piece for _, piece in batch]), strict=True):
                found[number] += self._spend(ids)
            batch.clear()

        for number, text in enumerate(texts):
            for piece in pieces(text):
                if size + len(piece) > _ENCODED_CHARACTERS:
                    encode()
                    size = 0
                batch.append((number, piece))
                size += len(piece)
        encode()
        return found

    def check_characters(self, count: int) -> None:
        """Raise TooLongError if so many characters certainly have more ids than `bounded` allows."""
        if self._left is not None and count > self._left * self._longest:
            raise self._too_long()

    def _spend(self, ids: list[int]) -> list[int]:
        """The ids, counted against the limit of `bounded`. Raises TooLongError above it."""
        if self._left is not None:
            self._left -= len(ids)
            if self._left < 0:
                raise self._too_long()
        return ids

    def _bpe_ids(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast variant does not track offsets; we do not need them.
        try:
            batch = self._bpe.encode_batch_fast([_valid_unicode(text) for text in texts], add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library, and no Exception
                raise
            raise TooLongError("A run of white space or of one kind of character is too long to be split.") from None
        return [encoding.ids for encoding in batch]

    def bounded(self, ids: int) -> Tokenizer:
        """A copy for one text in pieces that returns at most `ids` ids in total. Raises TooLongError above that, for a
        text that is certainly too long even before it is read."""
        bounded = copy.copy(self)
        bounded._left = bounded._most = ids
        return bounded

    def _too_long(self) -> TooLongError:
        return TooLongError(f"The prompt has more than {self._most} tokens; shorten it.")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Bytes of the ids. Ids outside the vocabulary (padding rows of an embedding) give no bytes."""
        return b"".join(
            self._bytes[i] for i in ids if 0 <= i < self.vocab_size and not (skip_special and i in self._special_ids)
        )

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")


class StreamDecoder:
    """Ids to text as they arrive. Holds back bytes of an incomplete character; all outputs joined equal `decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = False  # whether the decoder has bytes of an incomplete character

    def feed(self, ids: Iterable[int]) -> str:
        data = self._tokenizer.decode_bytes(ids, self._skip_special)
        if not self._held:
            if data.isascii():
                return data.decode("ascii")
            self._utf8.reset()
        text = self._utf8.decode(data)
        self._held = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """The held-back bytes, as U+FFFD; empty after complete text."""
        return self._utf8.decode(b"", final=True)
