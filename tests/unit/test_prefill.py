"""How many tokens of a prompt are read at once."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.sequences.prefill import MAX_CHUNK, MIN_CHUNK, Demand

GIB = 2**30


def demand(
    inputs: int = 4096, outputs: int = 22016, heads: int = 0, batch: int = 1, copies: int = 0
) -> Demand:
    group = GroupInfo(inputs, (Member("up", outputs, "up.weight"),))
    head = GroupInfo(inputs, (Member("head", 10**6, "head.weight"),), head=True)
    return Demand([head, group], inputs, heads, batch, copies)


def test_a_layer_of_llama_2_7b() -> None:
    """Half a MiB of rows and answers a token, and 0.7 MB of masks with 100,000 tokens."""
    assert demand().bytes_a_token(0) == 4 * (4 * 4096 + 4 * 22016 + 8 * 4096)
    assert demand().chunk(GIB, 100_000) == 848
    assert demand().chunk(16 * GIB, 100_000) == MAX_CHUNK


@given(
    st.integers(1, 2**14), st.integers(1, 2**15), st.integers(0, 64), st.integers(1, 8), st.integers(1, 10**6)
)
def test_a_chunk_fits(inputs: int, outputs: int, heads: int, batch: int, context: int) -> None:
    needs = demand(inputs, outputs, heads, batch)
    try:
        chunk = needs.chunk(GIB, context)
    except ConfigurationError:
        assert MIN_CHUNK * needs.bytes_a_token(context) > GIB
        return
    assert MIN_CHUNK <= chunk <= MAX_CHUNK
    assert chunk % MIN_CHUNK == 0
    assert chunk * needs.bytes_a_token(context) <= GIB
    assert needs.chunk(2 * GIB, context) >= chunk


def test_scores_and_sequences_count() -> None:
    assert demand(heads=32).chunk(GIB, 8192) < demand().chunk(GIB, 8192)
    assert demand(batch=4).chunk(GIB, 8192) <= demand().chunk(GIB, 8192) // 4


def test_too_little_memory_says_how_much() -> None:
    with pytest.raises(ConfigurationError, match="give memory_gib="):
        demand().chunk(1000, 4096)


def test_copies_for_every_head_leave_less_for_rows() -> None:
    """They are there once, however many tokens are read."""
    assert demand(copies=GIB // 2).chunk(GIB, 8192) == demand().chunk(GIB // 2, 8192)
    with pytest.raises(ConfigurationError, match=r"for every head take 2 GiB.*give memory_gib=2\.\d"):
        demand(copies=2 * GIB).chunk(GIB, 8192)


def test_the_memory_that_is_named_is_enough() -> None:
    for needs in (demand(copies=12345678), demand(heads=7), demand(inputs=1000, outputs=3000)):
        with pytest.raises(ConfigurationError) as refused:
            needs.chunk(1000, 40_000)
        named = re.search(r"memory_gib=([\d.e-]+) ", str(refused.value))
        assert named is not None
        assert needs.chunk(int(float(named[1]) * GIB), 40_000) == MIN_CHUNK
