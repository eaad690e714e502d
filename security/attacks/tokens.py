"""Attacks that recover the tenant's tokens from the rows of its first layer, with the public model.

The input of the first group depends on the token alone, so the provider can look it up; every attack
here is a way to get rid of a mask first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from security.attacks.base import TokenGuess, cosine, everything, nearest, unit
from security.views.adversaries import ObservedRequest, View
from security.views.public_model import PublicModel
from shared.ring.fixed_point import exponents, max_row_norm, quantize_rows
from shared.wire.header import Direction

DECIDING = 8  # numbers of a row that show whether a mask is the right one
TRIED = 1 << 26  # rows times masks: of more an attack takes fewer rows
AT_ONCE = 1 << 18  # of the same, so that what they leave stays in the processor's cache


class VocabularyMatching:
    """Look each row up among the inputs that the public model has for its tokens."""

    name: ClassVar[str] = "vocabulary matching"
    goal: ClassVar[str] = "tokens, from the inputs of the first layer"
    sees: ClassVar[str] = "rows"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = (
        "Thomas et al., Hidden No More, arXiv 2505.18332; Nikolaou et al., arXiv 2510.15511"
    )

    def attack(self, view: View, rng: np.random.Generator) -> TokenGuess:
        """See Attack."""
        return TokenGuess.nearest(everything(view), view.first, view.public.first_inputs)


class KnownMaskSubtraction:
    """Subtract the masks that this party multiplied itself, which is how the paper has it."""

    name: ClassVar[str] = "known-mask subtraction"
    goal: ClassVar[str] = "tokens, and the rows under the masks"
    sees: ClassVar[str] = "rows, and the masks whose effects it was asked for"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "Symbiosis, section 3.8: the base executor computes the noise effect"

    def attack(self, view: View, rng: np.random.Generator) -> TokenGuess:
        """See Attack."""
        masks = [mask for kind, mask in view.masks.items() if kind[:2] == (0, Direction.FORWARD)]
        rows = everything(view)
        if not masks:
            return TokenGuess.nearest(rows, view.first, view.public.first_inputs)
        known = torch.cat(masks) if len(masks) > 1 else masks[0]
        rows = rows[:: max(1, -(-len(rows) * len(known) // TRIED))]
        raw = view.first_raw[rows]
        left = (subtract_modular if raw.dtype == torch.int32 else subtract_scaled)(raw, known)
        return TokenGuess.nearest(rows, left, view.public.first_inputs)


def subtract_scaled(rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """``x`` from ``x + a n_k`` for known n_k: the tenant takes powers of two for a.

    Tried is each mask with the power of two nearest to the row's component along it; the right one
    leaves the least.
    """
    wide = rows.double()
    best, least = torch.zeros(len(rows), dtype=torch.int64), torch.full((len(rows),), torch.inf).double()
    scales = torch.zeros(len(rows)).double()
    for at, part in _parts(masks, len(rows)):
        part = part.double()
        products, lengths = wide @ part.T, part.square().sum(1)  # [N, K], [K]
        powers_of_two = (products / lengths).abs().clamp_min(1e-30).log2().round()
        for more in (-1, 0, 1):
            powers = torch.exp2(powers_of_two + more)
            # Of what is left the squared length, but for the row's own. A mask of zeros is none.
            norms = (powers * (powers * lengths - 2 * products)).nan_to_num(torch.inf)
            norm, which = norms.min(1)
            closer = norm < least
            best[closer], least[closer] = at + which[closer], norm[closer]
            scales[closer] = powers[closer, which[closer]]
    return rows.float() - scales.float()[:, None] * masks[best] if len(masks) else rows.float()


def subtract_modular(rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The row under one of several masks modulo 2^32: under the right one its numbers are small.

    The first few numbers tell: they are all as small as they must be under a wrong mask once in 2^50.
    """
    best, least = torch.zeros(len(rows), dtype=torch.int64), torch.full((len(rows),), torch.inf)
    first = rows[:, :DECIDING].contiguous()
    for at, part in _parts(masks[:, :DECIDING], len(rows)):
        norms = sum((first[:, None, i] - part[:, i]).float().square_() for i in range(part.shape[1]))
        norm, which = norms.min(1)  # type: ignore[union-attr]
        closer = norm < least
        best[closer], least[closer] = at + which[closer], norm[closer]
    return (rows - masks[best]).float() if len(masks) else rows.float()


