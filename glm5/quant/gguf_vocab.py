"""The tokenizer of a checkpoint as GGUF metadata: byte-level BPE with llama.cpp's pre-tokenizer "glm4"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm5.chat.split_pattern import SPLIT
from glm5.chat.tokenizer import VISIBLE_MARKERS, Tokenizer
from glm5.chat.tokenizer_files import TEMPLATE_FILE, read_text, stored_template
from glm5.config.model import GLM5Config
from glm5.errors import ConfigError

SPECIAL = {
    "bos": "[gMASK]", "eos": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>", "unk": "<|endoftext|>",
    "pad": "<|endoftext|>",
}  # fmt: skip
"""Special tokens by their role in llama.cpp. The chat template writes [gMASK] itself, so it is not added to prompts."""


def add_vocabulary(writer: Any, gguf: Any, folder: Path, config: GLM5Config) -> None:
    """Write tokens, merges, special tokens and the Jinja chat template, if there is one. Without tokenizer.json in the
    folder, the file has no vocabulary and is for ids only.

    Raises ConfigError for a tokenizer that llama.cpp would split differently or that the model has too few rows for.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        writer.add_tokenizer_model("none")
        return
    tokenizer = Tokenizer.load(folder)  # checks the file
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{file} has {tokenizer.vocab_size:,} tokens, but the model has {config.vocab_size:,} rows; they do not "
            f"belong together."
        )
    data = json.loads(read_text(file))
    _check_split(file, data["pre_tokenizer"])
    words = [f"[PAD{row}]" for row in range(config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * config.vocab_size
    for word, row in data["model"]["vocab"].items():
        words[row], types[row] = word, gguf.TokenType.NORMAL
    for token in data["added_tokens"]:
        # llama.cpp leaves control tokens out of texts; marks of thinking and tools are part of an answer.
        shown = token["content"] in VISIBLE_MARKERS or token.get("special") is False
        words[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.USER_DEFINED if shown else gguf.TokenType.CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"].get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(words)
    writer.add_token_types(types)
    # The key must exist. Byte 255 is in no UTF-8, so this merge is never applied.
    writer.add_token_merges(merges or ["ÿ ÿ"])
    for role, word in SPECIAL.items():
        getattr(writer, f"add_{role}_token_id")(tokenizer.special[word])
    writer.add_add_bos_token(False)
    jinja = folder / TEMPLATE_FILE
    template = read_text(jinja) if jinja.exists() else stored_template(folder).source
    if template is not None:
        writer.add_chat_template(template)


def _check_split(file: Path, pre_tokenizer: dict[str, Any]) -> None:
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    patterns = [step["pattern"]["Regex"] if step["type"] == "Split" else step["type"] for step in steps]
    if patterns != [SPLIT, "ByteLevel"] or steps[-1].get("use_regex"):
        raise ConfigError(
            f'{file} splits text in another way than the tokenizers of GLM, which is the only one that a "glm-dsa" '
            f"file can name; move tokenizer.json away to write a file for ids only."
        )
