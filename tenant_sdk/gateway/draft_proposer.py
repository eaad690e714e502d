"""Drafts' guesses for vLLM's sequences, through vLLM's ``custom_class`` for speculation."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from shared.errors import ConfigurationError, SymbiosisError
from tenant_sdk.drafts.card import DraftCard, draft_folders, read_card
from tenant_sdk.drafts.folder import WEIGHTS, check_base, digest_of_tensors, read_weights
from tenant_sdk.drafts.head import Guesser, Vocabulary
from tenant_sdk.drafts.options import CARD
from tenant_sdk.gateway.connection import session_here
from tenant_sdk.storage import ADAPTER_WEIGHTS, UNREADABLE_TENSORS, files_version

FOLDER = "draft"  # in vLLM's ``additional_config``

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A draft, or none.

    Attributes:
        versions: of the draft's folder alone, so that no change of another draft has it read again; of all
            folders if there is none, since each may become it.
    """

    guesser: Guesser | None
    versions: dict[Path, object]

    def is_outdated(self, versions: dict[Path, object]) -> bool:
        if self.guesser is None:
            return self.versions != versions
        return not self.versions.items() <= versions.items()


class Proposer:
    """Guesses the next tokens of each sequence from its last hidden state.

    An adapter's sequences have the adapter's draft, or else that of the base model: its guesses are less
    often right there, and no text depends on them. A thread reads the draft of an adapter when its first
    sequence comes, while steps go on. Drafts that are added later are found, too.

    Args:
        config: vLLM's.
    """

    def __init__(self, config: Any) -> None:
        self._folder = Path(config.additional_config[FOLDER])
        self._guesses = config.speculative_config.num_speculative_tokens
        self._tokens = config.model_config.get_vocab_size()  # vLLM's head has more rows, to fill up a block
        self._hidden: torch.Tensor | None = None
        self._drafted: Mapping[str, Sequence[int]] = {}
        self._runner: Any = None
        # Weights of drafts take memory, so those that were used last are kept.
        self._most = 1 + (config.lora_config.max_loras if config.lora_config else 0)
        self._drafts = OrderedDict[str, Future[_Found]]()  # by the adapter's folder
        self._reader = ThreadPoolExecutor(1, "drafts")

    def load_model(self, model: Any) -> None:
        """Read the drafts, and from now on see what the head of vLLM's model reads.

        Raises:
            ConfigurationError: a draft is damaged, or the model's head is not where it is expected.
            ModelMismatch: one is a draft of another model.
        """
        head = getattr(model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or not hasattr(model, "embed_input_ids"):
            raise ConfigurationError(f"drafts do not go with vLLM's {type(model).__name__}")
        self._embed, self._weight = model.embed_input_ids, weight.detach()
        self._bias = getattr(head, "bias", None)
        for folder in draft_folders(self._folder):  # later, a damaged one is passed over
            self._load(folder, read_card(folder))
        self._read("", self._versions()).result()
        self._compute = model.compute_logits
        model.compute_logits = self._logits

    def begin(self, runner: Any, drafted: Mapping[str, Sequence[int]]) -> None:
        """A step begins, in which so many guesses of each sequence are checked."""
        self._runner, self._drafted, self._hidden = runner, drafted, None

    def _logits(self, hidden: torch.Tensor, *more: Any) -> Any:
        if self._hidden is None:  # later calls of a step are for prompts' probabilities
            self._hidden = hidden
        return self._compute(hidden, *more)

    @torch.no_grad()
    def propose(
        self, sampled: list[list[int]], lengths: NDArray[Any], texts: NDArray[Any], **_: Any
    ) -> list[list[int]]:
        """Guesses for each sequence; none for those that have no token of this step, or no draft.

        Args:
            sampled: new tokens of each sequence: the right guesses, and one more.
            lengths: of the sequences' texts, with these tokens.
            texts: their ids, a row for each sequence.
        """
        names, first, versions = self._runner.input_batch.req_ids, 0, self._versions()
        guesses, writing = [list[int]() for _ in sampled], defaultdict[Guesser, list[tuple[int, int]]](list)
        for at, tokens in enumerate(sampled):
            if tokens and (draft := self._draft_of(names[at], versions)) is not None:
                writing[draft].append((at, first + len(tokens) - 1))
            first += 1 + len(self._drafted.get(names[at], ()))
        if self._hidden is None:
            return guesses
        for draft, places in writing.items():
            hidden = self._hidden[[row for _, row in places]]
            found = draft(hidden, [texts[at, : lengths[at]] for at, _ in places], self._guesses)
            for (at, _row), its in zip(places, found.tolist(), strict=True):
                guesses[at] = its
        return guesses

    def _versions(self) -> dict[Path, object]:
        """Of each draft's files: a copy is written file by file, and the time of its folder may stay."""
        return {each: files_version(each, (CARD, WEIGHTS)) for each in draft_folders(self._folder)}

    def _draft_of(self, sequence: str, versions: dict[Path, object]) -> Guesser | None:
        """The draft of its adapter, if there is one and it has been read, or the base's."""
        adapter = self._runner.requests[sequence].lora_request
        paths = [""] if adapter is None else [adapter.lora_path, ""]
        drafts = (self._read(path, versions) for path in paths)
        found = (draft.result().guesser for draft in drafts if draft.done())
        return next((guesser for guesser in found if guesser is not None), None)

    def _read(self, adapter: str, versions: dict[Path, object]) -> Future[_Found]:
        """The draft for an adapter in a folder (the base: empty), perhaps later; or none."""
        draft = self._drafts.get(adapter)
        if draft is None or (draft.done() and draft.result().is_outdated(versions)):
            draft = self._drafts[adapter] = self._reader.submit(self._find, adapter, versions)
            if len(self._drafts) > self._most:
                self._drafts.popitem(last=False)[1].cancel()
        self._drafts.move_to_end(adapter)
        return draft

    def _find(self, adapter: str, versions: dict[Path, object]) -> _Found:
        try:
            tensors = load_file(Path(adapter) / ADAPTER_WEIGHTS) if adapter else {}
        except UNREADABLE_TENSORS:  # the adapter has just been removed
            return _Found(None, versions)
        digest = digest_of_tensors(tensors) if adapter else ""
        for folder, version in versions.items():
            try:
                if (card := read_card(folder)).adapter == digest:
                    return _Found(self._load(folder, card), {folder: version})
            except SymbiosisError as error:
                log.warning("a draft is not used: %s", error)
            except (MemoryError, RuntimeError) as error:  # or each step would fail, for all clients
                log.warning("a draft is not used: %s", type(error).__name__)
        return _Found(None, versions)

    def _load(self, folder: Path, card: DraftCard) -> Guesser:
        check_base(card, folder, session_here().manifest)
        head, tokens = read_weights(folder, card, self._tokens, self._weight.shape[1])
        head.to(self._weight.device)
        return Guesser(head, Vocabulary(self._embed, self._weight, self._bias, tokens), card.repeats)
