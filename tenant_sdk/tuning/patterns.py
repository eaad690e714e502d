"""Patterns in an adapter's folder, replaced by the names of modules that they match.

Anybody may have written the folder, and a pattern can take any time and memory. PEFT and vLLM match it
without a limit, and vLLM does so while all sequences wait. So a process with limits matches it here
(``tenant_sdk.tuning.pattern_matching``), with Python's own expressions, as PEFT does.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError
from tenant_sdk.tuning import pattern_matching

SECONDS = 2.0  # of a processor, for all patterns of a field
_WAIT = 120.0  # seconds, on a machine with much other work
PATTERN_CHARACTERS = 4 << 10
MAX_ENTRIES = 4096  # names or patterns of a field
VALUES = 256  # of a table: each becomes a pattern, and Python keeps 512 of them compiled
_LISTS = 16  # of layers in a model; PEFT makes an expression of each name for each module
_FEW = 64  # names, with which PEFT's time is no matter
# Fields of an adapter's configuration, and what they have: a pattern or names, a table of patterns, names.
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")
_TABLES = ("rank_pattern", "alpha_pattern")
_NAMES = ("modules_to_save", "layers_pattern", "target_parameters", "trainable_token_indices")
_NAME = re.compile(r"[\w.\-]+")
_ALL = "all-linear"  # PEFT's word


def without_patterns(config: Mapping[str, Any], modules: Iterable[str], folder: Path) -> dict[str, Any]:
    """An adapter's configuration that does the same to these modules, and holds names for patterns.

    Of many names those are kept that a module has in its own: PEFT compares each with every module.

    Args:
        config: of ``adapter_config.json``, each field of its type.
        modules: names of all modules and parameters of the model.
        folder: that errors name.

    Raises:
        ConfigurationError: a pattern is too large, takes too long or is none.
    """
    names, fields = _ModuleNames(list(modules), f"the adapter in {folder}"), dict(config)
    for field in _PATTERNS:
        names_of_field = config.get(field)
        if isinstance(names_of_field, str) and names_of_field != _ALL:
            first = names.first_matches(field, [names_of_field])
            fields[field] = [name for name, at in zip(names.all, first, strict=True) if at is not None]
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

    def __init__(self, names: list[str], where: str) -> None:
        self.all, self.where = names, where
        self.known_names = frozenset(names)
        self._suffixes = {end for name in names for end in _suffixes(name)}
        self._parts = {part for name in names for part in name.split(".")}

    def known(self, names: list[str]) -> list[str]:
        """Those of many names that modules have in theirs; a part may end with one, as of modules to save."""
        if len(names) <= _FEW:
            return names
        matching = (n for n in names if n in self._suffixes or any(part.endswith(n) for part in self._parts))
        return list(dict.fromkeys(matching)) or names[:1]

    def first_matches(self, field: str, patterns: Sequence[str], form: str = "{}") -> Sequence[int | None]:
        """For each name, the index of the first pattern that matches the whole of it, or None.

        Args:
            field: where they are.
            form: of the expression that is matched, around a pattern.

        Raises:
            ConfigurationError: one is too large or is none, or they take too long.
        """
        if not patterns:
            return [None] * len(self.all)
        for pattern in patterns:
            if len(pattern) > PATTERN_CHARACTERS:
                what = f"the pattern {pattern[:80]!r} of {self.where}"
                raise ConfigurationError(f"{what} has more than {PATTERN_CHARACTERS} characters")
        request = {"seconds": SECONDS, "names": self.all, "patterns": [form.format(p) for p in patterns]}
        try:
            done = subprocess.run(  # noqa: S603 - this program
                [sys.executable, "-I", "-S", pattern_matching.__file__],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=_WAIT,
            )
        except subprocess.TimeoutExpired:
            done = None
        if done is None or done.returncode == -signal.SIGPROF:
            raise ConfigurationError(
                f"{field} of {self.where}, with the pattern {patterns[0][:80]!r}, takes too long: more than "
                f"{SECONDS:g} s of a processor; give names of modules instead"
            )
        if done.returncode != 0:
            raise ConfigurationError(
                f"{field} of {self.where}, with the pattern {patterns[0][:80]!r}, takes more than "
                f"{pattern_matching.MEMORY >> 20} MiB of memory, or ends the process that matches it; give "
                "names of modules instead"
            )
        found = json.loads(done.stdout)
        if isinstance(found, dict):
            pattern = patterns[found["pattern"]]
            why = f"is no regular expression: {found['why']}"
            raise ConfigurationError(f"the pattern {pattern[:80]!r} of {self.where} {why}")
        return found  # type: ignore[no-any-return]

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
        first_matches = self.first_matches(field, patterns, r"(.*\.)?({})")
        for name, at in zip(self.all, first_matches, strict=True):
            keys = [key for key in _suffixes(name) if key in order]
            if at is not None:
                keys.append(patterns[at])
            if keys:
                compiled[name] = entries[min(keys, key=order.__getitem__)]
        same: dict[float, list[str]] = {}
        for name, value in compiled.items():
            same.setdefault(value, []).append(re.escape(name))
        if len(same) > VALUES:
            raise ConfigurationError(f"{self.where} has {len(same)} values in {field}; {VALUES} are the most")
        return {f"^(?:{'|'.join(names)})": value for value, names in same.items()}


def _suffixes(name: str) -> Iterator[str]:
    """A name, and all that is behind one of its dots."""
    parts = name.split(".")
    for at in range(len(parts)):
        yield ".".join(parts[at:])
