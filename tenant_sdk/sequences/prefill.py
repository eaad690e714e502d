"""How many tokens of a prompt are read at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigurationError, Metavar
from shared.wire.messages import GroupInfo

# A pass over all groups costs the same round trips for any number of rows. So few rows waste them, and from
# some number on they are lost beside the products, while memory grows on.
MIN_CHUNK, MAX_CHUNK = 16, 4096
# Copies of a request's rows and answers that are there at once, of four bytes each: the layer's input, its
# integers, their mask and the bytes sent; the answer, the mask's effect, their difference and the output.
_INPUT_COPIES, _OUTPUT_COPIES = 4, 4
# Bytes for each token that a row may attend to: three masks of bool while they are joined, and one of float.
_MASK = 3 + 4
# Eager attention keeps scores of every head, their softmax in float32 and a copy in the model's dtype.
_EAGER = 4 + 4 + 4


@dataclass(frozen=True)
class Demand:
    """Bytes of memory that one token of a chunk takes besides its keys and values.

    Args:
        groups: the executor's; the widest of them decides.
        hidden: the model's width; about eight tensors of it are there at once.
        heads: attention heads if attention is computed eagerly, so that scores are kept; else 0.
        batch: sequences that are read at once.
        copies: bytes of a layer's keys and values that attention copies for every head; of the whole context,
            so however few tokens are read.
    """

    groups: Sequence[GroupInfo]
    hidden: int
    heads: int = 0
    batch: int = 1
    copies: int = 0

    def bytes_a_token(self, context: int) -> int:
        """With so many tokens to attend to."""
        widest = max((_width(group) for group in self.groups if not group.head), default=0)
        return self.batch * (4 * (widest + 8 * self.hidden) + context * (_MASK + _EAGER * self.heads))

    def chunk(self, memory: int, context: int) -> int:
        """Tokens to read at once: the most that so many bytes suffice for, by sixteens, at most 4,096.

        Larger chunks have fewer round trips, and keys and values are read again for every chunk.

        Raises:
            ConfigurationError: they do not suffice for 16.
        """
        fit = (memory - self.copies) // self.bytes_a_token(context) // MIN_CHUNK * MIN_CHUNK
        if fit < MIN_CHUNK:
            # Two digits suffice.
            needed = (MIN_CHUNK * self.bytes_a_token(context) + self.copies) / 2**30 * 1.05
            copied = (
                f" (keys and values copied for every head take {self.copies / 2**30:.2g} GiB, see "
                "docs/how-to/long-contexts.md)"
            )
            raise ConfigurationError(
                "{:.2g} GiB are not enough to read {} tokens of a prompt with a context of {:,}{}: give "
                "{memory_gib} or more, or a smaller context",
                *(memory / 2**30, MIN_CHUNK, context, copied if self.copies else ""),
                memory_gib=Metavar(f"{needed:.2g}"),
            )
        return min(fit, MAX_CHUNK)


def _width(group: GroupInfo) -> int:
    return _INPUT_COPIES * group.inputs + _OUTPUT_COPIES * sum(member.outputs for member in group.members)