def _parts(masks: torch.Tensor, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Masks with the number of the first, as many as are tried at once with so many rows."""
    step = max(1, AT_ONCE // max(1, rows))
    return ((at, masks[at : at + step]) for at in range(0, len(masks), step))


class MaskReuse:
    """Learn masks where the text is known, and use them where it is not.

    Every message begins with the same token, so what is left of its first row without that token's
    input is a mask. A row elsewhere is matched after the component along each learned mask is taken
    out, or on the ring after the mask is subtracted.

    Args:
        messages: how many messages to learn from; None: all.
        rows: how many rows to recover, drawn from all; None: all.
    """

    name: ClassVar[str] = "mask reuse"
    goal: ClassVar[str] = "tokens, from masks that serve twice"
    sees: ClassVar[str] = "rows; the first token of every message is known"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "the two-time pad; Symbiosis, section 3.8: a bank of noise, rotated"

    def __init__(self, messages: int | None = None, rows: int | None = None) -> None:
        self.messages, self.rows = messages, rows

    def attack(self, view: View, rng: np.random.Generator) -> TokenGuess:
        """See Attack."""
        requests = view.of(0)
        first_row = np.cumsum([0, *(seen.count for seen in requests)])[:-1]
        several = [i for i, seen in enumerate(requests) if seen.count > 1]
        begins = torch.from_numpy(first_row[several]).long()
        known = view.public.first_inputs[_first_token(view.public)]
        learned = begins[: self.messages]
        targets = torch.tensor(sorted(set(range(len(view.first))) - set(begins.tolist())), dtype=torch.int64)
        on_ring = view.first_raw.dtype == torch.int32
        most = len(targets) if self.rows is None else self.rows
        if on_ring:
            most = min(most, TRIED // max(1, len(learned)))
        if most < len(targets):
            targets = targets[torch.from_numpy(rng.choice(len(targets), most, replace=False))]
        if on_ring:
            estimates = self._ring(view, learned, targets, known)
            return TokenGuess.nearest(targets, estimates, view.public.first_inputs)
        return self._floats(view.first, learned, targets, known, view.public.first_inputs)

    @staticmethod
    def _ring(view: View, learned: torch.Tensor, targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        group = view.public.manifest.groups[0]
        assert group.bounds is not None
        max_norm = max_row_norm(group.bounds[0], group.inputs)
        integers = quantize_rows(known[None], exponents(known[None].double().norm(dim=1), max_norm))
        return subtract_modular(view.first_raw[targets], (view.first_raw[learned] - integers).unique(dim=0))

    @staticmethod
    def _floats(
        rows: torch.Tensor,
        learned: torch.Tensor,
        targets: torch.Tensor,
        known: torch.Tensor,
        table: torch.Tensor,
    ) -> TokenGuess:
        directions = _distinct(unit(rows[learned] - known))
        wanted = rows[targets]
        best = torch.full((len(wanted),), -torch.inf)
        tokens, estimates = torch.zeros(len(wanted), dtype=torch.int64), wanted.clone()
        match = torch.zeros(len(wanted))
        for direction in directions:
            left = wanted - (wanted @ direction)[:, None] * direction
            flat = table - (table @ direction)[:, None] * direction
            norms = left.square().sum(1)
            lengths = flat.square().sum(1)
            for part in torch.arange(len(wanted)).split(2048):
                # The squared distance to each token's input, with the mask's component left out of both.
                distance = norms[part, None] - 2 * left[part] @ flat.T + lengths
                closest, which = distance.min(1)
                closer = -closest > best[part]
                chosen = part[closer]
                best[chosen] = -closest[closer]
                tokens[chosen] = which[closer]
                estimates[chosen] = left[chosen]
                match[chosen] = cosine(left[chosen], flat[which[closer]])
        return TokenGuess(targets, tokens, estimates, match)


def _distinct(directions: torch.Tensor) -> torch.Tensor:
    """One of each among unit vectors that repeat up to rounding; 256 at most."""
    distinct: list[torch.Tensor] = []
    for direction in directions:
        if len(distinct) < 256 and not any(abs(float(direction @ other)) > 0.99 for other in distinct):
            distinct.append(direction)
    return torch.stack(distinct) if distinct else directions[:0]


def _first_token(public: PublicModel) -> int:
    return int(public.model.config.bos_token_id or 0)


class SubspaceProjection:
    """Masks from a bank span few dimensions: find those that stand out, and match tokens in the rest."""

    name: ClassVar[str] = "subspace projection"
    goal: ClassVar[str] = "tokens, from what masks of few dimensions leave"
    sees: ClassVar[str] = "rows"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "principal components; masks of Symbiosis, section 3.8, span at most K dimensions"

    def attack(self, view: View, rng: np.random.Generator) -> TokenGuess:
        """See Attack."""
        rows, table = view.first, view.public.first_inputs
        if not len(rows):
            return TokenGuess.nearest(everything(view), rows, table)
        # Against the directions in which the vocabulary itself varies, masks stand out.
        usual = unit(table)
        spread = usual.T @ usual / len(usual) + 1e-3 * torch.eye(table.shape[1]) * usual.var()
        root = torch.linalg.cholesky(spread.double()).float()
        whitened = torch.linalg.solve_triangular(root, unit(rows).T, upper=False).T
        values, vectors = torch.linalg.eigh((whitened.T @ whitened / len(rows)).double())
        count = int((values > 4 * values.median()).sum().clamp(max=table.shape[1] // 2))
        # Back from whitened directions to directions of rows.
        span = torch.linalg.qr(root.double() @ vectors[:, len(values) - count :]).Q.float()
        left = rows - rows @ span @ span.T
        flat = table - table @ span @ span.T
        return TokenGuess.nearest(everything(view), left, flat)


class Averaging:
    """The same prompt again and again: masks average out, the text does not.

    Args:
        repeats: which requests of the first group repeat each other; None: those that follow each other
            with the same number of rows.
    """

    name: ClassVar[str] = "averaging"
    goal: ClassVar[str] = "tokens of a prompt that is sent many times"
    sees: ClassVar[str] = "rows; which requests repeat one another"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "the law of large numbers"

    def __init__(self, repeats: list[list[int]] | None = None) -> None:
        self.repeats = repeats

    def attack(self, view: View, rng: np.random.Generator) -> TokenGuess:
        """See Attack."""
        requests = view.of(0)
        starts = [0, *np.cumsum([seen.count for seen in requests])]
        rows, means = [torch.empty(0, dtype=torch.int64)], [view.first[:0]]
        for run in self.repeats if self.repeats is not None else _runs(requests):
            if max(run) >= len(requests) or len({requests[i].count for i in run}) > 1:
                continue
            means.append(torch.stack([unit(requests[i].rows) for i in run]).mean(0))
            rows.append(torch.arange(starts[run[0]], starts[run[0] + 1]))
        mean = torch.cat(means)
        return TokenGuess.nearest(torch.cat(rows), mean, view.public.first_inputs)


def _runs(requests: list[ObservedRequest], least: int = 4) -> list[list[int]]:
    """Requests of several rows that follow each other with the same number of rows."""
    runs: list[list[int]] = []
    for i, seen in enumerate(requests):
        if runs and requests[runs[-1][-1]].count == seen.count:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [run for run in runs if len(run) >= least and requests[run[0]].count > 1]


class NoiseAware:
    """Estimate the noise from the rows, then match with its covariance instead of plain distance.

    The noise's covariance is what the rows' has beyond the vocabulary's; Mahalanobis distance under
    it, sharpened by how likely a token is in the rows decoded so far (expectation maximization).
    """

    name: ClassVar[str] = "noise-aware retrieval"
    goal: ClassVar[str] = "tokens, under noise of unknown parameters"
    sees: ClassVar[str] = "rows"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "BeamClean, arXiv 2505.13758; Mahalanobis, 1936"
    rounds = 4

    def attack(self, view: View, rng: np.random.Generator) -> TokenGuess:
        """See Attack."""
        rows, table = view.first, view.public.first_inputs
        if not len(rows):
            return TokenGuess.nearest(everything(view), rows, table)
        if view.first_raw.dtype == torch.int32:
            # Rows of a ring come each with a scale of its own: give them the vocabulary's.
            rows = unit(rows) * table.norm(dim=1).mean()
        floor = 1e-6 * table.double().var()
        tokens = nearest(rows, table)
        prior = torch.full((len(table),), 1 / len(table))
        for _ in range(self.rounds):
            residual = (rows - table[tokens]).double()
            sizes, directions = torch.linalg.eigh(residual.T @ residual / len(rows))
            root = (directions / sizes.clamp_min(floor).sqrt()).float()
            seen, known = rows @ root, table @ root
            lengths = known.square().sum(1) / 2 - prior.log()
            tokens = torch.cat([(part @ known.T - lengths).argmax(1) for part in seen.split(2048)])
            counts = torch.bincount(tokens, minlength=len(table)).float() + 0.1
            prior = counts / counts.sum()
        return TokenGuess(everything(view), tokens, rows, cosine(seen, known[tokens]))


class DeepMatching:
    """The same in the middle of the model, where rows depend on the whole prefix.

    For each place tokens are tried behind the prefix with the public model. The adversary is given the right
    prefix, as if it had found it already: in the clear it would have. Of a large vocabulary it is also given
    ``CANDIDATES`` tokens, of which one is right. This helps it; rows of all tokens at all places would take
    hours, and more than the memory.

    Args:
        group: whose inputs are matched.
        prompts: by the request's index among those of the group, the tokens that it was for.
        places: how many tokens of each prompt to look for.
    """

    name: ClassVar[str] = "search in hidden states"
    goal: ClassVar[str] = "tokens, from the inputs of a layer in the middle"
    sees: ClassVar[str] = "rows, and the tokens before each"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "Thomas et al., Hidden No More, arXiv 2505.18332"

    CANDIDATES = 2048

    def __init__(self, group: int, prompts: dict[int, torch.Tensor], places: int) -> None:
        self.group, self.prompts, self.places = group, prompts, places
        self._tables: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def attack(self, view: View, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses and the tokens that they are for: two [M]."""
        requests: list[ObservedRequest] = view.of(self.group)
        guesses: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
        wanted: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
        same: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in self.prompts.items():
            if index < len(requests) and requests[index].count == len(prompt):
                same.setdefault(tuple(prompt.tolist()), []).append(index)
        for tokens, indices in same.items():
            for place in range(1, min(len(tokens), self.places + 1)):
                rows = torch.stack([requests[i].rows[place] for i in indices])
                candidates, table = self._candidates(view.public, tokens[: place + 1], rng)
                guesses.append(candidates[nearest(rows, table)])
                wanted.append(torch.full((len(indices),), tokens[place]))
        return torch.cat(guesses), torch.cat(wanted)

    def _candidates(
        self, public: PublicModel, tokens: tuple[int, ...], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [K] in the last one's place, itself among them, and what the group would get: [K, D]."""
        if tokens not in self._tables:
            *prefix, wanted = tokens
            candidates = torch.arange(public.vocabulary)
            if public.vocabulary > self.CANDIDATES:
                others = candidates[candidates != wanted].numpy()
                some = rng.choice(others, self.CANDIDATES - 1, replace=False)
                candidates = torch.tensor(sorted([wanted, *some.tolist()]))
            self._tables[tokens] = candidates, public.next_inputs(self.group, prefix, candidates)
        return self._tables[tokens]
