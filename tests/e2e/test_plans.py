"""`serve --plan` and `plan`: tables and JSON, without weights, certificates or ports."""

from __future__ import annotations

import json
from pathlib import Path

from commands import BASE_MODEL, finish, ok, start


def only_shapes(folder: Path) -> Path:
    (folder / "config.json").write_bytes((BASE_MODEL / "config.json").read_bytes())
    return folder


def test_serve_says_who_would_have_what(tmp_path: Path) -> None:
    folder = only_shapes(tmp_path)
    out, _ = ok(start("provider.cli", "serve", folder, "--plan", "--json", "--devices", "cpu,cpu,cuda:7"))
    told = json.loads(out)
    assert [each["device"] for each in told["workers"]] == ["cpu", "cpu", "cuda:7"]
    assert [each["measured"] for each in told["workers"]] == [True, True, False]
    assert sorted(group for each in told["workers"] for group in each["groups"]) == list(range(24))
    assert all(each["products_per_second"]["128"] > 0 for each in told["workers"] if each["groups"])
    assert len(told["decisions"]) == 24
    assert all(decision["reason"] for decision in told["decisions"])
    assert told["extrapolated"] == ["the speed of cuda:7 is a guess: it is not here"]


def test_stripes_as_people_read_them() -> None:
    out, _ = ok(start("provider.cli", "serve", BASE_MODEL, "--plan", "--workers", "2", "--stripes", "2"))
    assert "Products from products measured here" in out
    assert "0.0" in out
    assert "0.1" in out
    assert "the stripes of lane 0 have 6 groups of 256 to 256 + 256 + 256: there is no other place." in out


def test_a_forecast(tmp_path: Path) -> None:
    slow = ("--network", "1Mbit,50ms", "--tenants", "16", "--rows", "8")
    out, _ = ok(start("provider.cli", "plan", only_shapes(tmp_path), *slow, "--json"))
    told = json.loads(out)
    assert told["token_bytes"] == [35328, 64512]
    assert told["decode"]["limit"] == "network down"
    most = 125_000 / 64512
    assert 0.9 * most < told["decode"]["passes_per_second"] <= 1.01 * most
    assert "119 µs" in ok(start("provider.cli", "plan", BASE_MODEL, "--workers", "2"))[0]


def test_experts_are_placed_and_not_forecast(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 6, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = json.loads(ok(start("provider.cli", "plan", tmp_path, "--numerics", "float32", "--json"))[0])
    (worker,) = told["workers"]
    assert len(worker["groups"]) == 2 * (2 + 2 * 6)  # attention, and two projections of each expert
    assert worker["memory_bytes"] == 2 * 4 * (4 * 64 * 64 + 6 * 3 * 64 * 96)
    assert told["token_bytes"] == [2 * 4 * 2 * 64, 2 * 4 * (3 * 64 + 64)]  # of attention alone
    assert any("experts" in each for each in told["extrapolated"])


def test_what_cannot_be_divided() -> None:
    status, _, said = finish(
        start("provider.cli", "serve", BASE_MODEL, "--plan", "--workers", "3", "--stripes", "2")
    )
    assert (status, "cannot be divided into --stripes 2" in said) == (78, True)
