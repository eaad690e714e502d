"""Patterns in an adapter's folder, replaced by the names of modules that they match.

Anybody may have written the folder, and a pattern can take for ever. PEFT and vLLM match it without a limit,
and vLLM does so while all sequences wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import regex

from shared.errors import ConfigurationError

SECONDS = 2.0  # for all patterns of a folder
PATTERN_BYTES = 4 << 10
PATTERNS = 4096
# Fields of an adapter's configuration, and what they have: a pattern, a table of patterns, names.
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")
_TABLES = ("rank_pattern", "alpha_pattern")
_NAMES = ("modules_to_save", "layers_pattern", "target_parameters", "trainable_token_indices")
_NAME = re.compile(r"[\w.\-]+")
_ALL = "all-linear"  # PEFT's word


def without_patterns(
    config: Mapping[str, Any],
    modules: Iterable[str],
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """An adapter's configuration that does the same to these modules, and holds names for patterns.

    Args:
        config: as ``adapter_config.json`` has it.
        modules: names of all modules, or of those that the adapter has weights for.
        folder: that errors name.
        clock: in seconds.

    Raises:
        ConfigurationError: a pattern is too large, takes too long or is none.
    """
    names, made = _Names(list(modules), f"the adapter in {folder}", clock), dict(config)
    for field in _PATTERNS:
        if isinstance(given := config.get(field), str) and given != _ALL:
            made[field] = [name for name in names.all if names.matches(given, name)]
    for field in _TABLES:
        if (given := config.get(field)) is not None:
            if not isinstance(given, dict) or len(given) > PATTERNS:
                raise ConfigurationError(
                    f"{names.where} has a {field} that is no table of at most {PATTERNS} patterns"
                )
            made[field] = names.table(field, given)
    for field in _NAMES:
        given = config.get(field)
        for name in [given] if isinstance(given, str) else given if isinstance(given, (list, dict)) else []:
            token = field == "trainable_token_indices" and isinstance(name, int)
            if not token and not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ConfigurationError(
                    f"{names.where} has {name!r:.80} as {field}: give names, and no patterns"
                )
    return made


class _Names:
    """See ``without_patterns``."""

    def __init__(self, names: list[str], where: str, clock: Callable[[], float]) -> None:
        self.all, self.where, self._clock, self._end = names, where, clock, clock() + SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern matches a whole name.

        Raises:
            ConfigurationError: it is too large, takes too long or is none.
        """
        what = f"the pattern {pattern[:80]!r} of {self.where}"
        if len(pattern) > PATTERN_BYTES:
            raise ConfigurationError(f"{what} has more than {PATTERN_BYTES} characters")
        try:
            # A time of zero is none at all.
            return regex.fullmatch(pattern, name, timeout=max(self._end - self._clock(), 1e-6)) is not None
        except TimeoutError as error:
            raise ConfigurationError(f"{what} takes too long; give names of modules instead") from error
        except (regex.error, RecursionError) as error:
            raise ConfigurationError(f"{what} is no regular expression: {error}") from error

    def table(self, field: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """A table with names for keys.

        A key stands for the modules whose names end with it, from a dot on; the first key counts, as in
        PEFT's ``get_pattern_key``.
        """
        order = {key: at for at, key in enumerate(given)}
        patterns = [key for key in given if not _NAME.fullmatch(key)]
        found: dict[str, Any] = {}
        for name in self.all:
            keys = [key for key in _ends(name) if key in order]
            first = min(map(order.__getitem__, keys), default=len(order))
            for key in patterns:
                if order[key] < first and self.matches(rf"(.*\.)?({key})", name):
                    keys.append(key)
                    break
            if keys:
                value = given[min(keys, key=order.__getitem__)]
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ConfigurationError(f"{self.where} has {value!r:.80} in {field}: give numbers")
                found[name] = value
        return found


def _ends(name: str) -> Iterator[str]:
    """A name, and all that is behind one of its dots."""
    parts = name.split(".")
    for at in range(len(parts)):
        yield ".".join(parts[at:])
