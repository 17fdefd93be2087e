"""Tokenizers: loaded from a local folder or the hub, or a byte-level BPE that is trained on the data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from outeffhop._naming import require
from outeffhop.lab.data.corpus import Corpus, pieces
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.data.hub import tokenizer_files
from outeffhop.lab.data.samples import check_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["around_of", "find_tokenizer", "ids_of", "load_tokenizer", "marking_ids", "special_ids", "train_tokenizer"]

_VERSION = 2  # of the training below; part of the cache key of a trained tokenizer
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
_ENOUGH = 1 << 25  # characters to train on
_SMALLEST = 256 + len(_SPECIAL)  # each byte is a token


def find_tokenizer(
    given: str | os.PathLike[str] | PreTrainedTokenizerFast | None, corpus: Corpus, vocab_size: int, cache: DiskCache
) -> PreTrainedTokenizerFast:
    """The given tokenizer or the one in the given folder, else one that is trained on the corpus and cached."""
    if isinstance(given, (str, os.PathLike)):
        return load_tokenizer(given)
    if given is not None:
        if getattr(given, "backend_tokenizer", None) is None:
            raise TypeError(f"tokenizer is of type {type(given).__name__}: give a PreTrainedTokenizerFast or a folder")
        return given
    check_size("vocab_size", vocab_size, 0)
    if vocab_size < _SMALLEST:
        raise ValueError(f"vocab_size={vocab_size}: must be at least {_SMALLEST}, one for each byte and special token")

    def build(folder: Path) -> dict[str, int]:
        trained = train_tokenizer(_spread(corpus), vocab_size)
        trained.backend_tokenizer.save(str(folder / "tokenizer.json"))
        return {"vocab_size": len(trained)}

    key = {"version": _VERSION, "text": corpus.digest, "vocab_size": vocab_size}
    folder, _ = cache.get("tokenizer", key, build)
    return _wrap_own(Tokenizer.from_file(str(folder / "tokenizer.json")))


def _spread(corpus: Corpus) -> Iterator[str]:
    """The training text, or evenly spaced pieces of it if it is longer than training needs."""
    _, characters = corpus.count("train")
    step = max(1, characters // _ENOUGH)
    return (text for text, _ in islice(pieces(corpus.splits["train"]()), 0, None, step))


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE with GPT-2's word pattern; ids 0 to 4 are <pad>, <s>, </s>, <unk> and <mask>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    _add_template(tokenizer, "<s> $A </s>", ["<s>", "</s>"])
    return _wrap_own(tokenizer)


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Loads a tokenizer from a local folder, a GGUF file, or a model of the Hugging Face hub (``hub:NAME``).

    The folder contains a tokenizer saved by transformers, or only the vocabulary of BERT (vocab.txt), of GPT-2, or of
    RoBERTa and OPT (vocab.json and merges.txt). A vocabulary with <s> is that of RoBERTa and OPT; as in OPT, documents
    begin and end with </s>.
    """
    from outeffhop.models.gguf import is_gguf
    from outeffhop.models.remote_code import refuse_code

    if str(folder).startswith("hub:"):
        folder = tokenizer_files(str(folder))
    path = Path(expanduser(folder))
    names = {p.name for p in path.iterdir()} if path.is_dir() else set()
    if is_gguf(path):
        require("gguf", "gguf")
        read: Callable[[Path], PreTrainedTokenizerFast] = _of_gguf
    elif names & {"tokenizer.json", "tokenizer_config.json"}:
        refuse_code(path / "tokenizer_config.json", remedy=": give a folder with a plain tokenizer.json")
        read = _saved
    elif "vocab.txt" in names:
        read = _bert
    elif {"vocab.json", "merges.txt"} <= names:
        read = _byte_level
    else:
        raise ValueError(
            f"tokenizer={str(path)!r} is not a folder with a tokenizer: it must contain tokenizer.json, vocab.txt, "
            "or vocab.json and merges.txt"
        )
    try:
        found = read(path)
    except Exception as error:  # tokenizers raises Exception; transformers raises anything for a damaged file
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tokenizer={str(path)!r} cannot be read: {said}") from error
    if not 0 < ids_of(found) <= 2 * len(found):
        raise ValueError(
            f"tokenizer={str(path)!r} has {len(found)} tokens, but ids up to {ids_of(found) - 1}: is it damaged?"
        )
    return found


def ids_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The number of ids a model needs; larger than the number of tokens if the tokenizer leaves ids out."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """The fields of a model's config that name special tokens."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def around_of(tokenizer: PreTrainedTokenizerFast) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer itself puts before and after a text: [CLS] and [SEP], or </s> alone, or nothing."""
    found = tokenizer("a", return_special_tokens_mask=True)
    ids, added = found["input_ids"], found["special_tokens_mask"]
    if all(added):
        raise ValueError("the tokenizer has no token for the text 'a': is it damaged?")
    first, last = added.index(0), len(added) - added[::-1].index(0)
    return tuple(ids[:first]), tuple(ids[last:])


def marking_ids(tokenizer: PreTrainedTokenizerFast | None) -> list[int] | None:
    """The ids of the tokens that begin, end, separate and pad texts; None without a tokenizer."""
    if tokenizer is None:
        return None
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    return [i for i in (getattr(tokenizer, name, None) for name in names) if i is not None]


def _saved(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer saved by transformers."""
    from transformers import AutoTokenizer

    return _fast(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))


def _of_gguf(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a GGUF file."""
    from transformers import AutoTokenizer

    return _fast(
        AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    )


def _fast(found: Any) -> PreTrainedTokenizerFast:
    if not getattr(found, "is_fast", False):
        raise ValueError("it has no fast form: save it with a tokenizer.json")
    return found  # type: ignore[no-any-return]


def _wrap(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _wrap_own(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return _wrap(tokenizer, **_SPECIAL, cls_token="<s>", sep_token="</s>")


def _add_template(tokenizer: Tokenizer, single: str, tokens: list[str]) -> None:
    ids = [(token, tokenizer.token_to_id(token)) for token in tokens]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _bert(folder: Path) -> PreTrainedTokenizerFast:
    from tokenizers.implementations import BertWordPieceTokenizer  # type: ignore[attr-defined]

    vocabulary = folder / "vocab.txt"
    words = {word: i for i, word in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    absent = [token for token in special.values() if token not in words]
    if absent:
        raise ValueError(f"{vocabulary} is not a BERT vocabulary: it lacks {', '.join(absent)}")
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    inner = BertWordPieceTokenizer(vocab=words, lowercase=not cased)
    return _wrap(inner._tokenizer, **special)


def _byte_level(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id("<s>") is None:
        return _wrap(tokenizer, **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"))
    _add_template(tokenizer, "</s> $A", ["</s>"])
    return _wrap(tokenizer, **{**_SPECIAL, "bos_token": "</s>"}, cls_token="<s>", sep_token="</s>")
