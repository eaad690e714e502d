"""A checkpoint with one task's head, used with other tasks' heads around the same base model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, Executor, relative_error
from parity import token_ids, virtual_layers
from transformers import PreTrainedModel

from shared.errors import ModelMismatch

# float32 in another order of additions.
TOLERANCE = 1e-5
ENCODER: dict[str, Any] = {key: each for key, each in LLAMA_LIKE.items() if key != "num_key_value_heads"}
DISTIL: dict[str, Any] = {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "vocab_size": 128}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", ENCODER),
    "BertForPreTraining": ("BertConfig", ENCODER),
    "BertForSequenceClassification": ("BertConfig", ENCODER),
    "RobertaForMaskedLM": ("RobertaConfig", ENCODER),
    "DistilBertForMaskedLM": ("DistilBertConfig", DISTIL),
    "ElectraForPreTraining": ("ElectraConfig", ENCODER | {"embedding_size": 64}),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA_LIKE),
}
HEADS = ["", *(f"For{n}" for n in ("SequenceClassification", "TokenClassification", "QuestionAnswering"))]
HEADS += ["ForMultipleChoice", "ForMaskedLM", "ForPreTraining"]


@pytest.fixture(scope="module")
def served(
    serve: Callable[..., Executor], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Executor, Path]]:
    """An executor of a tiny model of this class, made once, and its folder."""
    made: dict[str, tuple[Executor, Path]] = {}

    def start(name: str) -> tuple[Executor, Path]:
        if name not in made:
            config, options = SERVED[name]
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(name)
            model = getattr(transformers, name)(getattr(transformers, config)(**options))
            model.save_pretrained(folder)
            made[name] = serve(folder), folder
        return made[name]

    return start


def heads_of(folder: Path) -> list[Any]:
    """The auto classes that know a head for the model in a folder."""
    config = transformers.AutoConfig.from_pretrained(folder)
    autos = [getattr(transformers, f"AutoModel{head}") for head in HEADS]
    return [auto for auto in autos if type(config) in auto._model_mapping]


def hidden(model: PreTrainedModel) -> torch.Tensor:
    """What the base model makes of a text."""
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        found: torch.Tensor = base(input_ids=token_ids())[0]
    return found


@pytest.mark.parametrize("name", SERVED)
def test_every_head_around_the_served_base(
    name: str, served: Callable[[str], tuple[Executor, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    executor, folder = served(name)
    expected = hidden(getattr(transformers, name).from_pretrained(folder).eval())
    with executor.connect() as session:
        blocks = {m.name for g in session.manifest.groups for m in g.members if ".0." in m.name}
        for auto in heads_of(folder):
            for way in ("load", "attach"):
                caplog.clear()
                if way == "load":
                    model = session.load_model(model_class=auto, progress=False)
                elif (
                    auto._model_mapping[type(model.config)].base_model_prefix == session.manifest.base_prefix
                ):
                    own = auto.from_pretrained(folder, ignore_mismatched_sizes=True).eval()
                    model = session.attach(own)
                assert relative_error(hidden(model), expected) < TOLERANCE
                remote = set(virtual_layers(model))
                assert all(any(layer.endswith(block) for layer in remote) for block in blocks)
                for group in session.manifest.groups:
                    for member in group.members:
                        here = any(layer.endswith(member.name) for layer in remote)
                        assert here or group.head or member.name in caplog.text


@pytest.mark.parametrize("name", ["BertForSequenceClassification"])
def test_a_head_of_another_size(name: str, served: Callable[[str], tuple[Executor, Path]]) -> None:
    executor, folder = served(name)
    auto = transformers.AutoModelForSequenceClassification
    with executor.connect() as session:
        assert "classifier" in virtual_layers(session.load_model(progress=False))  # two classes, as there
        model = session.load_model(progress=False, num_labels=3)
        assert model.classifier.weight.shape == (3, 64)
        assert "classifier" not in virtual_layers(model)
        attached = auto.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
        assert "classifier" not in virtual_layers(session.attach(attached))
        with_own = auto.from_pretrained(folder)
        torch.nn.init.normal_(with_own.classifier.weight)
        with pytest.raises(ModelMismatch, match=r"keep it local: exclude=\['classifier'\]"):
            session.attach(with_own)
        session.attach(with_own, exclude=["classifier"])


def test_a_class_around_another_base(served: Callable[[str], tuple[Executor, Path]]) -> None:
    """It is the tenant's class that does not fit; the provider serves what it says."""
    executor, _ = served("BertForMaskedLM")
    with executor.connect() as session:
        with pytest.raises(ModelMismatch, match=r"which this model does not have") as caught:
            session.attach(transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)))
        assert "another model than its configuration says" not in str(caught.value)


def test_a_base_that_transformers_has_started_anew(served: Callable[[str], tuple[Executor, Path]]) -> None:
    """LlamaForQuestionAnswering has another name for its base, under which a checkpoint has nothing."""
    executor, folder = served("LlamaForCausalLM")
    with executor.connect() as session, pytest.raises(ModelMismatch, match=r"load_model\(model_class="):
        session.attach(transformers.AutoModelForQuestionAnswering.from_pretrained(folder))
