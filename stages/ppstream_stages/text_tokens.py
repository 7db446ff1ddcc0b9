"""Texts to the numbers of a language model's tokens, by the file of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ppstream import ConfigError

FILE: Final = "tokenizer.json"
OPTION: Final = "policy.options.tokenizer"
INSTALL: Final = "pip install 'ppstream[language]'"


def tokenizer_at(place: str) -> Callable[[str], list[int]]:
    """From a text to its tokens, with those that the tokenizer itself puts around it.

    Args:
        place: a local folder with ``tokenizer.json``, or that file.

    Raises:
        ConfigError: the file or the library that reads it is not there, or does not fit.
    """
    path = Path(place)
    path = path / FILE if path.is_dir() else path
    try:
        library: Any = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError([f"{OPTION}: needs tokenizers: {INSTALL}"]) from error
    try:
        read = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError([f"{OPTION}: {path} cannot be read: {error}"]) from error
    read.no_truncation()
    read.no_padding()
    return lambda text: list(read.encode(text).ids)
