"""What an adversary found around the allow-lists, the attested lists and the quotas."""

from __future__ import annotations

import gc
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import RING, Executor, make_model
from hostile_files import BYTE_LEVEL, RULES, changed, config_of, replace, sequence
from lanes import HeldLane, service_on
from raw_peers import eventually
from safetensors.torch import load_file

from provider.engine.engine import Engine
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.session.quota import Quota, Quotas
from provider.session.tenant import Service, TenantSession
from shared.checkpoint import Checkpoint
from shared.errors import ModelMismatch, RequestRefused, SymbiosisError, WireError
from shared.stored import bytes_of, parameter_hash
from shared.wire.header import DTYPE_CODES, Direction, Header, Operation
from shared.wire.messages import Fetch, encode
from shared.wire.websocket import Incoming, MessageReader, encode_message
from tenant_sdk.command_line.checks import CheckResult
from tenant_sdk.model.configuration import model_configuration
from tenant_sdk.model.tokenizer import build_tokenizer
from tenant_sdk.products.fingerprints import write_fingerprints
from tenant_sdk.trust.attestation import CheckpointContents, check_agreement
from tenant_sdk.trust.operators import own_authorities

pytest_plugins = ("hostile_fixtures",)

# -- what is attested ------------------------------------------------------------------------------


