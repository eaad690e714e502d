"""Long sequences with an executor: what is asked for, what is on the disk, and how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor, make_model
from parity import add_lora, load_local, token_ids, worst_error
from test_experts import adapted
from test_windows import batch, step, windows
from torch import nn
from transformers import Trainer, TrainingArguments

import tenant_sdk
from shared.wire.header import RequestClass
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.sequences.encrypted_file import EncryptedFile
from tenant_sdk.sequences.planning import MemoryPlan, StorageTier


def counted(session: tenant_sdk.Session, model: nn.Module) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Gradients, and rows and bytes of them."""
    before = session.stats
    _, found = step(model, **batch())
    after = session.stats
    names = ("rows", "bytes_sent", "bytes_received")
    return found, [getattr(after, name) - getattr(before, name) for name in names]


@pytest.mark.parametrize("offload_head", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_nothing_is_asked_for_twice(
    architecture: str, offload_head: bool, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    add = adapted if architecture == "mixtral" else add_lora
    with serve(checkpoint(architecture), serve_head=True).connect() as session:
        model = add(session.load_model(progress=False, offload_head=offload_head)).eval()
        counted(session, model)  # who is asked for together is learned
        expected, usual = counted(session, model)
        for size in (None, 16):
            tuning = windows(model, size)
            counted(session, model)
            got, asked = counted(session, model)
            assert asked == usual
            assert worst_error(got, expected) < 1e-5
            tuning.close()
        tuning = windows(model, 16)
        tuning.use(MemoryPlan(chunked_loss=True, window=16, answers=StorageTier.NOWHERE))
        _, asked = counted(session, model)
        assert asked[0] > 1.3 * usual[0]
        tuning.close()


def test_requests_are_one_each_way_for_each_window(llama: Executor) -> None:
    with llama.connect() as session:
        model = add_lora(session.load_model(progress=False)).eval()
        windows(model, 16)
        step(model, **batch())
        before = session.stats.requests
        step(model, **batch())
        assert session.stats.requests - before == 4 * (8 + 7)  # nothing is wanted of the first layer's input


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_nobody_waits_for_its_tokens(
    name: str,
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows of few tokens, and without a graph, do not delay tenants that decode; nor do their experts."""
    asked = []
    submit = RemoteExecutor.submit

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(args[3] if len(args) > 3 else kwargs["request_class"])
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(RemoteExecutor, "submit", watched)
    with serve(checkpoint(name)).connect(experts="routed") as session:
        add = adapted if name == "mixtral" else add_lora
        model = add(session.load_model(progress=False)).eval()
        windows(model, 8)
        asked.clear()
        step(model, **batch())
        assert set(asked) == {RequestClass.FINETUNING}
        asked.clear()
        with torch.no_grad():
            model(**batch())
        assert RequestClass.FINETUNING not in asked  # an evaluation is


@pytest.mark.parametrize("experts", ["local", "padded", "routed"])
def test_under_one_time_masks(
    experts: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("mixtral")
    local = adapted(load_local(folder)).eval()
    _, expected = step(local, **batch())
    masked = {"privacy": "one-time", "mask_sources": [f"local:{folder}"], "experts": experts}
    with serve(folder, numerics="ring").connect(**masked) as session:
        model = adapted(session.load_model(progress=False)).eval()
        for answers in (StorageTier.MEMORY, StorageTier.DISK):
            windows(model, 16).use(MemoryPlan(chunked_loss=True, window=16, answers=answers, states=answers))
            _, got = step(model, **batch())
            # A token whose routes are nearly equal may take another one.
            assert worst_error(got, expected) < 5e-3


def test_nothing_of_the_text_is_on_the_disk(
    llama: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has no name, so what is written to it is looked at."""
    written: list[bytes] = []
    pwrite = os.pwrite

    def look(file: int, data: bytes, at: int) -> int:
        written.append(bytes(data))
        return pwrite(file, data, at)

    monkeypatch.setattr("tenant_sdk.sequences.encrypted_file.os.pwrite", look)
    plain: list[torch.Tensor] = []
    write = EncryptedFile.write
    monkeypatch.setattr(
        EncryptedFile, "write", lambda self, tensor: (plain.append(tensor), write(self, tensor))[1]
    )
    with llama.connect() as session:
        model = add_lora(session.load_model(progress=False)).eval()
        tuning = windows(model, 16, folder=tmp_path)
        tuning.use(
            MemoryPlan(chunked_loss=True, window=16, answers=StorageTier.DISK, states=StorageTier.DISK)
        )
        step(model, **batch())
    assert len(plain) > 2 * 4 * (4 + 2)
    assert not list(tmp_path.iterdir())
    there = b"".join(written)
    for tensor in plain:
        row = tensor.detach().reshape(-1)[:16].contiguous().numpy().tobytes()
        assert row not in there


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(accumulation: int, llama: Executor, tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 40)]
    curves = []
    for window in (0, 16):
        with llama.connect() as session:
            model = add_lora(session.load_model(progress=False))
            if window:
                tenant_sdk.long_tuning(model, 40, batch_size=2, window=window)
            arguments = TrainingArguments(
                str(tmp_path),
                max_steps=4,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=accumulation,
                gradient_checkpointing=bool(window),
                eval_strategy="steps",
                eval_steps=2,
                prediction_loss_only=True,
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                save_strategy="no",
            )
            run = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
            run.train()
            history = run.state.log_history
            curves.append(
                [each[key] for each in history for key in ("loss", "grad_norm", "eval_loss") if key in each]
            )
    assert len(curves[0]) == 4 * 2 + 2
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


LONG = """
import resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import peft, tenant_sdk, provider
folder, out, planned, length = sys.argv[1], sys.argv[2], sys.argv[3] == "planned", 16384
torch.set_num_threads(1)
with tenant_sdk.connect(provider.serve_in_process(folder), privacy="plain") as session:
    model = session.load_model(progress=False)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    free = 900 << 20
    data = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + free, data + free))
    if planned:
        print(tenant_sdk.long_tuning(model, length, folder=out).plan.sentence(length))
    ids = torch.arange(length) % 120
    arguments = TrainingArguments(out, max_steps=1, per_device_train_batch_size=1, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no")
    print(Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}]).train().training_loss)
"""


@pytest.mark.parametrize("planned", [True, False])
def test_a_long_sequence_in_little_memory(planned: bool, tmp_path: Path) -> None:
    """16,384 tokens in 900 MiB: with a plan they are learned from, without one there is no room."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=8192,
        max_position_embeddings=16384,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    command = [
        sys.executable,
        "-c",
        LONG,
        str(tmp_path / "model"),
        str(tmp_path),
        "planned" if planned else "-",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if planned:
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert float(ran.stdout.split()[-1]) == pytest.approx(9.0, abs=0.2)  # log 8192
    else:
        assert ran.returncode != 0
        assert "memory" in ran.stderr


def test_what_a_session_attached(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    """Closed and detached, in any order, the model is as it was."""
    expected = step(add_lora(load_local(checkpoint("llama"))).eval(), **batch())[1]
    for close_first in (True, False):
        model = make_model("llama")
        with llama.connect() as session:
            session.attach(model)
            tuning = windows(model, 16)
            if close_first:
                tuning.close()
            session.detach(model, checkpoint("llama"))
            if not close_first:
                tuning.close()
        assert worst_error(step(add_lora(model).eval(), **batch())[1], expected) < 1e-5
