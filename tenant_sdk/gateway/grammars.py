"""Constraints as llguidance compiles them, with limits; and a process that tries each before the engine.

    python -m tenant_sdk.gateway.grammars TOKENIZER_FILE TOKENS END_OF_TEXT

answers messages over standard input and output (``helper_process.answer``): each is a constraint, and the
answer says why it is refused, or is an empty text. Each is tried in a child of its own, which ends when it
has used more than its time or memory; only then does the engine compile it, which cannot be stopped there.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path

import llguidance
import msgspec

from tenant_sdk.gateway.constraints import Constraint, close_objects
from tenant_sdk.gateway.helper_process import answer

SECONDS = 0.4  # of a processor, for one trial
MEMORY = 256 << 20  # beyond what the process has
STEPS = 16  # tokens that a trial goes on for
# A chain of rules takes a stack as deep, and a process whose stack ends dies. The trial has far less of it
# than a thread of the engine, so that what passes has room there.
TRIAL_STACK, ENGINE_STACK = 2 << 20, 64 << 20
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,  # they would hold a client's text
)


# One space after each comma and colon, as JSON is mostly written, and no other white space between values:
# small models that may write any would often write nothing else.
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def compiled(tokenizer: llguidance.LLTokenizer, constraint: Constraint) -> llguidance.LLMatcher:
    """What follows one text that matches.

    Raises:
        ValueError: it cannot be compiled, or not within ``LIMITS``.
    """
    for text in _grammars(constraint):
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            return matcher
    raise ValueError(_sentence(matcher))


def _grammars(constraint: Constraint) -> list[str]:
    """As llguidance reads it; of a schema the closed form comes before the one that was given."""
    if constraint.kind != "json":
        return [llguidance.grammar_from(constraint.kind, constraint.text)]
    schema = json.loads(constraint.text)
    forms = dict.fromkeys(json.dumps(each) for each in (close_objects(schema), schema))
    return [llguidance.LLMatcher.grammar_from_json_schema(form, defaults=_FORM) for form in forms]


def trial(tokenizer: llguidance.LLTokenizer, constraint: Constraint) -> str:
    """Compile it and go on for some random tokens; why that failed, or an empty text."""
    try:
        matcher = compiled(tokenizer, constraint)
    except ValueError as error:
        return " ".join(str(error).split())[:400]
    drawn = random.SystemRandom()  # else its author would know which tokens are tried
    for _ in range(STEPS):
        allowed = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            why = _sentence(matcher)
            return "no text matches it" if why.startswith("NoExtension") else why
        allowed[tokenizer.eos_token // 8] &= ~(1 << tokenizer.eos_token % 8)
        nonempty = [at for at, bits in enumerate(allowed) if bits]
        if not nonempty:
            break
        at = drawn.choice(nonempty)
        bit = drawn.choice([bit for bit in range(8) if allowed[at] >> bit & 1])
        if not matcher.consume_token(8 * at + bit):
            break
    return ""


def _sentence(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:400]


def main() -> None:
    """Serve until the input ends."""
    file, tokens, end = sys.argv[1:]
    tokenizer = llguidance.LLTokenizer(Path(file).read_text(), n_vocab=int(tokens), eos_token=int(end))
    trial(tokenizer, Constraint("choice", '["yes", "no"]'))  # what the first compiles is then there for all
    answer(lambda encoded: _in_child(tokenizer, msgspec.json.decode(encoded, type=Constraint)).encode())


def _in_child(tokenizer: llguidance.LLTokenizer, constraint: Constraint) -> str:
    """``trial`` in a child, whose time and memory end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (memory + MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_STACK, (TRIAL_STACK,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process
            os.write(writing, b"=" + trial(tokenizer, constraint).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer_bytes = pipe.read()
    os.waitpid(child, 0)
    if answer_bytes.startswith(b"="):
        return answer_bytes[1:].decode()
    return f"compiling it takes more than {SECONDS:g} s or {MEMORY >> 20} MiB; make it smaller"


if __name__ == "__main__":
    main()
