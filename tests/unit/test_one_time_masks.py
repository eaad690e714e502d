"""One-time masks are used once by construction, and fetched ahead within their budget.

The sources are in memory, and honest unless a test says otherwise.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_sources import KEYS, SHAPES, Entropy, MemorySource, columns, product
from raw_peers import SECONDS, eventually

from shared.errors import ConfigurationError, ConnectionLost, RequestTimeout
from shared.ring.mask_stream import MaskStream
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import MIN_ROWS
from tenant_sdk.products.mask_store import CHUNK_ROWS
from tenant_sdk.products.masks import Mask
from tenant_sdk.products.one_time_masks import EFFECT_REQUESTS_AT_ONCE, PREFETCHES_IN_FLIGHT, OneTimeMasks

MIB = 1 << 20


@contextmanager
def one_time_masks(*sources: MemorySource, budget: int = MIB, seed: int = 0) -> Iterator[OneTimeMasks]:
    store = OneTimeMasks(SHAPES, list(sources), budget_bytes=budget, entropy=Entropy(seed))
    try:
        yield store
    finally:
        store.close()


def row_bytes(key: ProductKey) -> int:
    """Of an effect from one source."""
    return SHAPES[key.group].widths(key.direction, key.member_bits).answer_columns * 4


def effect_of(taken: Mask, key: ProductKey, rows: int) -> torch.Tensor:
    """What is to be taken off the answer, of all sources together: int32 [rows, 2 N]."""
    total = torch.zeros((rows, row_bytes(key) // 4), dtype=torch.int32)
    seen = 0
    for part, effects in taken.effects():
        assert part.start == seen
        seen = part.stop
        for effect in effects:
            total[part] += effect
    assert seen == rows
    return total


def in_store(store: OneTimeMasks, keys: list[ProductKey], rows: int) -> None:
    """Wait until effects of so many rows of each kind are there."""

    def there() -> bool:
        with store._changed:
            return store._in_flight == 0 and all(store._store.stock.get(key, 0) >= rows for key in keys)

    eventually(there)


def at_rest(store: OneTimeMasks) -> None:
    """Wait until nothing is in flight."""
    eventually(lambda: store._in_flight == 0)


def take(store: OneTimeMasks, key: ProductKey, rows: int) -> Mask:
    """The mask of a whole request."""
    taken = store.take(key, rows)
    store.record_request(key, rows)
    return taken


def use(store: OneTimeMasks, key: ProductKey, rows: int) -> torch.Tensor:
    """A whole request; its mask."""
    taken = take(store, key, rows)
    mask = taken.take_values()
    assert torch.equal(effect_of(taken, key, rows), product(key, mask))
    return mask


# -- once -----------------------------------------------------------------------------------------


def test_a_mask_hands_over_its_mask_once() -> None:
    with one_time_masks(MemorySource()) as store:
        taken = take(store, KEYS[0], 3)
        taken.take_values()
        with pytest.raises(RuntimeError, match="twice"):
            taken.take_values()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_mask_cannot_be_copied(again: Callable[[Any], Any]) -> None:
    """Or a copy would hand over the mask that has been handed over."""
    with one_time_masks(MemorySource()) as store:
        taken = take(store, KEYS[0], 3)
        with pytest.raises(TypeError, match="hand it over again"):
            again(taken)


def test_a_mask_exists_nowhere_once_rows_were_added() -> None:
    """The rows are added to the mask's own memory, and nothing else holds it or its seed."""
    source = MemorySource()
    with one_time_masks(source) as store:
        taken = take(store, KEYS[2], 13)  # a size of this test's own: tensors of others may still be about
        mask = taken.take_values()
        kept = mask.clone()
        mask += 1
        at_rest(store)  # the source has multiplied its own copy, and let go of it
        gc.collect()
        everywhere = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.int32]
        assert not any(o is not kept and o.shape == kept.shape and torch.equal(o, kept) for o in everywhere)
        (seed,) = {request.seed for request in source.requests if request.key == KEYS[2]}
        source.requests.clear()
        assert not any(o is not seed and o == seed for o in gc.get_objects() if type(o) is bytes)


KEY_AND_ROWS = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 9))
WORK = st.lists(st.lists(KEY_AND_ROWS, max_size=8), min_size=1, max_size=4)


