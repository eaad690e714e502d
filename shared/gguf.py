"""GGUF files: each becomes a checkpoint folder, once, by transformers' own reader.

The weights of the folder are dense: what a block of the file stands for, as transformers computes it, in
float32, and so the same for everybody who has the file and the same version of transformers.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from shared.encoded import is_sparse, path_text
from shared.errors import CheckpointError, peer_text
from shared.gguf_header import check_header
from shared.ownership import check_own, check_tree
from shared.time_limit import TimeLimitExceeded, time_limit
from shared.user_folders import cache_home

log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_LONGEST_TOKEN = 1024  # bytes
_DONE = "config.json"  # written last
_USED = ".used"  # locked by those that read a folder
_kept: dict[Path, int] = {}  # descriptors of such files, by their folder
# Seconds of a processor that reading takes at most, and so many more for each byte. Files of a gigabyte with
# small blocks take some minutes.
_SECONDS, _SECONDS_OF_A_BYTE = 120.0, 1e-6
_CONVERTER = 4  # of this module, raised when it begins to refuse a file, or to make another folder of it
# Keys of an architecture that change no answer, or that the shapes of tensors are compared with anyway.
_SHOWN = {
    *("vocab_size", "context_length", "block_count", "embedding_length", "feed_forward_length"),
    *("expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "shortconv.l_cache"),
    *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
    *("tensor_data_layout", "use_parallel_residual"),
}
# Other keys, and what transformers' configurations call them: first those that only such a model reads.
_EPSILONS = ("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
_CALLED = {
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
}
_ROPE = ("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count")
_CAUSAL = "attention.causal"
# Blocks of those Gemmas whose attention is scaled by the width for each head, and not by the head's own.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_TOKENIZER = "tokenizer.ggml."
# Keys of a tokenizer that change no token, that transformers obeys, or that are looked at. So are ids.
_OF_TOKENIZER = {
    *("model", "pre", "tokens", "scores", "token_type", "merges"),
    *("add_bos_token", "add_eos_token", "add_space_prefix"),
}
_CONTROL, _WHOLE = 3, (3, 4)  # kinds of tokens: of llama.cpp's own, and with those that users define
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_EXPERTS = ({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}, {"ffn_gate_up_exps", "ffn_down_exps"})
_BYTES = "gpt2"  # what a tokenizer of bytes is called
# llama.cpp's names for ways to split a text: as GPT-2 does, and so with each digit alone.
_AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"}
_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# Without a name, llama.cpp takes a rule of its own, which no model was trained with. GPT-2's files have none.
_NO_SPLIT = {"", "default"}
# With these names llama.cpp adds the first token, unless the file says otherwise, and takes a word that is a
# token as it is.
_AS_LLAMA3 = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of an answer
_MORE = 1.1  # times the weights in a file, which a model may have before one that is missing is named


def is_gguf(path: Path) -> bool:
    """Whether it is a file of this kind, by its name or its first bytes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix.lower() == ".gguf" or file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def check_gguf(file: Path) -> None:
    """Refuse what cannot be read, before anything is imported that takes seconds.

    Raises:
        CheckpointError: it is damaged, one part of several, or the package gguf is not installed.
    """
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(_MAGIC))
        hole = is_sparse(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {path_text(file)}: {error.strerror}") from error
    if begins != _MAGIC:
        raise CheckpointError(f"{path_text(file)} is no GGUF file, whatever its name says: it is damaged")
    if hole:
        raise CheckpointError(f"most of {path_text(file)} is a hole: it was not copied as a whole")
    if re.search(r"-\d{5}-of-\d{5}$", file.stem):
        raise CheckpointError(
            f"{path_text(file)} is one part of several: put them together with `llama-gguf-split --merge`"
        )
    try:
        check_header(file)
    except ValueError as error:
        raise CheckpointError(f"{path_text(file)} has a header that cannot be used: {error}") from error
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "GGUF files need the package gguf: pip install '.[gguf]' in a checkout of this project"
        )


