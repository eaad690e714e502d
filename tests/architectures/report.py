"""What a sweep found, as a document for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from examination import SHARE, TOLERANCE, VERSIONS, Result

AIM = 0.95  # of the architectures whose tiny model runs locally
KINDS = {"causal": "causal language models", "base": "encoders and other base models"}
_PATH = re.compile(r"/\S*symbiosis-\w+")
# What differs between two architectures that have the same trouble.
_PARTICULAR = re.compile(r"`[^`]*`|'[^']*'|\S*[\d._/]\S*|\b[A-Z]\w+[A-Z]\w+\b")
_KEPT = "tenants hold most: "
_TABLE_HEAD = """\
| model type | class | outcome | at the provider | error | of gradients | requests |
|---|---|---|---|---|---|---|
"""

_INTRODUCTION = """It takes every causal language model and every base model
that transformers has, makes a tiny one of its default configuration with random weights, saves it, serves
it, and loads it as a tenant from the executor alone. One forward pass is compared with the same model run
locally, and the gradients of a LoRA on every linear layer, where PEFT and the model allow that."""
_LEGEND = f"""\
- *Nothing to serve*: it runs, and has no linear layers, only convolutions for instance. These classes are in
  none of the counts to the right of this one.
- *Equal*: the relative L2 distance is at most {TOLERANCE:g}, for every output and every gradient. Both
  sides compute in float32 and multiply the same numbers; they may add them in another order, and 1e-5 is a
  hundred roundings of 2^-24. A tensor that is next to nothing beside the others is measured against a
  thousandth of the largest.
- *Equal to rounding*: it is more, and no more than twice what the local model's float32 is off its float64,
  in its own order of sums or in another.
- *Served*: either, and at least {SHARE:.0%} of the frozen linear parameters are at the provider. These are
  the weights of linear layers, and all others that the pass multiplies matrices by, such as those of experts;
  without embeddings and the output head, which tenants hold on purpose.
- *With gradients*: served, and compared in gradients, not in outputs alone.
- *Kept by the tenant*: either, and less is at the provider.
- *Refused*: with a sentence that says why.

A tiny model says nothing about speed, nor about checkpoints that were stored in another way than transformers
stores them today."""


def is_met(results: Sequence[Result]) -> bool:
    """Whether as many architectures as promised are equal, with most of their parameters at the provider."""
    ran = [each for each in results if each.ran]
    return bool(ran) and sum(each.good for each in ran) >= AIM * len(ran)


def outcome(result: Result) -> str:
    """One of a few words."""
    if result.stage == "linear":
        return "nothing to serve"
    if not result.ran:
        return "not built" if result.stage == "build" else "does not run"
    if result.stage != "done":
        return "refused" if result.refused else "fails"
    if not result.equal:
        return "differs"
    return "served" if result.good else "kept by the tenant"


def summary(results: Sequence[Result]) -> str:
    """A table: for each kind how many classes there are and what came of them."""
    rows = [
        "| | classes | nothing to serve | built tiny | run locally | equal | equal to rounding | served | "
        "with gradients | served, of those that run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, name in (*KINDS.items(), ("", "all")):
        of = [each for each in results if kind in ("", each.kind)]
        bare, ran = sum(each.stage == "linear" for each in of), sum(each.ran for each in of)
        built = sum(each.stage != "build" for each in of) - bare
        within, good = sum(each.within for each in of), sum(each.good for each in of)
        rounded = sum(each.equal for each in of) - within
        compared = sum(each.good and each.gradient is not None for each in of)
        counts = (len(of), bare, built, ran, within, rounded, good, compared)
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {good / max(ran, 1):.1%} |")
    return "\n".join(rows)


def document(results: Sequence[Result]) -> str:
    """The whole document, in Markdown."""
    parts = [
        "# Architectures",
        f"`make architectures` writes this document. {_INTRODUCTION} Versions: {VERSIONS}.",
        summary(results),
        _LEGEND,
        "## What is not served",
        _causes((each for each in results if each.ran and not each.good), _reason),
        "## Equal to rounding",
        _rounded(each for each in results if each.equal and not each.within),
        "## Equal without gradients",
        "Their outputs alone were compared: run locally, the model has no gradients of an adapter either.",
        _causes((each for each in results if each.equal and each.gradient is None), lambda each: each.said),
        "## What has nothing to serve",
        _causes((each for each in results if each.stage == "linear"), _reason),
        "## What was not compared",
        "Nothing is known of these: transformers makes no tiny model of their defaults, or the test knows no "
        "input that the tiny model takes.",
        _causes((each for each in results if each.stage in ("build", "local")), _reason),
    ]
    for kind, name in KINDS.items():
        rows = [_row(each) for each in results if each.kind == kind and each.ran]
        parts += [f"## {name.capitalize()}", _TABLE_HEAD.strip() + "\n" + "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _rounded(results: Iterable[Result]) -> str:
    rows = [f"| {each.class_name} | {each.worst:.0e} | {each.rounding:.0e} |" for each in results]
    head = "| class | error | float32 of the local model |\n|---|---|---|\n"
    return head + "\n".join(rows) if rows else "None."


def _row(result: Result) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else "0" if value == 0 else f"{value:.0e}"

    share = "" if result.share is None else f"{result.share:.0%}"
    cells = (result.model_type, result.class_name, outcome(result), share)
    more = (number(result.error), number(result.gradient), str(result.requests or ""))
    return f"| {' | '.join(cells + more)} |"


def _causes(results: Iterable[Result], reason: Callable[[Result], str]) -> str:
    """The results by what they have in common, the most frequent first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        groups.setdefault((outcome(each), _in_common(reason(each))), []).append(each)
    if not groups:
        return "None."
    rows = ["| outcome | classes | such as | model types |", "|---|---|---|---|"]
    for of in sorted(groups.values(), key=lambda of: (-len(of), of[0].key)):
        types = ", ".join(dict.fromkeys(each.model_type for each in of))
        rows.append(f"| {outcome(of[0])} | {len(of)} | {_cell(reason(of[0]))} | {types} |")
    return "\n".join(rows)


def _in_common(reason: str) -> str:
    """The same for two architectures that have the same trouble."""
    if reason.startswith(_KEPT):  # weights of one name in the module that has them are of one kind
        names = reason.removeprefix(_KEPT).split(", ")
        return str(sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names}))
    return _PARTICULAR.sub("…", reason)[:90]


def _reason(result: Result) -> str:
    """A sentence."""
    if result.stage != "done":
        where = f" ({result.stage})" if result.ran else ""
        return f"{_PATH.sub('FOLDER', result.said)[:240]}{where}"
    if (result.error or 0.0) > TOLERANCE:
        return "outputs differ by more than the tolerance"
    if not result.equal:
        return "gradients differ by more than the tolerance"
    return _KEPT + ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "N", name) for name in result.tenants))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
