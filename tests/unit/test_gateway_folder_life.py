"""What a gateway leaves on the disk, and when it goes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tenant_sdk.gateway.admission import SequenceLimit
from tenant_sdk.gateway.serving import FOLDER_MARK, FOLDER_PREFIX, remove_abandoned_folders
from tenant_sdk.gateway.status import SequenceErrors
from tenant_sdk.gateway.unused_copies import UnusedCopies


def test_reasons_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    """All clients' steps would end with them, if the disk is full."""
    errors = SequenceErrors()
    assert errors.add(tmp_path / "gone", {"a.1": "too long"}) == (
        f"cannot write to {tmp_path / 'gone'}: No such file or directory"
    )
    assert errors.add(tmp_path, {"b.2": "too slow"}) == ""
    assert SequenceErrors.reason(tmp_path, "a.1") == "too long"


def test_a_copy_goes_when_the_requests_that_may_use_it_are_gone() -> None:
    sequence_limit = SequenceLimit(9)
    copies, old, new = UnusedCopies(sequence_limit), Path("old"), Path("new")

    def enter() -> int:
        assert sequence_limit.enter("", 1) is None
        return sequence_limit.period

    first = enter()
    assert copies.removable([old], {old}) == []
    assert copies.removable([old, new], {new}) == []
    later = enter()  # while others come and go without a pause
    for _ in range(9):
        assert copies.removable([old, new], {new}) == []
    sequence_limit.leave("", 1, 1.0, first)
    assert copies.removable([old, new], {new}) == []  # the worker may not know yet
    assert copies.removable([old, new], {new}) == [old]
    assert copies.removable([new], {new}) == []
    sequence_limit.leave("", 1, 1.0, later)
    # Idle; and one that a name had again within a period.
    assert copies.removable([new], set()) == []
    copies.used_again(new)
    last = enter()
    for _ in range(9):
        assert copies.removable([new], set()) == []
    sequence_limit.leave("", 1, 1.0, last)
    assert [copies.removable([new], set()) for _ in range(2)] == [[], [new]]


def test_folders_of_gateways_that_were_killed_are_removed(tmp_path: Path) -> None:
    """At once, and no folder that has such a name by chance."""
    killed, used, adapters, linked, other = (
        tmp_path / f"{prefix}{name}"
        for prefix, name in [
            *((FOLDER_PREFIX, each) for each in ("killed", "used", "adapters", "linked")),
            ("", "x"),
        ]
    )
    for each in (killed, used, adapters, other):
        each.mkdir()
        (each / "adapter").write_text("weights")
        if each != adapters:
            (each / FOLDER_MARK).touch()
    linked.symlink_to(other)
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as ``serve`` does
    remove_abandoned_folders(tmp_path)
    os.close(descriptor)
    assert set(tmp_path.iterdir()) == {used, adapters, linked, other}
    assert (adapters / "adapter").exists()
    assert (other / "adapter").exists()
