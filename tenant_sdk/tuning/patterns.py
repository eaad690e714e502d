"""Patterns in an adapter's folder, replaced by the names of modules that they match.

Anybody may have written the folder, and a pattern can take for ever. PEFT and vLLM match it without a limit,
and vLLM does so while all sequences wait.
"""

from __future__ import annotations

import functools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import regex

from shared.errors import ConfigurationError

SECONDS = 2.0  # for all patterns of a folder
PATTERN_CHARACTERS = 4 << 10
MAX_ENTRIES = 4096  # names or patterns of a field
VALUES = 256  # of a table: each becomes a pattern, and Python keeps 512 of them compiled
# Characters of a pattern, times all its counts: a library makes as many states of `(?:ab){3}` as of `ababab`.
_STATES = 1 << 20
_LISTS = 16  # of layers in a model; PEFT makes an expression of each name for each module
_FEW = 64  # names, with which PEFT's time is no matter
# Fields of an adapter's configuration, and what they have: a pattern or names, a table of patterns, names.
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")
_TABLES = ("rank_pattern", "alpha_pattern")
_NAMES = ("modules_to_save", "layers_pattern", "target_parameters", "trainable_token_indices")
_NAME = re.compile(r"[\w.\-]+")
_COUNT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")  # ``regex`` then passes over spaces and comments within a count
_ALL = "all-linear"  # PEFT's word


def without_patterns(
    config: Mapping[str, Any],
    modules: Iterable[str],
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """An adapter's configuration that does the same to these modules, and holds names for patterns.

    Of many names those are kept that a module has in its own: PEFT compares each with every module.

    Args:
        config: of ``adapter_config.json``, each field of its type.
        modules: names of all modules and parameters of the model.
        folder: that errors name.
        clock: in seconds.

    Raises:
        ConfigurationError: a pattern is too large, takes too long or is none.
    """
    names, fields = _ModuleNames(list(modules), f"the adapter in {folder}", clock), dict(config)
    for field in _PATTERNS:
        names_of_field = config.get(field)
        if isinstance(names_of_field, str) and names_of_field != _ALL:
            fields[field] = [name for name in names.all if names.matches(names_of_field, name)]
        elif isinstance(names_of_field, list):
            fields[field] = names.known(names_of_field)
    for field in _TABLES:
        names_of_field = config.get(field) or {}
        if any(isinstance(value, list) for value in names_of_field.values()):  # AdaLoRA's, of names alone
            fields[field] = {
                name: names_of_field[name]
                for name in names_of_field
                if name.rpartition(".")[0] in names.known_names
            }
        elif names_of_field:
            fields[field] = names.table(field, names_of_field)
    for field in _NAMES:
        names_of_field = config.get(field) or []
        for name in [names_of_field] if isinstance(names_of_field, str) else names_of_field:
            token = field == "trainable_token_indices" and isinstance(name, int)
            if not token and not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"{names.where} has {name!r:.80} as {field}: give names, and no patterns"
                )
        if names_of_field and isinstance(names_of_field, list) and field != "trainable_token_indices":
            fields[field] = names.known(names_of_field)
            if field == "layers_pattern" and (count := len(fields[field])) > _LISTS:
                raise ConfigurationError(
                    f"{names.where} has {count} names as {field}; no model has as many lists of layers"
                )
    return fields


class _ModuleNames:
    """See ``without_patterns``."""

    def __init__(self, names: list[str], where: str, clock: Callable[[], float]) -> None:
        self.all, self.where, self._clock, self._end = names, where, clock, clock() + SECONDS
        self.known_names = frozenset(names)
        self._suffixes = {end for name in names for end in _suffixes(name)}
        self._parts = {part for name in names for part in name.split(".")}

    def known(self, names: list[str]) -> list[str]:
        """Those of many names that modules have in theirs; a part may end with one, as of modules to save."""
        if len(names) <= _FEW:
            return names
        matching = (n for n in names if n in self._suffixes or any(part.endswith(n) for part in self._parts))
        return list(dict.fromkeys(matching)) or names[:1]

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern matches a whole name.

        Raises:
            ConfigurationError: it is too large, takes too long or is none.
        """
        what = f"the pattern {pattern[:80]!r} of {self.where}"
        if len(pattern) > PATTERN_CHARACTERS:
            raise ConfigurationError(f"{what} has more than {PATTERN_CHARACTERS} characters")
        if _states(pattern) > _STATES:
            raise ConfigurationError(f"{what} repeats too much; give names of modules instead")
        if _VERBOSE.search(pattern):
            raise ConfigurationError(f"{what} has the flag x (verbose); write the pattern without it")
        try:
            _python_takes(pattern)
            # A time of zero is none at all.
            return regex.fullmatch(pattern, name, timeout=max(self._end - self._clock(), 1e-6)) is not None
        except TimeoutError as error:
            raise ConfigurationError(f"{what} takes too long; give names of modules instead") from error
        except (regex.error, re.error, OverflowError, RecursionError, MemoryError) as error:
            raise ConfigurationError(f"{what} is no regular expression: {error}") from error

    def table(self, field: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """A table of a few names, or with one pattern of names for each value.

        A key stands for the modules whose names end with it, from a dot on; the first key counts, as in
        PEFT's ``get_pattern_key``.
        """
        if len(entries) <= _FEW and all(map(_NAME.fullmatch, entries)):
            return dict(entries)
        order = {key: at for at, key in enumerate(entries)}
        patterns = [key for key in entries if not _NAME.fullmatch(key)]
        compiled: dict[str, Any] = {}
        for name in self.all:
            keys = [key for key in _suffixes(name) if key in order]
            first = min(map(order.__getitem__, keys), default=len(order))
            for key in patterns:
                if order[key] < first and self.matches(rf"(.*\.)?({key})", name):
                    keys.append(key)
                    break
            if keys:
                compiled[name] = entries[min(keys, key=order.__getitem__)]
        same: dict[float, list[str]] = {}
        for name, value in compiled.items():
            same.setdefault(value, []).append(re.escape(name))
        if len(same) > VALUES:
            raise ConfigurationError(f"{self.where} has {len(same)} values in {field}; {VALUES} are the most")
        return {f"^(?:{'|'.join(names)})": value for value, names in same.items()}


def _states(pattern: str) -> int:
    """At most so many has a pattern when it is compiled, which has no limit of time or memory."""
    counts = (max(1, *(int(each or 0) for each in match.groups())) for match in _COUNT.finditer(pattern))
    return len(pattern) * math.prod(counts)


@functools.lru_cache
def _python_takes(pattern: str) -> None:
    """Refuse what Python's own expressions, which PEFT uses, lack, such as patterns within themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        re.compile(pattern)


def _suffixes(name: str) -> Iterator[str]:
    """A name, and all that is behind one of its dots."""
    parts = name.split(".")
    for at in range(len(parts)):
        yield ".".join(parts[at:])