def test_the_same_bytes_of_another_type_are_another_parameter(
    checkpoint: Callable[[str], Path],
) -> None:
    """Otherwise a provider calls bfloat16 float16, or gives a matrix another shape, under the same hash."""
    trusted = CheckpointContents.of(Checkpoint(checkpoint("llama")))
    manifest = BaseExecutor(checkpoint("llama"), numerics="float32").manifest
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    name = "model.norm.weight"
    for number, other in enumerate((tensors[name].view(torch.int32), tensors[name].view(1, -1))):
        hashed = parameter_hash(str(other.dtype).removeprefix("torch."), other.shape)
        hashed.update(bytes_of(other))
        info = next(each for each in manifest.parameters if each.name == name)
        lie = msgspec.structs.replace(info, sha256=hashed.hexdigest())
        parameters = tuple(lie if each is info else each for each in manifest.parameters)
        with pytest.raises(ModelMismatch, match=r"parameter model\.norm\.weight"):
            trusted.check(msgspec.structs.replace(manifest, parameters=parameters), f"copy {number}")


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_manifest_that_gives_a_parameter_another_form(
    what: str, hostile: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """It is noticed at the latest when the parameter is there."""
    with hostile({}).connect() as session:
        remote = session.executor
        info = next(each for each in remote.manifest.parameters if each.name == "lm_head.weight")
        other = {"dtype": "int32"} if what == "dtype" else {"shape": info.shape[::-1]}
        with pytest.raises((WireError, SymbiosisError)):
            list(remote.parameter(msgspec.structs.replace(info, **other)))


def test_fingerprints_attest_also_where_nothing_is_verified(
    hostile: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The provider says what it computes in; that must not decide whether its files are looked at."""
    key = write_fingerprints(checkpoint("llama"), tmp_path / "prints", numerics=RING)
    options = {"fingerprints": tmp_path / "prints", "fingerprint_key": key, "verify": "off"}
    for numerics in (RING, "float32"):
        executor = hostile({"tokenizer_config.json": b"{}"}, numerics=numerics)
        with pytest.raises(ModelMismatch, match=r"tokenizer(_config)?\.json is not that of"):
            executor.connect(**options)


def test_another_order_is_a_typed_disagreement(llama: Executor) -> None:
    _, manifest = config_of(llama)
    turned = msgspec.structs.replace(manifest, parameters=manifest.parameters[::-1])
    with pytest.raises(ModelMismatch, match="another order of parameters"):
        check_agreement("wss://a", turned, manifest)


def test_one_authority_in_another_dress(tls_dir: Path, tmp_path: Path) -> None:
    """OpenSSL trusts the same certificate in a form that other readers pass over."""
    pem = (tls_dir / "ca.pem").read_text()
    other = tmp_path / "trusted.pem"
    other.write_text(
        pem.replace("BEGIN CERTIFICATE", "BEGIN TRUSTED CERTIFICATE").replace(
            "END CERTIFICATE", "END TRUSTED CERTIFICATE"
        )
    )
    with pytest.raises(SymbiosisError, match="hold the same certificate authority"):
        own_authorities(tls_dir / "ca.pem", [other], ())


# -- what grows ------------------------------------------------------------------------------------

LONG_FORM = "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence({"type": "NFKD"}, *[replace("a", LONG_FORM), {"type": "NFKD"}] * 3)},
        {"normalizer": sequence(*[{"type": "BertNormalizer"}] * 7)},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 24}},
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": False}]
                * 24,
            }
        },
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0},
                "merges": [],
                "byte_fallback": True,
                "continuing_subword_prefix": "x" * 2000,
            }
        },
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "FixedLength"}]}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "pair": [],
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "special_tokens": {},
            }
        },
    ],
)
def test_rules_that_grow_in_company(parts: dict[str, Any]) -> None:
    with pytest.raises(ModelMismatch, match=r"tokenizer\.json is refused"):
        build_tokenizer({"tokenizer.json": changed(**parts)})


@pytest.mark.parametrize(
    "options",
    [
        {"pad_token": "x" * 5000},
        {"eos_token": {"content": "x" * 5000}},
        {"additional_special_tokens": ["x" * 5000]},
        {"chat_template": [{"name": "../../../x", "template": "x"}]},
        {"chat_template": [{"name": "x\x1b[31m", "template": "x"}]},
        {"chat_template": [{"name": "x" * 300, "template": "x"}]},
    ],
)
def test_options_that_are_long_or_name_files(options: dict[str, Any]) -> None:
    with pytest.raises(ModelMismatch, match=r"tokenizer_config\.json is refused"):
        build_tokenizer({"tokenizer.json": RULES, "tokenizer_config.json": json.dumps(options).encode()})


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "gpt_neo", "attention_types": [[["global"], 1 << 24]], "num_layers": 2},
        {"model_type": "gpt_neo", "attention_types": [[["global"], 9]] * 5000, "num_layers": 2},
        # Each list and each number is small; only their product is large.
        {"model_type": "gpt_neo", "attention_types": [[["global"] * 500, 900]] * 20, "num_layers": 2},
        {"model_type": "llama", "first_k_dense_replace": 1 << 40},
        {"model_type": "llama", "max_position_embeddings": 1 << 30},
    ],
)
def test_numbers_that_repeat_something(raw: dict[str, Any], llama: Executor) -> None:
    _, manifest = config_of(llama)
    started = time.thread_time()
    with pytest.raises(ModelMismatch):
        model_configuration(json.dumps(raw).encode(), manifest, {})
    assert time.thread_time() - started < 30  # of the processor, however busy the machine is


def test_a_configuration_cannot_rename_its_keys(llama: Executor) -> None:
    raw, manifest = config_of(llama)
    raw |= {"attribute_map": {"num_hidden_layers": "max_position_embeddings"}}
    config = model_configuration(json.dumps(raw).encode(), manifest, {})
    assert config.num_hidden_layers == raw["num_hidden_layers"]


# -- what is shown ---------------------------------------------------------------------------------

ESCAPE = "\x1b[2J\x1b[H\x9b31mowned\x07"


def test_no_message_holds_control_characters(llama: Executor) -> None:
    raw, manifest = config_of(llama)
    hidden = json.dumps(raw | {"x": {"num_" + ESCAPE: 1 << 50, "num_x": 1 << 50}}).encode()

    def unknown(**parts: Any) -> None:
        build_tokenizer({"tokenizer.json": changed(**parts)})

    for make in (
        lambda: unknown(normalizer={"type": ESCAPE}),
        lambda: unknown(**{ESCAPE: 1}),
        lambda: model_configuration(hidden, manifest, {}),
        lambda: check_agreement("wss://a", manifest, msgspec.structs.replace(manifest, digest=ESCAPE)),
    ):
        with pytest.raises(SymbiosisError) as caught:
            make()
        assert not {"\x1b", "\x9b", "\x07"} & set(str(caught.value) + caught.value.message)
    assert str(SymbiosisError(f"a peer wrote {ESCAPE}")) == "a peer wrote ?[2J?[H?31mowned?"
    # Nor a second line, which a log would take for an entry of its own.
    assert str(SymbiosisError("one\ntwo")) == "one two"
    assert str(RequestRefused("x\ny\x1b", "z\r\n")) == "[x?y?] z? "
    assert CheckResult("tls", False, f"CN={ESCAPE}").detail == "CN=?[2J?[H?31mowned?"


# -- what a tenant may have in flight --------------------------------------------------------------


def test_files_and_parameters_count_as_well(checkpoint: Callable[[str], Path]) -> None:
    """A reply that nobody reads is held, and who asks for many takes turns."""
    base = BaseExecutor(checkpoint("llama"), numerics="float32")
    size = base.manifest.files[0].size
    quotas = Quotas(Quota(bytes_in_flight=size + 1))

    service = Service(base, Engine.of(base), Metrics(), quotas)
    sent: queue.Queue[Header] = queue.Queue()
    not_taken: list[Callable[[], None]] = []

    def send(answer: Header, blocks: Any, taken: Callable[[], None]) -> None:
        not_taken.append(taken)
        sent.put(answer)

    session, other = (TenantSession(service, "alice", send) for _ in range(2))
    hello = b'{"client":"x"}'

    def message(operation: Operation, body: bytes, request_id: int) -> Incoming:
        head = Header(operation, request_id=request_id, rows=1, columns=len(body))
        return Incoming(head, torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def request(request_id: int) -> Incoming:
        body = encode(Fetch("file", base.manifest.files[0].name, 0, size))
        return message(Operation.FETCH, body, request_id)

    def answers(session: TenantSession, asked: Incoming) -> Header:
        service.engine.loop.call_soon_threadsafe(lambda: session.answer(asked))
        return sent.get(timeout=800)

    for each in (session, other):
        assert answers(each, message(Operation.HELLO, hello, 1)).operation == Operation.WELCOME
    assert answers(session, request(2)).operation == Operation.REPLY
    assert quotas.in_flight() == (0, size)  # the network has not taken it
    assert answers(other, request(9)).operation == Operation.ERROR
    for taken in not_taken:
        taken()
    assert quotas.in_flight() == (0, 0)
    assert answers(other, request(10)).operation == Operation.REPLY
    service.close()


def test_who_leaves_gives_back_what_it_had(checkpoint: Callable[[str], Path]) -> None:
    """At once what nobody works on, the rest when it is back: memory is held until then."""
    base, quotas = (
        BaseExecutor(checkpoint("llama"), numerics="float32"),
        Quotas(Quota(bytes_in_flight=1 << 30)),
    )
    service, lane = service_on(base, HeldLane, quotas=quotas)
    width, size = base.manifest.groups[0].inputs, base.manifest.files[0].size
    gone = TenantSession(service, "alice", lambda *_: None)

    def accepted(header: Header, payload: torch.Tensor) -> Incoming:
        gone.accept(header)
        return Incoming(header, payload)

    def product() -> Incoming:
        header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 3, width, 1)
        return accepted(header, torch.ones(3, width))

    body = encode(Fetch("file", base.manifest.files[0].name, 0, size))
    fetch = Header(Operation.FETCH, request_id=8, rows=1, columns=len(body))
    hello = b'{"client":"x"}'
    greeting = Header(Operation.HELLO, rows=1, columns=len(hello))
    first = accepted(greeting, torch.frombuffer(bytearray(hello), dtype=torch.uint8))
    under_way, queued, arriving = product(), product(), product()
    one = quotas.in_flight()[1] // 3

    for each in (first, under_way):
        service.engine.loop.call_soon_threadsafe(lambda each=each: gone.answer(each))  # type: ignore[misc]
    assert lane.busy.wait(800)
    service.engine.loop.call_soon_threadsafe(lambda: gone.answer(queued))
    service.engine.loop.call_soon_threadsafe(gone.close)
    for late in (arriving, Incoming(fetch, torch.frombuffer(bytearray(body), dtype=torch.uint8))):
        service.engine.loop.call_soon_threadsafe(lambda late=late: gone.answer(late))  # type: ignore[misc]
    eventually(lambda: quotas.in_flight() == (3, one))
    lane.go.set()
    eventually(lambda: quotas.in_flight() == (0, 0))
    assert service.engine.waiting == 0
    service.close()


def asked_and_left(service: Service) -> weakref.ref[TenantSession]:
    """A session that asked for many downloads, and has ended."""
    session = TenantSession(service, "alice", lambda *_: None)
    file = service.executor.manifest.files[0]
    body = encode(Fetch("file", file.name, 0, file.size))

    def ask() -> None:
        for at in range(16):
            head = Header(Operation.FETCH, request_id=at, rows=1, columns=len(body))
            session.answer(Incoming(head, torch.frombuffer(bytearray(body), dtype=torch.uint8)))

    service.engine.loop.call_soon_threadsafe(ask)
    eventually(lambda: service.quotas.in_flight() == (0, 16 * file.size))
    service.engine.loop.call_soon_threadsafe(session.close)
    eventually(lambda: service.quotas.in_flight() == (0, 0))
    return weakref.ref(session)


def test_downloads_of_a_tenant_that_has_left_are_not_read(checkpoint: Callable[[str], Path]) -> None:
    """It could ask and hang up, again and again, faster than anything is read."""
    base, quotas = (
        BaseExecutor(checkpoint("llama"), numerics="float32"),
        Quotas(Quota(bytes_in_flight=1 << 30)),
    )
    service = Service(base, Engine.of(base), Metrics(), quotas)
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(800)

    service.downloads.submit_for("bob", hold)
    assert begun.wait(800)
    gone = asked_and_left(service)
    assert not service.downloads._waiting
    gc.disable()  # nothing is left for the collector either, which would stop the loop
    try:
        eventually(lambda: gone() is None)
    finally:
        gc.enable()
        go.set()
    service.close()


def test_an_answer_that_was_sent_is_not_kept(checkpoint: Callable[[str], Path]) -> None:
    """What is counted of it later needs no more than its times: no quota knows of it any more."""
    base = BaseExecutor(checkpoint("llama"), numerics="float32")
    service = Service.of(base)
    deferred: list[Callable[[], None]] = []
    service.engine.defer = deferred.append  # type: ignore[method-assign]
    sent: queue.Queue[list[weakref.ref[torch.Tensor]]] = queue.Queue()

    def send(answer: Header, blocks: Any, taken: Callable[[], None]) -> None:
        taken()
        if answer.operation == Operation.REPLY:
            sent.put([weakref.ref(each) for each in blocks])

    session = TenantSession(service, "alice", send)
    width = base.manifest.groups[0].inputs
    head = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 3, width, 1)
    session._protocol.greeted = True

    def ask() -> None:
        session.accept(head)
        session.answer(Incoming(head, torch.ones(3, width)))

    service.engine.loop.call_soon_threadsafe(ask)
    blocks = sent.get(timeout=800)
    assert blocks
    eventually(lambda: any("answered" in repr(each) for each in deferred))
    eventually(lambda: all(each() is None for each in blocks))
    service.close()


def test_a_refused_request_leaves_nothing_for_the_garbage_collector(
    checkpoint: Callable[[str], Path],
) -> None:
    """Who sends many of them would have it stop the executor's loop, again and again."""

    def refuse(header: Header) -> None:
        raise WireError("unknown_group", "there is no such group")

    reader = MessageReader(refuse, masked=False, max_message_bytes=1000)
    service = Service.of(BaseExecutor(checkpoint("llama"), numerics="float32"))
    answered: list[Header] = []
    session = TenantSession(service, "alice", lambda header, *_: answered.append(header))
    head = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 1, 4, 1)
    message = b"".join(bytes(each) for each in encode_message(head, [torch.ones(1, 4)]))
    gc.disable()
    try:
        for end in (len(message), 20):  # whole, and in two parts
            left = list[Any]()
            for part in (message[:end], message[end:]):
                if not part:
                    continue
                reader.get_buffer()[: len(part)] = part
                for event in reader.received(len(part)):
                    assert isinstance(event, Incoming)
                    assert event.error is not None
                    left.append(weakref.ref(event.error))
                    session.answer(event)
                    del event
            assert len(left) == 1
            assert left[0]() is None
    finally:
        gc.enable()
    assert [header.operation for header in answered] == [Operation.ERROR] * 2
    service.close()


def test_a_download_that_is_put_off_goes_on(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """A tenant over its rate waits, and gets the same model."""
    executor = serve_process(checkpoint("llama"), "--tenant-requests", "3")
    with executor.connect() as session:
        model = session.load_model(progress=False)
        assert session.stats.refusals > 0
    expected = make_model("llama").state_dict()["model.embed_tokens.weight"]
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], expected)


