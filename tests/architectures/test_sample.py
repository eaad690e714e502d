"""Architectures of many kinds end to end; ``make architectures`` takes all that transformers has.

The sample has one of each mechanism that the others share: fused, parallel and shared layers, names and
pieces that a checkpoint has of its own, experts, states, towers, images and sound, weights that a model reads
itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sweep
from examination import examine
from report import KINDS, summary
from tiny import architectures

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
SAMPLE = {
    "LlamaForCausalLM": "grouped queries",
    "GPT2LMHeadModel": "transposed layers, one for query, key and value",
    "GPTNeoXForCausalLM": "a head that is stored under another name; parallel blocks",
    "Phi3ForCausalLM": "fused projections",
    "CohereForCausalLM": "attention and feed-forward on the same tensor",
    "Gemma3ForCausalLM": "tied head, scaled embeddings, windows",
    "BloomForCausalLM": "no positions but biases of attention",
    "MixtralForCausalLM": "experts that are stored one by one",
    "GptOssForCausalLM": "experts that are stored transposed, with biases",
    "Llama4ForCausalLM": "experts that are multiplied all at once, by bmm",
    "DeepseekV3ForCausalLM": "latent attention, shared experts",
    "Qwen3NextForCausalLM": "linear attention beside attention",
    "MambaForCausalLM": "states; a weight that the model reads itself",
    "JambaForCausalLM": "states, attention and experts",
    "BertModel": "an encoder with a pooler",
    "AlbertModel": "one block for all layers",
    "DebertaV2Model": "positions in attention",
    "T5Model": "encoder and decoder",
    "Qwen2VLModel": "a tower that no text reaches",
    "ViTModel": "images",
    "SwinModel": "images, in windows and stages",
    "SiglipModel": "attention that reads a layer's weight itself",
    "WhisperModel": "a spectrogram",
    "CLIPModel": "images and text",
    "Wav2Vec2Model": "sound",
}
# Of one pass. Layers on the same tensor are one request: for T5 also keys and values of cross attention.
REQUESTS = {"Phi3ForCausalLM": 8, "CohereForCausalLM": 6, "AlbertModel": 10, "BertModel": 9, "T5Model": 21}


@pytest.mark.parametrize("class_name", SAMPLE)
def test_equals_local(class_name: str) -> None:
    result = examine(*next(each for each in architectures() if each[2] == class_name))
    assert result.good, result
    assert result.requests == REQUESTS.get(class_name, result.requests)


@pytest.mark.architectures
def test_all(tmp_path: Path) -> None:
    """As many as promised, and as many as the reference says."""
    results, document = tmp_path / "results.jsonl", tmp_path / "architectures.md"
    options = ["--fresh", "--results", results, "--document", document]
    assert subprocess.run([sys.executable, sweep.__file__, *options]).returncode == 0
    assert counts(document) == counts(REFERENCE)


def test_counts_are_those_of_the_summary(tmp_path: Path) -> None:
    """The reference has the rows that the program writes."""
    document = tmp_path / "architectures.md"
    document.write_text(summary([]))
    assert counts(document).keys() == counts(REFERENCE).keys()
    assert {len(row) for row in counts(document).values()} == {len(row) for row in counts(REFERENCE).values()}


def counts(document: Path) -> dict[str, list[str]]:
    """The rows of the summary, without the counts of equal results, which depend on the processor."""
    rows = re.findall(rf"^\| ({'|'.join((*KINDS.values(), 'all'))}) \| (.*) \|$", document.read_text(), re.M)
    return {name: [*cells.split(" | ")[:4], *cells.split(" | ")[6:]] for name, cells in rows}