def folder_of(file: Path) -> Path:
    """The checkpoint folder that a file was made into, now or before, in the user's cache.

    It takes four bytes for each weight there, and as much as the file has until it is made.

    Raises:
        CheckpointError: see ``write_folder``; or the disk is full.
    """
    check_gguf(file)
    base = cache_home() / "symbiosis" / "gguf"
    try:
        digest = _digest(file)
        made_by = f"{_CONVERTER}-{importlib.metadata.version('transformers')}"
        folder = base / f"{digest[:32]}-{made_by}" / (file.stem.strip(".") or "model")
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_own(folder.parent)
        # Provider and mask source of a trial begin at the same time.
        with open(_open_own(folder.parent / ".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.parent.glob(".*/"):  # by conversions that were ended
                shutil.rmtree(left, ignore_errors=True)
            if (folder / _DONE).is_file():
                check_tree(folder)
            else:
                log.warning("making a checkpoint folder of %s, once: %s", path_text(file), path_text(folder))
                write_folder(file, folder, digest)
                _remove_others(folder.parent, digest[:32])
            _keep(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot make a checkpoint folder of {path_text(file)} below {path_text(base)}: "
            f"{error.strerror}; XDG_CACHE_HOME names another place"
        ) from error
    return folder


def _open_own(path: Path) -> int:
    """A file that is there to be locked; a link would lead to another's."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _keep(folder: Path) -> None:
    """Have other versions leave a folder as long as this process lives, which may read it at any time."""
    path = folder / _USED
    if folder in _kept:
        if path.exists() and os.path.samestat(path.stat(), os.fstat(_kept[folder])):
            return
        os.close(_kept.pop(folder))
    _kept[folder] = _open_own(path)
    fcntl.flock(_kept[folder], fcntl.LOCK_SH)


def _remove_others(kept: Path, digest: str) -> None:
    """What other versions made of the same file, unless a process reads or makes it now."""
    for other in kept.parent.iterdir():
        if other == kept or not re.fullmatch(rf"{digest}(-\d+-[\w.+]+)?", other.name) or other.is_symlink():
            continue
        with suppress(OSError), ExitStack() as opened:
            for name in (".lock", _USED):
                file = opened.enter_context((other / name).open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_folder(file: Path, folder: Path, digest: str | None = None) -> None:
    """Make a file into a checkpoint folder, which is whole or absent.

    Args:
        digest: the file's SHA-256, if the folder is to be of this content and no other.

    Raises:
        CheckpointError: see ``check_gguf``; or transformers cannot read the file, or makes another model of
            it; or the file changes.
        OSError: the folder cannot be written.
    """
    check_gguf(file)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        # Alone: transformers would read adapters and tokenizers that lie beside it. And a copy, which is read
        # several times, and which nobody else can write to in between.
        alone, written = Path(temporary) / "alone", Path(temporary) / "written"
        alone.mkdir()
        copy = Path(shutil.copyfile(file, alone / "model.gguf"))
        if digest not in (None, _digest(copy)):
            raise CheckpointError(f"{path_text(file)} was changed while it was read: try again")
        with _bounded(copy.stat().st_size, path_text(file)):
            _convert(copy, written, path_text(file), _header(copy, path_text(file)))
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)


@contextmanager
def _bounded(size: int, called: str) -> Iterator[None]:
    """Around what reads a file of so many bytes: libraries go through some lists once for each entry.

    Raises:
        CheckpointError: it takes more of a processor than any model's file of this size.
    """
    seconds = _SECONDS + size * _SECONDS_OF_A_BYTE
    try:
        with time_limit(seconds):
            yield
    except TimeLimitExceeded as error:
        raise CheckpointError(
            f"{called} takes more than {seconds:,.0f} s of a processor to read, and has {size:,} bytes: no "
            "known model does. Use the model's safetensors"
        ) from error


@contextmanager
def _one_map_of_names() -> Iterator[None]:
    """While it lasts, gguf makes the map of a model's names once; transformers asks for each module."""
    import gguf

    before = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(before)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = before


def _header(file: Path, called: str) -> Any:
    """The ``GGUFReader`` of a file that transformers does not take for ever to read.

    Raises:
        CheckpointError: what is wrong with the file.
    """
    from gguf import GGUFReader

    try:
        check_header(file)  # past a file's end, the reader goes on for as long as a length says
        reader = GGUFReader(file)
        fields, tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}
        architecture = str(fields["general.architecture"].contents())
        blocks = int(fields[f"{architecture}.block_count"].contents())
        tokens = fields["tokenizer.ggml.tokens"]
        longest = max((len(tokens.parts[at]) for at in tokens.data), default=0)
        width = int(fields[f"{architecture}.embedding_length"].contents())
        widths = {int(size) for size in tensors["token_embd.weight"].shape}
        size = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    except Exception as error:  # whatever a damaged file makes of its reader
        raise CheckpointError(f"{called} has a header that cannot be used: {str(error)[:200]!r}") from error
    found = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if blocks != len(found) or width not in widths:
        raise CheckpointError(
            f"{called} says {blocks} blocks of width {width}, and has tensors of {len(found)} blocks, with "
            f"widths {sorted(widths)}: it is damaged"
        )
    if size > file.stat().st_size:
        raise CheckpointError(f"{called} has tensors that share bytes, and is damaged")
    if longest > _LONGEST_TOKEN:
        raise CheckpointError(f"{called} has a token of {longest:,} bytes; {_LONGEST_TOKEN:,} are the most")
    return reader


def _check_same(reader: Any, config: Any, called: str) -> None:
    """Refuse a file that says another model than the configuration that transformers makes of it.

    A key that is not known is refused too, unless it says 0 or nothing.

    Args:
        reader: the file's ``GGUFReader``.

    Raises:
        CheckpointError: what differs.
    """
    architecture = reader.fields["general.architecture"].contents()
    begins = f"{architecture}."
    stated = {
        name.removeprefix(begins): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(begins)
    }
    lost = [f"{begins}{key}" for key in stated if key not in {*_SHOWN, *_CALLED, *_ROPE, _CAUSAL}]
    lost = [name for name in lost if _says(reader.fields[name])]
    lost += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    if lost:
        raise CheckpointError(
            f"{called} has {lost[0]}, which transformers leaves out when it reads GGUF files: another model "
            "would be served. Use the model's safetensors"
        )
    said = {
        key: next((value for value in (getattr(config, name, None) for name in names) if value), 0)
        for key, names in _CALLED.items()
    }
    said[_CAUSAL] = True
    if architecture != "gemma2":  # of which llama.cpp knows it
        stated.setdefault("attention.sliding_window", 0)
    heads = said["attention.head_count"]
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    if rope := getattr(config, "rope_parameters", None):
        near, rope = (rope.get(f"{name}_attention", rope) for name in ("sliding", "full"))
        turned = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
        said |= zip(_ROPE, (rope["rope_theta"], near["rope_theta"], int(width * turned)), strict=True)
        stated = {"rope.freq_base": 10000.0, "rope.dimension_count": width} | stated
        if near is not rope:
            stated.setdefault("rope.freq_base_swa", 10000.0)
    if scaled := getattr(config, "query_pre_attn_scalar", None):
        by_width = _BY_WIDTH.get(architecture) == config.num_hidden_layers
        stated["attention.scale"] = config.hidden_size // heads if by_width else width
        said["attention.scale"] = scaled
    for key in sorted(said.keys() & stated.keys()):
        if any(not math.isclose(each, said[key], rel_tol=1e-6) for each in _numbers(stated[key])):
            raise CheckpointError(
                f"{called} has {begins}{key} = {str(stated[key])[:80]}, and transformers makes {said[key]} "
                "of it: another model would be served. Use the model's safetensors"
            )


def _check_tensors(reader: Any, names: Collection[str] | None, called: str) -> None:
    """Refuse a file with tensors that transformers does not read, or with a part of a block's experts.

    Args:
        reader: the file's ``GGUFReader``.
        names: of all tensors that are read; experts' are without their ending. None: only endings are known.

    Raises:
        CheckpointError: which tensor it is.
    """
    experts, read = dict[str, set[str]](), names or ()
    for tensor in reader.tensors:
        name = str(tensor.name)
        stem, _, ending = name.rpartition(".")
        if ending == "weight" and stem.endswith("_exps"):
            block, _, kind = stem.rpartition(".")
            experts.setdefault(block, set()).add(kind)
        # Scales of a layer's input are for those who multiply numbers of four bits.
        if ending == "input_scale" or name in read or (ending == "weight" and stem in read):
            continue
        if names is not None or ending not in ("weight", "bias"):
            raise CheckpointError(
                f"{called} has {peer_text(name)}, which transformers leaves out when it reads GGUF files: "
                "another model would be served. Use the model's safetensors"
            )
    for block, kinds in experts.items():
        if kinds not in _EXPERTS:
            raise CheckpointError(
                f"{called} has of {peer_text(block)} only {', '.join(sorted(map(peer_text, kinds)))}, and no "
                "other weights of experts: it is damaged"
            )


def _check_tokenizer(reader: Any, tokenizer: Any, called: str) -> None:
    """Refuse a file that says another tokenizer than transformers makes, or change that to what it says.

    Raises:
        CheckpointError: the key that differs.
    """
    from tokenizers import pre_tokenizers

    stated = {
        name.removeprefix(_TOKENIZER): field
        for name, field in reader.fields.items()
        if name.startswith(_TOKENIZER)
    }
    lost = [key for key in stated if key not in _OF_TOKENIZER and not key.endswith("_token_id")]
    lost = [key for key in lost if _says(stated[key])]
    model, split = (stated[key].contents() if key in stated else "" for key in ("model", "pre"))
    backend = tokenizer.backend_tokenizer
    if model == _BYTES and split in _DIGITS_ALONE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif model == _BYTES and split in _NO_SPLIT:
        if reader.fields["general.architecture"].contents() != "gpt2":
            raise CheckpointError(
                f"{called} has no {_TOKENIZER}pre, which says how a text is split, so the model would get "
                "other tokens: make the file again with llama.cpp of May 2024 or newer, or use the model's "
                "safetensors"
            )
    elif model == _BYTES:
        lost += ["pre"] if split not in _AS_GPT2 and "Split(" not in str(backend.pre_tokenizer) else []
        if split in _AS_LLAMA3:
            backend.model.ignore_merges = True
            if "add_bos_token" not in stated and tokenizer.bos_token is not None:
                tokenizer.add_bos_token = True
    else:
        lost += ["pre"] if "ByteLevel(" in str(backend.pre_tokenizer) else []
        if "add_space_prefix" in stated:
            adds = tokenizer.tokenize("a")[0].startswith(_SPACE)
            lost += ["add_space_prefix"] if adds != stated["add_space_prefix"].contents() else []
    if lost:
        raise CheckpointError(
            f"{called} has {_TOKENIZER}{lost[0]} = {str(stated[lost[0]].contents())[:80]}, which "
            "transformers leaves out when it reads GGUF files: the model would get other tokens. "
            "Use its safetensors"
        )


def _take_whole(path: Path, reader: Any, called: str) -> None:
    """Have each token that llama.cpp takes as it is written be one token here too.

    transformers cuts those with a space, or with characters beyond Latin-1, since it spells them in the
    letters that stand for bytes.

    Args:
        path: of the ``tokenizer.json`` that transformers made, which is changed.
        reader: the file's ``GGUFReader``.

    Raises:
        CheckpointError: one is cut all the same.
    """
    from tokenizers import Tokenizer

    if (types := reader.fields.get(f"{_TOKENIZER}token_type")) is None:
        return
    texts = enumerate(zip(reader.fields[f"{_TOKENIZER}tokens"].contents(), types.contents(), strict=True))
    # SentencePiece writes a space as another character, and has pieces of it that are no added tokens.
    whole = {at: (text, kind) for at, (text, kind) in texts if kind in _WHOLE and text and _SPACE not in text}

    def cut() -> list[int]:
        tokenizer = Tokenizer.from_file(str(path))
        return [at for at in whole if tokenizer.encode(whole[at][0], add_special_tokens=False).ids != [at]]

    if not (missing := cut()):
        return
    said = json.loads(path.read_bytes())
    spelled = {at: name for name, at in said["model"]["vocab"].items()}
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for at in missing:
        text, kind = whole[at]
        said["model"]["vocab"].pop(spelled[at])
        said["model"]["vocab"][text] = at
        said["added_tokens"].append({"id": at, "content": text, "special": kind == _CONTROL} | usual)
    said["added_tokens"].sort(key=operator.itemgetter("id"))
    path.write_text(json.dumps(said, ensure_ascii=False))
    if missing := cut():
        raise CheckpointError(
            f"{called} has a token {peer_text(whole[missing[0]][0])!r} that is taken whole, and transformers "
            "cuts it: the model would get other tokens. Use its safetensors"
        )


def _ends(reader: Any) -> list[int]:
    """Ids of the tokens that end an answer; llama.cpp takes no notice of one that is no token."""
    tokens = len(reader.fields[f"{_TOKENIZER}tokens"].data)
    fields = [reader.fields.get(f"{_TOKENIZER}{name}") for name in _ENDS]
    found = dict.fromkeys(int(field.contents()) for field in fields if field is not None)
    return [each for each in found if 0 <= each < tokens]


def _says(field: Any) -> set[Any]:
    """What a key says that is not 0 and not nothing."""
    return _numbers(field.contents()) - {0, "", "none"}


def _numbers(value: Any) -> set[Any]:
    """Of a key, which may have one for each block."""
    return {*value} if isinstance(value, list) else {value}


def _convert(file: Path, folder: Path, called: str, reader: Any) -> None:
    """Write the model, its tokenizer and its configuration.

    Args:
        reader: the file's ``GGUFReader``.

    Raises:
        CheckpointError: transformers cannot read the file, or makes another model of it.
        OSError: they cannot be written.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from shared.buffers import check_loading
    from shared.compat import gguf_tensor_names, without_ggml_kernels
    from shared.recipes import bounded_build

    found: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    architecture = str(reader.fields["general.architecture"].contents())
    try:
        config = AutoConfig.from_pretrained(file.parent, **found)
        _check_same(reader, config, called)
        # What a file lacks, transformers makes of random numbers before it says so.
        with torch.device("meta"), bounded_build(called, len(reader.tensors)):
            blank = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        wanted = sum(parameter.numel() for parameter in blank.parameters())
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
        if wanted > _MORE * weights:
            raise CheckpointError(
                f"{called} says a model of {wanted:,} weights, and has {weights:,}: it is damaged"
            )
        check_loading(blank, file.stat().st_size, called)
        with _one_map_of_names(), without_ggml_kernels():
            _check_tensors(reader, gguf_tensor_names(blank, architecture), called)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, output_loading_info=True, **found
            )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **found)
        _check_tokenizer(reader, tokenizer, called)
        ends = _ends(reader)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a file says that transformers does not expect
        raise CheckpointError(
            f"transformers cannot read {called}: {str(error)[:300] or repr(error)}"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{called} lacks {missing[0][:100]}, which would be made of random numbers")
    for kind in (".weight", ".bias"):  # experts' are put together, or taken apart
        names = [tensor.name for tensor in reader.tensors if tensor.name.endswith(kind)]
        names = [name for name in names if "_exps" not in name]
        of_model = [name for name in model.state_dict() if name.endswith(kind) and ".experts." not in name]
        if len(names) > len(of_model):
            raise CheckpointError(
                f"{called} has {len(names)} tensors {kind[1:]}, and transformers' model has {len(of_model)}: "
                "another model would be served. Use the model's safetensors"
            )
    vars(model).pop("hf_quantizer", None)  # or transformers would refuse to write it
    if len(ends) > 1:
        model.generation_config.eos_token_id = ends
    tokenizer.save_pretrained(folder)
    try:
        _take_whole(folder / "tokenizer.json", reader, called)
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # of a tokenizer of another kind
        raise CheckpointError(f"{called} has a tokenizer that cannot be used: {error!r:.200}") from error
    model.save_pretrained(folder)
    said = json.loads((folder / _DONE).read_bytes())
    said.pop("quantization_config", None)
    (folder / _DONE).write_text(json.dumps(said, indent=2) + "\n")
