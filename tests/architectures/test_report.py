"""What the document counts, and which classes it puts together."""

from __future__ import annotations

from typing import Any

from examination import Result
from report import document, is_met, outcome, summary


def _result(class_name: str, **values: Any) -> Result:
    given: dict[str, Any] = {"stage": "done", "error": 0.0, "gradient": 0.0, "share": 1.0} | values
    return Result("base", class_name.lower(), class_name, **given)


SERVED, KEPT = _result("Served"), {"share": 0.1}


def _numbers(results: list[Result]) -> dict[str, str]:
    lines = summary(results).splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines)
    return dict(zip(head, rows[-1], strict=True))


def test_gradients_that_were_not_compared_are_counted_and_listed() -> None:
    none = {"gradient": None, "said": "without gradients locally: ValueError: no such layer"}
    results = [SERVED, _result("Without", **none), _result("Both", **none, **KEPT)]
    numbers = _numbers(results)
    assert (numbers["served"], numbers["with gradients"]) == ("2", "1")
    section = document(results).split("## Equal without gradients\n")[1].split("##")[0]
    for what, where in (("served", "without"), ("kept by the tenant", "both")):
        assert f"| {what} | 1 | without gradients locally: ValueError: no such layer | {where} |" in section


def test_classes_of_which_other_weights_are_kept_stand_apart() -> None:
    kept = [
        _result("A", tenants=["h.0.experts.w1", "h.0.experts.v1"], **KEPT),
        _result("B", tenants=["layers.3.query.weight", "layers.3.key.weight"], **KEPT),
        _result("C", tenants=["model.blocks.7.mlp.w1", "model.blocks.7.mlp.v1"], **KEPT),
    ]
    text = document(kept)
    assert "| kept by the tenant | 2 | tenants hold most: h.N.experts.w1, h.N.experts.v1 | a, c |" in text
    assert "| kept by the tenant | 1 | tenants hold most: layers.N.query.weight" in text


def test_nothing_to_serve_is_in_neither_count() -> None:
    bare = _result("Bare", stage="linear", said="it has no linear layers", share=None, error=None)
    numbers = _numbers([SERVED, bare])
    assert outcome(bare) == "nothing to serve"
    assert numbers == _numbers([SERVED]) | {"classes": "2", "nothing to serve": "1"}
    assert is_met([SERVED, bare])
    assert "| nothing to serve | 1 | it has no linear layers | bare |" in document([SERVED, bare])