@settings(max_examples=40)
@given(work=WORK, budget=st.sampled_from([0, 700, 20_000, MIB]), limit=st.sampled_from([1, 3, 1000]))
def test_no_stretch_of_a_key_stream_serves_twice(
    work: list[list[tuple[int, int]]], budget: int, limit: int
) -> None:
    """Threads take what they like: every row is a row of one seed's expansion, each of them at most
    once, with its own effect, and every seed has one request."""
    source = MemorySource(limit)

    def run(requests: list[tuple[int, int]]) -> list[tuple[ProductKey, torch.Tensor, torch.Tensor]]:
        done = []
        for index, rows in requests:
            key = KEYS[index]
            taken = take(store, key, rows)
            done.append((key, taken.take_values(), effect_of(taken, key, rows)))
        return done

    with one_time_masks(source, budget=budget) as store, ThreadPoolExecutor(len(work)) as threads:
        results = [each for future in [threads.submit(run, one) for one in work] for each in future.result()]
    assert len({request.seed for request in source.requests}) == len(source.requests)
    expansions: dict[tuple[ProductKey, bytes], tuple[bytes, int]] = {}
    for request in source.requests:
        drawn = MaskStream(request.seed).draw(request.rows, columns(request.key))
        for at, row in enumerate(drawn):
            expansions[request.key, row.numpy().tobytes()] = request.seed, at
    used = []
    for key, masks, effects in results:
        assert torch.equal(effects, product(key, masks))
        used += [expansions[key, row.numpy().tobytes()] for row in masks]
    assert len(set(used)) == len(used) == sum(rows for one in work for _, rows in one)


@settings(max_examples=15)
@given(work=WORK, budget=st.sampled_from([0, 2000, MIB]), limits=st.tuples(*[st.integers(1, 5)] * 2))
def test_several_sources_have_seeds_of_their_own(
    work: list[list[tuple[int, int]]], budget: int, limits: tuple[int, int]
) -> None:
    """The mask is the sum of what each expands to, and no source's part alone."""
    sources = [MemorySource(limit) for limit in limits]
    with one_time_masks(*sources, budget=budget) as store:
        masks = [use(store, KEYS[i], rows) for one in work for i, rows in one]
        at_rest(store)
    seeds = [{request.seed for request in source.requests} for source in sources]
    assert not seeds[0] & seeds[1]
    asked = [sorted((request.key, request.rows) for request in source.requests) for source in sources]
    assert asked[0] == asked[1]
    alone = {
        row.numpy().tobytes()
        for source in sources
        for request in source.requests
        for row in MaskStream(request.seed).draw(request.rows, columns(request.key))
    }
    rows = [row.numpy().tobytes() for mask in masks for row in mask]
    assert len(set(rows)) == len(rows)
    assert not set(rows) & alone


def test_rows_of_an_effect_that_failed_are_given_to_nobody() -> None:
    """A mask whose effect does not come fails; the next one has a fresh mask."""
    source = MemorySource()
    with one_time_masks(source) as store:
        source.error = RequestTimeout("no answer")
        failed = take(store, KEYS[0], 2)
        lost = failed.take_values()
        for _ in range(2):
            with pytest.raises(RequestTimeout, match="no answer"):
                effect_of(failed, KEYS[0], 2)
        source.error = None
        masks = [use(store, KEYS[0], 2) for _ in range(3)]
    assert not any(torch.equal(row, other) for row in lost for mask in masks for other in mask)


def test_an_interrupted_draw_spoils_its_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a mask is drawn: nobody can say how far the key stream went, and so which effects are
    the next rows'. A tenant that goes on in the same session gets another chunk."""
    source, draw = MemorySource(), MaskStream.draw

    def interrupted(self: MaskStream, rows: int, columns: int) -> torch.Tensor:
        draw(self, rows, columns)
        raise KeyboardInterrupt

    key = KEYS[2]
    with one_time_masks(source) as store:
        for _ in range(6):
            use(store, key, 2)
        in_store(store, [key], 10)
        with monkeypatch.context() as patch:
            patch.setattr(MaskStream, "draw", interrupted)
            with pytest.raises(KeyboardInterrupt):
                take(store, key, 2)
        for _ in range(5):
            use(store, key, 2)
        with store._changed:
            assert store._store.stock[key] == sum(chunk.remaining for chunk in store._store._chunks[key])