# -- parameters that nobody supplies ---------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_nobody_supplies_counts_as_made_here(
    tied: bool, hostile: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied head is its embedding, of whatever size; an embedding that is left out is not."""
    monkeypatch.setattr("tenant_sdk.model.loading.MAX_BUFFERS", 1 << 14)  # the embedding has twice as many
    with hostile({}).connect() as session:
        remote = session.executor
        raw, manifest = config_of(hostile({}))
        config = json.dumps(raw | {"tie_word_embeddings": tied}).encode()
        kept = tuple(each for each in manifest.parameters if each.name != "lm_head.weight")
        remote.manifest = msgspec.structs.replace(manifest, parameters=kept)
        remote.file = lambda info: config if info.name == "config.json" else b"{}"  # type: ignore[method-assign]
        if tied:
            session.load_model(progress=False)
        else:
            with pytest.raises(ModelMismatch, match="lists no values for parameters"):
                session.load_model(progress=False)


@pytest.mark.parametrize(
    "parts",
    [
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "é": 1},
                "merges": [["a", "é"]],
                "continuing_subword_prefix": "#",
            }
        },
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "WordPiece", "prefix": "z", "cleanup": False}] * 11,
            }
        },
        {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}},
        {"normalizer": replace("", "x" * 1023, "Regex")},
        {"normalizer": replace("", "x" * 1023)},
    ],
)
def test_what_ends_the_process_or_was_counted_too_low(parts: dict[str, Any]) -> None:
    with pytest.raises(ModelMismatch, match=r"tokenizer\.json is refused"):
        build_tokenizer({"tokenizer.json": changed(**parts)})


def test_labels_are_counted_like_layers(llama: Executor) -> None:
    raw, manifest = config_of(llama)
    wide = msgspec.structs.replace(manifest.parameters[0], name="junk", shape=(1 << 30,))
    lied = msgspec.structs.replace(manifest, parameters=(*manifest.parameters, wide))
    with pytest.raises(ModelMismatch, match="num_labels"):
        model_configuration(json.dumps(raw | {"num_labels": 1 << 30}).encode(), lied, {})


def test_a_template_name_ends_where_it_ends() -> None:
    options = json.dumps({"chat_template": [{"name": "evil\n", "template": "x"}]}).encode()
    with pytest.raises(ModelMismatch, match="refused"):
        build_tokenizer({"tokenizer.json": RULES, "tokenizer_config.json": options})
