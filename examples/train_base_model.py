"""Train the small base language model that the demo uses, on two CPU cores, in about an hour.

What: a Llama of 5.3 million parameters (6 layers, width 256) with its own byte-level BPE tokenizer
of 2,048 tokens: small enough to live in the repository, real enough to write recognisable English.

Text: the King James Version of the Bible, from Debian's package ``bible-kjv-text`` as printed by
the program ``bible`` of the package ``bible-kjv``. Verse references are left out. A line is one
verse, or several where a verse ends inside a sentence; a document is one chapter. Chapters drawn
by the seed, about 2 % of the text, are held out: tokenizer and model are trained on the others.

Licence: the text is in the public domain (Debian's copyright file says that its copyright, of
1611, has expired). The script and the weights it makes are under Apache-2.0. To rerun::

    apt-get install bible-kjv bible-kjv-text
    pip install torch transformers tokenizers safetensors tqdm
    python examples/train_base_model.py --output examples/base_model

The folder always holds the weights with the lowest validation loss so far, so a run may be stopped
at any time (Ctrl-C, or ``--minutes``) and continued at a step (``--resume``, with a new optimizer).
The result depends on the seed and, as rounding differs, on the processor and the version of torch.
"""

import argparse
import copy
import itertools
import math
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CONTEXT, VOCAB = 512, 2048
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
BOS, EOS, PAD = range(3)
PROMPTS = ("In the beginning", "And the king said unto the woman,", "Blessed is the man")


def read_chapters() -> list[str]:
    """The whole text, one string a chapter, one line a verse or a run of unfinished verses."""
    if shutil.which("bible") is None:
        raise SystemExit("no program 'bible': apt-get install bible-kjv bible-kjv-text")
    printed = subprocess.check_output(["bible", "-f", "gen1:1-rev22:21"], text=True)
    chapters: dict[str, str] = {}
    for chapter, verse in re.findall(r"^(\d?[A-Za-z]+\d+):\d+ (.+)$", printed, re.MULTILINE):
        before = chapters.get(chapter, "")
        # A newline inside a sentence would teach the model to break lines at random.
        chapters[chapter] = before + ("\n" if before[-1:] in ".?!)" else " ") + " ".join(verse.split())
    return [text.strip() for text in chapters.values()]


def split(chapters: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out chapters; the latter are at least ``share`` of the characters."""
    # Whole chapters, because neighbouring verses repeat each other's words.
    order = list(range(len(chapters)))
    random.Random(seed).shuffle(order)
    held: set[int] = set()
    while sum(len(chapters[i]) for i in held) < share * sum(map(len, chapters)):
        held.add(order.pop())
    return [chapters[i] for i in sorted(order)], [chapters[i] for i in sorted(held)]


def train_tokenizer(chapters: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, and decoding gives the same text back."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(chapters, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=bpe,
        model_max_length=CONTEXT,
        # Otherwise decoding may turn " ," into "," and no longer round-trip.
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )


def encode(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> Tensor:
    """All chapters as one stream of token ids, int64 ``[tokens]``, each ended by EOS."""
    encoded = tokenizer.backend_tokenizer.encode_batch(chapters, add_special_tokens=False)
    return torch.tensor([i for one in encoded for i in (*one.ids, EOS)])


def build_model() -> LlamaForCausalLM:
    """The untrained model."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def window(stream: Tensor, start: int) -> Tensor:
    """BOS, then the next tokens of ``stream``, int64 ``[CONTEXT]`` or fewer at the stream's end."""
    # Every window begins with BOS because every prompt does, wherever its text was taken from.
    return torch.cat((torch.tensor([BOS]), stream[start : start + CONTEXT - 1]))


def batches(stream: Tensor, newline: int, size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches ``[size, CONTEXT]`` of windows that begin where a line begins."""
    starts = torch.isin(stream, torch.tensor([EOS, newline])).nonzero().flatten() + 1
    starts = starts[starts <= len(stream) - CONTEXT]
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = starts[torch.randperm(len(starts), generator=generator)].tolist()
        for i in range(0, len(order) - size + 1, size):
            yield torch.stack([window(stream, start) for start in order[i : i + size]])


def loss_of(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    # bfloat16 is at least 1.4 times as fast as float32 on a processor with AVX-512 BF16.
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


@torch.no_grad()
def evaluate(model: PreTrainedModel, stream: Tensor) -> float:
    """Mean loss over all tokens of ``stream``, in disjoint windows."""
    total = 0.0
    for start in range(0, len(stream), CONTEXT - 1):
        batch = window(stream, start)[None]
        total += loss_of(model, batch).item() * (batch.shape[1] - 1)
    return total / len(stream)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer; a reader sees each file old or new, never half written."""
    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).bfloat16()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        half.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)


def schedule(step: int, steps: int, warmup: int) -> float:
    """Share of the highest learning rate: linear warm-up, then a cosine down to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.505 + 0.495 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def train(args: argparse.Namespace) -> None:
    """Train from the options of ``main`` and leave the best weights in ``args.output``."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    train_text, held_text = split(read_chapters(), 0.02, args.seed)
    tokenizer = train_tokenizer(train_text)
    stream, held = encode(tokenizer, train_text), encode(tokenizer, held_text)
    model = LlamaForCausalLM.from_pretrained(args.output, dtype=torch.float) if args.resume else build_model()
    print(f"{model.num_parameters():,} parameters; {len(stream):,} tokens, {len(held):,} held out")
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    # Decay would pull the norms' scales, whose neutral value is 1, towards 0.
    groups += [{"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=args.decay)
    newline = tokenizer("\n", add_special_tokens=False).input_ids[0]
    source = itertools.islice(batches(stream, newline, args.batch, args.seed), args.resume, None)
    began, best = time.monotonic(), evaluate(model, held)
    for step in (bar := tqdm(range(args.resume + 1, args.steps + 1), unit="step", mininterval=5)):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(step - 1, args.steps, args.warmup)
        loss = loss_of(model, next(source))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        minutes = (time.monotonic() - began) / 60
        done = step == args.steps or minutes >= args.minutes
        if done or step % args.every == 0:
            value = evaluate(model, held)
            tqdm.write(
                f"step {step}, {step * args.batch * CONTEXT:,} tokens, {minutes:.1f} min: "
                f"validation loss {value:.4f}, perplexity {math.exp(value):.2f}"
            )
            if value < best:
                save(model, tokenizer, args.output)
            best = min(best, value)
        if done:
            break
    report(args.output, held)


def report(folder: Path, held: Tensor) -> None:
    """Print what the saved folder is worth, loaded as a user loads it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    value = evaluate(model, held)
    text = str(tokenizer.decode(held, skip_special_tokens=True))
    bits = value * len(held) / math.log(2) / len(text.encode())
    print(f"saved: validation perplexity {math.exp(value):.2f}, {bits:.3f} bits a byte")
    choice = {"max_new_tokens": 80, "do_sample": True, "temperature": 0.7, "top_k": 40}
    for prompt in PROMPTS:
        written = model.generate(**tokenizer(prompt, return_tensors="pt"), **choice)
        print("---", tokenizer.decode(written[0], skip_special_tokens=True), sep="\n")


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--steps", type=int, default=3000, help="length of the schedule")
    parser.add_argument("--resume", type=int, default=0, help="go on at this step from output's weights")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps of warm-up")
    parser.add_argument("--decay", type=float, default=0.5, help="weight decay")
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--threads", type=int, default=2, help="processor threads")
    parser.add_argument("--seed", type=int, default=1611)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