def test_a_mask_across_several_requests() -> None:
    source = MemorySource(limit=4)
    with one_time_masks(source, budget=0) as store:
        use(store, KEYS[3], 3)
        use(store, KEYS[3], 11)
    assert [request.rows for request in source.requests] == [3, 4, 4, 3]


def test_a_forked_process_gets_no_masks() -> None:
    """It would continue the same key streams as its parent, and so use masks twice."""
    with one_time_masks(MemorySource()) as store:
        use(store, KEYS[0], 1)
        use(store, KEYS[0], 1)
        at_rest(store)
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads
            child = os.fork()
        if child == 0:
            told = b"a mask"
            try:
                take(store, KEYS[0], 1)
            except ConnectionLost:
                told = b"refused"
            except BaseException as error:
                told = repr(error).encode()
            finally:
                os.write(write, told)
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1000) == b"refused"
        os.close(read)
        os.close(write)
        use(store, KEYS[0], 1)


def test_at_least_one_source() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        OneTimeMasks(SHAPES, [], budget_bytes=0, entropy=Entropy())


# -- ahead ----------------------------------------------------------------------------------------


def test_effects_of_a_round_that_repeats_are_there_before_they_are_asked_for() -> None:
    source = MemorySource()
    with one_time_masks(source) as store:
        for _ in range(2):
            for key in KEYS:
                use(store, key, 1)
        in_store(store, KEYS, 3)
        source.gate.clear()  # from here on nothing can be fetched
        for _ in range(3):
            for key in KEYS:
                use(store, key, 1)
        source.gate.set()


def test_one_request_serves_many_rows_of_decoding() -> None:
    source = MemorySource()
    steps = 200
    with one_time_masks(source) as store:
        for step in range(steps):
            for key in KEYS:
                use(store, key, 1)
            if step > 0:
                in_store(store, KEYS, 1)
    # The first two cycles, chunks that grow from four rows on, then whole ones.
    requested = sum(request.rows for request in source.requests)
    assert len(source.requests) <= (3 + 6) * len(KEYS) + requested / CHUNK_ROWS


def test_a_few_tokens_fetch_for_a_few_tokens() -> None:
    source, steps = MemorySource(), 8
    with one_time_masks(source) as store:
        for _ in range(steps):
            for key in KEYS:
                use(store, key, 1)
        eventually(lambda: store.idle)
    assert sum(request.rows for request in source.requests) <= (3 * steps + MIN_ROWS) * len(KEYS)


@pytest.mark.parametrize("budget", [1000, 10_000, 300_000])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_the_budget_is_kept(budget: int, rows: int) -> None:
    """In bytes of effects that are requested and not used."""
    sources = MemorySource(), MemorySource()
    used = 0
    with one_time_masks(*sources, budget=budget) as store:
        for _ in range(6):
            for key in KEYS:
                use(store, key, rows)
                used += 2 * rows * row_bytes(key)
                at_rest(store)
                requested = [request for source in sources for request in source.requests]
                assert 0 <= sum(r.rows * row_bytes(r.key) for r in requested) - used <= budget


def test_memory_follows_the_budget() -> None:
    """Effects that are really alive: the budget, and the used rows of one chunk of each kind."""
    alive: list[weakref.ref[torch.Tensor]] = []
    budget = 100_000

    class Watched(MemorySource):
        def seed_effect(self, *arguments: Any) -> torch.Tensor:
            effect = super().seed_effect(*arguments)
            alive.append(weakref.ref(effect))
            return effect

    with one_time_masks(Watched(), budget=budget) as store:
        for _ in range(150):
            for key in KEYS:
                use(store, key, 1)
            at_rest(store)
            living = [effect for ref in alive if (effect := ref()) is not None]
            assert sum(effect.nbytes for effect in living) <= 1.5 * budget
            del living


@pytest.mark.parametrize("budget", [0, 10])
def test_too_small_a_budget_works_on_demand(budget: int, caplog: pytest.LogCaptureFixture) -> None:
    """And says once what it would take; a budget of zero is what somebody chose."""
    source = MemorySource()
    with caplog.at_level(logging.WARNING), one_time_masks(source, budget=budget) as store:
        for _ in range(4):
            for key in KEYS:
                use(store, key, 50)
            at_rest(store)
    assert [request.rows for request in source.requests] == [50] * 4 * len(KEYS)
    warnings = [record.message for record in caplog.records]
    if budget:
        (warning,) = warnings
        assert "of 50 rows" in warning
        needed = float(warning.partition("which take ")[2].split()[0])
        assert needed == pytest.approx(50 * row_bytes(KEYS[1]) / MIB, abs=0.05)
    else:
        assert not warnings


