"""The data of each adversary: the types that attacks take, made from transcripts and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from security.recordings.executors import AuditError
from security.recordings.transcript import RecordedRequest, Transcript
from security.recordings.workload import GroundTruth
from security.views.public_model import PublicModel
from shared.ring.mask_stream import MaskStream
from shared.wire.header import EXACT, PRODUCTS, Direction, Operation
from shared.wire.protocol import GroupShape

HEAD = 8  # numbers of a mask that show which rows it may be under
# Masks that are looked at whole for one request, since their heads look right. By chance one of 2^24 does,
# but a tenant can send any number of such rows to the mask source.
FALSE_HEADS = 16
SMALL = 2.0**28  # on the ring, for the mean size of a row's numbers without a mask
MASK_BYTES = 1 << 29  # of masks that a view has; seeds of 32 bytes can say any number of them


@dataclass(frozen=True)
class ObservedRequest:
    """One request for a product; ``sent`` are its rows, or the request in a transcript that has them."""

    group: int
    direction: int
    members: int
    session: int
    arrived: float
    sent: torch.Tensor | RecordedRequest

    @property
    def raw(self) -> torch.Tensor:
        """The rows [T, C] bit by bit: int32, float32 or bfloat16."""
        return self.sent if isinstance(self.sent, torch.Tensor) else self.sent.rows

    @property
    def rows(self) -> torch.Tensor:
        """The rows as float32; on the ring up to a scale of each."""
        return self.raw.float()

    @property
    def count(self) -> int:
        """How many rows."""
        return len(self.sent) if isinstance(self.sent, torch.Tensor) else self.sent.header.rows

    @property
    def forward(self) -> bool:
        """Activations; else gradients."""
        return self.direction == Direction.FORWARD


@dataclass
class View:
    """The data of one tenant that an adversary has.

    ``masks`` holds the masks that the adversary knows, by group, direction and members. If all ``mask_count``
    masks take too much memory, it holds an even share of them. ``sees`` names the adversary.
    """

    public: PublicModel
    requests: list[ObservedRequest]
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    mask_count: int = 0
    sees = "anything"

    def of(self, group: int, direction: int = Direction.FORWARD) -> list[ObservedRequest]:
        """Requests for one group and direction."""
        return [seen for seen in self.requests if (seen.group, seen.direction) == (group, direction)]

    def blind(self, rng: np.random.Generator, groups: set[int]) -> View:
        """The requests for some groups, with random rows in place of theirs, uniform on the ring.

        Rows of floats are replaced by floats. Each new row has the norm of the row that it replaces.
        """

        def drawn(seen: ObservedRequest) -> ObservedRequest:
            raw = seen.raw
            numbers = np.frombuffer(rng.bytes(4 * raw.numel()), np.int32).reshape(raw.shape)
            rows = torch.from_numpy(numbers.copy())
            if raw.dtype != torch.int32:
                rows = rows.float()
                rows *= (raw.float().norm(dim=1) / rows.norm(dim=1).clamp_min(1e-30))[:, None]
            return replace(seen, sent=rows)

        return View(self.public, [drawn(seen) for seen in self.requests if seen.group in groups])

    @cached_property
    def first_raw(self) -> torch.Tensor:
        """All rows for the first group, as they were sent, one for each token: [N, D]."""
        raw_rows = [seen.raw for seen in self.of(0)]
        return torch.cat(raw_rows) if raw_rows else torch.empty(0, self.public.manifest.groups[0].inputs)

    @cached_property
    def first(self) -> torch.Tensor:
        """``first_raw`` as float32."""
        return self.first_raw.float()


class ProviderView(View):
    """An honest-but-curious provider: every row that it multiplied, and masks, if it multiplied those."""

    sees = "provider"


@dataclass(frozen=True)
class MaskSourceView:
    """A mask source: the seeds it was sent, in the order in which they came, also of several sessions.

    It knows no row, so nothing lines up with its masks. ``others`` is how many requests were no seed.
    """

    seeds: list[bytes]
    others: int = 0
    sees = "mask source"


class CollusionView(View):
    """The provider and every mask source together: the masks subtracted from the rows."""

    sees = "provider and mask source"


def _seen(request: RecordedRequest, rows: torch.Tensor | None = None) -> ObservedRequest:
    """A request, or other rows in its place."""
    header = request.header
    sent = request if rows is None else rows
    return ObservedRequest(
        header.group, header.direction, header.members, request.session, request.arrived, sent
    )


def requests_of(transcripts: list[Transcript], tenant: str) -> list[RecordedRequest]:
    """The requests of one tenant, in order, including those of later connections."""
    return [
        request
        for transcript in transcripts
        for request in transcript.requests
        if transcript.tenants.get(request.session) == tenant and request.header.operation in PRODUCTS
    ]


def provider_view(public: PublicModel, requests: list[RecordedRequest]) -> ProviderView:
    """A view of one tenant's rows, and of the masks for the first group that it sent as rows or seeds.

    If the masks take more than ``MASK_BYTES``, the view holds only the first masks of each request, in
    proportion to the length of the request.
    """
    known = [r for r in requests if r.header.operation != Operation.PRODUCT]
    known = [r for r in known if r.kind[:2] == (0, Direction.FORWARD)]
    count = sum(request.header.rows for request in known)
    most = min(count, MASK_BYTES // (4 * public.manifest.groups[0].inputs))
    masks: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    passed = 0
    for request in known:
        before, passed = passed, passed + request.header.rows
        if share := passed * most // count - before * most // count:
            masks.setdefault(request.kind, []).append(_expanded(public, request, share))
    return ProviderView(
        public,
        [_seen(request) for request in products_of(requests)],
        {kind: torch.cat(masks.pop(kind)) for kind in list(masks)},
        count,
    )


def products_of(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """Those that carry rows of the model, not masks."""
    return [request for request in requests if request.header.operation == Operation.PRODUCT]


def mask_source_view(requests: list[RecordedRequest]) -> MaskSourceView:
    """Seeds as they came, but for those of half effects that were asked for again, with all bits."""
    halves: set[bytes] = set()
    seeds, again = [], 0
    for request in requests:
        if request.header.operation != Operation.SEED_EFFECT:
            continue
        if request.header.answer_bits == EXACT and request.payload in halves:
            again += 1
            continue
        if request.header.answer_bits < EXACT:
            halves.add(request.payload)
        seeds.append(request.payload)
    return MaskSourceView(seeds, len(requests) - len(seeds) - again)


def operations_of(transcripts: list[Transcript]) -> dict[str, int]:
    """How often each operation was asked for, by its name, by all tenants together."""
    return dict(Counter(Operation(r.header.operation).name for t in transcripts for r in t.requests))


def whole(requests: list[RecordedRequest], truth: GroundTruth) -> list[RecordedRequest]:
    """The pieces that a large request was sent in put together again, as anybody could who saw them."""
    joined: list[RecordedRequest] = []
    products, missing, last = iter(truth.sent), 0, 0
    for request in requests:
        if request.header.operation != Operation.PRODUCT:
            joined.append(request)
            continue
        if missing > 0:
            begun = joined[last]
            header = begun.header._replace(rows=begun.header.rows + request.header.rows)
            joined[last] = replace(
                begun, header=header, parts=begun.parts + request.parts, seconds=request.seconds
            )
        else:
            missing, last = getattr(next(products, None), "rows", 0), len(joined)
            joined.append(request)
        missing -= request.header.rows
    return joined


def check_aligned(view: View, truth: GroundTruth, what: str) -> None:
    """That view and truth tell of the same requests, group by group and row by row.

    Raises:
        AuditError: they do not, and nothing that was guessed could be scored.
    """
    seen, sent = (
        _rows_by_kind((each.group, each.direction, each.count) for each in side)
        for side in (view.requests, truth.sent)
    )
    for kind in sorted(seen.keys() | sent.keys()):
        recorded, real = seen.get(kind, []), sent.get(kind, [])
        if recorded != real:
            raise AuditError(
                f"what was recorded of {what} and what the tenant sent differ: {len(recorded)} requests of "
                f"{sum(recorded)} rows for group {kind[0]}, direction {kind[1]}, instead of {len(real)} of "
                f"{sum(real)}; attacks could not be scored"
            )


def _rows_by_kind(requests: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    rows_by_kind: dict[tuple[int, int], list[int]] = {}
    for group, direction, rows in requests:
        rows_by_kind.setdefault((group, int(direction)), []).append(rows)
    return rows_by_kind


def collusion_view(
    public: PublicModel, provider: list[RecordedRequest], *sources: list[RecordedRequest]
) -> CollusionView:
    """A view of a tenant's rows minus its masks, modulo 2^32, for each kind of product.

    The search skips masks that the tenant fetched and did not use. It recognizes the right mask by the small
    numbers of the row without it.

    Args:
        public: The adversary's copy of the checkpoint.
        provider: Requests of one tenant to the provider.
        sources: Requests to the mask source, of one tenant or of each of several tenants. The search begins
            with the tenants that requested few masks, so that a tenant with many masks does not hide those of
            others.
    """
    products = products_of(provider)
    kinds: dict[tuple[int, int, int, int], list[int]] = {}
    for number, request in enumerate(products):
        kinds.setdefault(request.stream, []).append(number)
    seen: dict[int, ObservedRequest] = {}
    for kind, numbers in kinds.items():  # the masks of all at once would fill the memory
        streams = [_Masks(public, [r for r in source if r.stream == kind]) for source in sources]
        streams.sort(key=len)
        for number in numbers:
            rows = products[number].rows
            for stream in streams:
                masks = stream.under(rows)
                if masks is not None:  # else they are under none of these masks
                    rows = rows - masks
                    break
            seen[number] = _seen(products[number], rows)
    return CollusionView(public, [seen[number] for number in range(len(products))])


class _Masks:
    """The masks of one kind that one tenant's requests to a mask source stand for, in their order."""

    def __init__(self, public: PublicModel, requests: list[RecordedRequest]) -> None:
        self._public, self._requests = public, requests
        self._starts = np.cumsum([0, *(request.header.rows for request in requests)])
        self._at = 0  # behind those that have served

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _heads(self) -> torch.Tensor:
        """A few numbers of each, for all of them would fill the memory: [K, HEAD]."""
        heads = [_expanded(self._public, r, r.header.rows)[:, :HEAD].clone() for r in self._requests]
        return torch.cat(heads)

    def under(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The masks of these rows, which begin at the first place at which the difference is small.

        None: they are under none of these masks, or ``FALSE_HEADS`` others look right at first.
        """
        if len(self) < self._at + len(rows):
            return None
        tried = 0
        for first in range(self._at, len(self), 1 << 16):
            heads = rows[0, :HEAD] - self._heads[first : first + (1 << 16)]
            for found in (first + (heads.float().abs().mean(1) < SMALL).nonzero()[:, 0]).tolist():
                tried += 1
                if tried > FALSE_HEADS:
                    return None
                if float((rows[0] - self._drawn(found, 1)[0]).float().abs().mean()) < SMALL:
                    if found + len(rows) > len(self):
                        return None
                    self._at = found + len(rows)
                    return self._drawn(found, len(rows))
        return None

    def _drawn(self, first: int, count: int) -> torch.Tensor:
        parts, end = [], first + count
        number = int(np.searchsorted(self._starts, first, "right")) - 1
        while first < end:
            some = min(end, int(self._starts[number + 1])) - first
            skip = first - int(self._starts[number])
            parts.append(_expanded(self._public, self._requests[number], some, skip))
            first, number = first + some, number + 1
        return torch.cat(parts)


def _expanded(public: PublicModel, request: RecordedRequest, count: int, skip: int = 0) -> torch.Tensor:
    """So many masks of a request, behind some."""
    header = request.header
    if header.operation != Operation.SEED_EFFECT:
        return request.some_rows(skip, count)
    shape = GroupShape.of(public.manifest.groups[header.group], public.manifest.numerics)
    columns = shape.widths(Direction(header.direction), header.members).request_columns
    return MaskStream(request.payload, 4 * columns * skip).draw(count, columns)
