"""In the gateway's environment: a trial ends at its time, for its client alone; what leaves is not tried.

python grammar_trials.py MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import llguidance
from tokenizers import Tokenizer
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tenant_sdk.gateway import structured
from tenant_sdk.gateway.client_fairness import TimeBudget
from tenant_sdk.gateway.constraint_checks import ConstraintChecker
from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.grammars import ENGINE_STACK, _in_child, compiled
from tenant_sdk.gateway.scheduler import TEXT_BYTES, TEXTS_BYTES, Base, Scheduler
from tenant_sdk.gateway.status import SequenceErrors
from tenant_sdk.gateway.structured import LimitedGrammar, LimitedGuidance, compile_by_client

file = Path(sys.argv[1]) / "tokenizer.json"
tokens = Tokenizer.from_file(str(file)).get_vocab_size()
# Too large for the front; here it stands for what nobody thought of.
ENDLESS = Constraint("json", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000000}')
PERSON = Constraint(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "city": {"type": "string"},
            },
            "required": ["name", "age", "city"],
        }
    ),
)
CHOICE, PATTERN = Constraint("choice", '["yes", "no"]'), Constraint("regex", "a")


def chain(length: int) -> Constraint:
    """Rules that follow one another: compiling them takes a stack as deep."""
    rules = "".join(f'A{at}: ("a" A{at + 1})+\n' for at in range(length))
    return Constraint("grammar", f'start: A0\n{rules}A{length}: "x"')


def compiled_in_a_thread(given: Constraint) -> None:
    """As in the engine; a stack that ends would end this process."""
    rules = llguidance.LLTokenizer(file.read_text(), n_vocab=tokens, eos_token=0)
    threading.stack_size(ENGINE_STACK)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compiled, rules, given).result()


PET = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BARKS = {"type": "object", "properties": {"bark": {"type": "boolean"}}}
BOTH = {"name": "a", "bark": True}
NAMED = {"$ref": "#/$defs/pet"}
MADE_OF_PARTS: list[dict[str, Any]] = [
    {"allOf": [NAMED, BARKS]},
    {"allOf": [NAMED, BARKS | {"required": ["bark"]}]},
    {"allOf": [NAMED, {"$ref": "#/$defs/dog"}]},
    PET | {"anyOf": [BARKS, {"properties": {"c": {}}, "required": ["c"]}]},
    NAMED | {"required": ["bark"]},
]


def takes_both(schema: dict[str, Any]) -> bool:
    """Whether an object can have the members that different parts of a schema describe."""
    rules = llguidance.LLTokenizer(file.read_text(), n_vocab=tokens, eos_token=0)
    whole = json.dumps(schema | {"$defs": {"pet": PET, "dog": BARKS}})
    matcher, text = compiled(rules, Constraint("json", whole)), rules.tokenize_str(json.dumps(BOTH))
    return bool(matcher.consume_tokens(text)) and bool(matcher.is_accepting())


def compilations(sequences: int) -> list[int]:
    """How often a constraint is compiled for sequences of a client, and then for another client's.

    Each sequence has its own state.
    """
    made: list[Constraint] = []

    def counted(tokenizer: llguidance.LLTokenizer, given: Constraint) -> llguidance.LLMatcher:
        made.append(given)
        return compiled(tokenizer, given)

    structured.compiled = counted
    backend = object.__new__(LimitedGuidance)
    backend.tokenizer = backend.vocab_size = None
    rules = llguidance.LLTokenizer(file.read_text(), n_vocab=tokens, eos_token=0)
    backend._build_ll_tokenizer = lambda *_: rules
    backend.is_tokenizer_supported = lambda _: True
    backend.vllm_config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=False, disable_additional_properties=False
        )
    )
    backend.__post_init__()
    grammars = [
        backend.compile_grammar(StructuredOutputOptions.CHOICE, CHOICE.text) for _ in range(sequences)
    ]
    first = grammars[0].ll_matcher
    assert first.try_consume_tokens(rules.tokenize_str("yes")) > 0
    assert all(not each.ll_matcher.is_accepting() for each in grammars[1:])
    mine = len(made)
    backend.compile_grammar(StructuredOutputOptions.CHOICE, CHOICE.text)
    same = len(made)
    manager = SimpleNamespace(
        _create_grammar=lambda _: backend.compile_grammar(StructuredOutputOptions.CHOICE, CHOICE.text),
        grammar_init=None,
    )
    compile_by_client(manager, lambda name: name)
    manager._create_grammar(SimpleNamespace(request_id="another", is_finished=lambda: False))
    return [mine, same, len(made)]


def order_of_compilations() -> list[str]:
    """In which the engine compiles constraints of two clients; one request ends before its turn."""
    told, held = list[str](), threading.Event()

    def create(request: Any) -> None:
        told.append(request.request_id)
        held.wait()

    manager = SimpleNamespace(_create_grammar=create)
    manager.grammar_init = lambda request: pending.append(
        manager.executor.submit(manager._create_grammar, request)
    )
    pending = list[Any]()
    compile_by_client(manager, lambda name: name[0])
    for name in ("a1", "a2", "a3", "a4", "b1"):
        manager.grammar_init(SimpleNamespace(request_id=name, is_finished=lambda name=name: name == "a3"))
    held.set()
    for each in pending:
        each.result()
    return told


def lengths() -> list[int]:
    """Bytes of a text as its matcher counts them: of two words, and without the last again."""
    rules = llguidance.LLTokenizer(file.read_text(), n_vocab=tokens, eos_token=0)
    matcher = compiled(rules, Constraint("regex", ".*"))
    grammar = LimitedGrammar(ll_matcher=matcher, ll_tokenizer=rules, vocab_size=tokens)
    first, second = rules.tokenize_str("é"), rules.tokenize_str(" dog")
    found = []
    for each in (first, second):
        assert grammar.accept_tokens("", each)
        found.append(grammar.text)
    grammar.rollback(len(second))
    return [*found, grammar.text]


def ended(sizes: dict[str, int]) -> list[str]:
    """Sequences of a client with texts of these sizes that a step ends; nothing of them is in the step."""
    told, reasons = list[str](), SequenceErrors()

    def finish(names: Any, _: Any) -> list[Any]:
        told.extend(names)
        return []

    scheduler: Any = object.__new__(Scheduler)
    grammars = {name: object.__new__(LimitedGrammar) for name in sizes}
    for name, size in sizes.items():
        grammars[name].text = size
    scheduler.requests = {
        name: SimpleNamespace(structured_output_request=SimpleNamespace(grammar=each))
        for name, each in grammars.items()
    } | {"plain": SimpleNamespace(structured_output_request=None)}
    scheduler._grammars = {}
    scheduler.kv_cache_manager = SimpleNamespace(evict_blocks=lambda _: None)
    scheduler._time_budget, scheduler._written, scheduler.finish_requests = TimeBudget(1, 1), {}, finish
    scheduler._ended, scheduler._folder, scheduler.num_spec_tokens = reasons, Path(mkdtemp()), 0
    Base.update_from_output = lambda *_: {}
    step = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
    scheduler.update_from_output(step, None)
    assert list(reasons.reasons) == told
    return sorted(told)


async def main() -> dict[str, Any]:
    """What is said of constraints that compete."""
    checker = ConstraintChecker(file, tokens, 0)
    await checker.start()
    hostile = [asyncio.ensure_future(checker.refusal("hostile", ENDLESS)) for _ in range(20)]
    await asyncio.sleep(0)
    said: dict[str, Any] = {"choice": await checker.refusal("plain", CHOICE)}
    assert sum(each.done() for each in hostile) <= 2, "others wait for all that one client sent"
    for each in hostile[3:]:
        each.cancel()
    said["endless"] = await hostile[0]
    await asyncio.gather(*hostile, return_exceptions=True)
    assert checker._process is not None
    checker._process.kill()  # as the system does when memory is short
    await checker._process.wait()
    assert not await checker.refusal("plain", CHOICE), "what has passed is not tried again"
    said["died"] = await checker.refusal("plain", PATTERN)
    said["again"] = await checker.refusal("plain", PATTERN)
    passed = 0  # the longest chain that a trial lets through; halving
    for step in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        if not await checker.refusal("plain", chain(passed + step)):
            passed += step
    said["chain"] = await checker.refusal("plain", chain(passed + 1))
    compiled_in_a_thread(chain(passed))
    await checker.close()
    said["compilations"] = compilations(30)
    said["order"] = order_of_compilations()
    # As large as vocabularies are: a trial is of the constraint, not of the vocabulary.
    large = llguidance.LLTokenizer(file.read_text(), n_vocab=262_144, eos_token=0)
    said["large"] = _in_child(large, PERSON)
    said["lengths"] = lengths()
    said["ended"] = [
        ended({"a": TEXT_BYTES, "b": 1}),
        ended({"a": TEXT_BYTES + 1, "b": 1}),
        ended({str(at): TEXTS_BYTES // 8 + at for at in range(8)}),
    ]
    said["parts"] = [takes_both(each) for each in MADE_OF_PARTS]
    return said


print(json.dumps(asyncio.run(main())))