def test_a_source_that_fails_is_not_asked_on_and_on() -> None:
    source = MemorySource()
    takes = 30
    with one_time_masks(source) as store:
        for _ in range(2):
            for key in KEYS:
                use(store, key, 1)
        at_rest(store)
        before = len(source.requests)
        source.error = ConnectionLost("gone")
        failures = 0
        for at in range(takes * CHUNK_ROWS):
            taken = take(store, KEYS[at % len(KEYS)], 1)
            try:
                effect_of(taken, KEYS[at % len(KEYS)], 1)
            except ConnectionLost:
                failures += 1
            if failures == takes:
                break
        assert failures == takes
        at_rest(store)
        # What a request needs, and what was in flight besides, for each of them.
        assert len(source.requests) - before <= (takes + len(KEYS) * CHUNK_ROWS) * (1 + PREFETCHES_IN_FLIGHT)
        asked = len(source.requests)
        source.error = None
        for at in range(3 * CHUNK_ROWS * len(KEYS)):  # and it is asked again when what is there is used up
            use(store, KEYS[at % len(KEYS)], 1)
        assert len(source.requests) > asked


def test_another_habit_is_fetched_ahead_although_the_store_is_full_of_the_old() -> None:
    """From training to decoding: gradients' effects are of no more use, and must make room."""
    source = MemorySource()
    decoding = KEYS[2:4]
    training = [key for key in KEYS if key not in decoding]
    budget = 64 * sum(row_bytes(key) for key in training)
    with one_time_masks(source, budget=budget) as store:
        for _ in range(2):
            for key in training:
                use(store, key, 60)
        in_store(store, training, 60)
        for _ in range(2):
            for key in decoding:
                use(store, key, 1)
        in_store(store, decoding, 1)
        source.gate.clear()
        for key in decoding:
            use(store, key, 1)
        source.gate.set()


# -- the end --------------------------------------------------------------------------------------


def mask_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("symbiosis-mask")]


def test_closing_ends_every_thread_also_in_flight() -> None:
    eventually(lambda: not mask_threads())
    sources = MemorySource(), MemorySource()
    with one_time_masks(*sources) as store:
        for _ in range(2):
            for key in KEYS:
                use(store, key, 1)
        for source in sources:
            source.gate.clear()
        waiting = [take(store, KEYS[0], 200) for _ in range(2 * PREFETCHES_IN_FLIGHT)]  # also behind others
        assert mask_threads()
    assert all(source.closed for source in sources)
    eventually(lambda: not mask_threads())
    for taken in waiting:
        with pytest.raises(ConnectionLost):
            effect_of(taken, KEYS[0], 200)


def test_a_closed_session_has_no_more_masks() -> None:
    with one_time_masks(MemorySource()) as store:
        use(store, KEYS[0], 1)
    with pytest.raises(ConnectionLost, match="closed"):
        take(store, KEYS[0], 1)


HALF = KEYS[2]._replace(answer_bits=16)


def test_effects_of_a_closed_session_are_not_asked_for_again() -> None:
    """Another thread's product may have ended the session while this one's answer was on its way."""
    source = MemorySource()
    with one_time_masks(source) as store:
        taken = store.take(HALF, 3)
        at_rest(store)
    with pytest.raises(ConnectionLost, match="closed"):
        taken.exact_effects()


def test_closing_ends_the_wait_for_effects_that_were_asked_for_again() -> None:
    source = MemorySource()
    with one_time_masks(source) as store, ThreadPoolExecutor(1) as thread:
        taken = store.take(HALF, 3)
        at_rest(store)
        source.gate.clear()
        for _ in range(EFFECT_REQUESTS_AT_ONCE):  # so that what is asked for again waits for its turn
            store.take(KEYS[0], 1)
        asked = thread.submit(taken.exact_effects)
        eventually(lambda: store._pools[0]._work_queue.qsize() == 1)
        store.close()
        with pytest.raises(ConnectionLost, match="closed"):
            asked.result(SECONDS)
