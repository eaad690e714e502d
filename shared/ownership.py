"""Files that say whom to trust: nobody but their user and the system may be able to change them.

Profiles, files of options, tokens, keys, authorities and fingerprints. Of each the whole way counts: a folder
above it, or a link, that somebody else can replace leads to another file.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigurationError

MAX_LINKS = 40  # as Linux follows
SYSTEM = 0  # the user who can change everything anyway, and who owns what Kubernetes mounts


def check_own(path: str | Path) -> None:
    """Refuse a file that others than this user and the system could change, or put another in its place.

    In a folder like ``/tmp``, where everybody may write and nobody may take away what is another's, it must
    be the user's own. A file that cannot be found, or a pipe, is left to its reader, unless somebody else may
    make one of its name before it is read.

    Raises:
        ConfigurationError: which part of the way it is, who could change it, and what to do.
    """
    place = Path("/")
    try:
        for place in _way(Path(path)):
            _check_place(path, place)
    except FileNotFoundError:
        if _others_write(place.parent, place.parent.stat()):
            raise ConfigurationError(
                f"there is no {path}, and others can make one: {place.parent} is open to them"
            ) from None
    except OSError as error:
        if isinstance(error, NotADirectoryError) or error.errno in (None, errno.ELOOP):
            return  # its reader meets the same, and says what could not be read
        # A reader that begins at another folder may find it all the same.
        raise ConfigurationError(
            f"{path} is refused: a folder on its way cannot be looked at ({error.strerror}). Put a copy "
            "into a folder of your own"
        ) from error


def check_tree(folder: str | Path) -> None:
    """``check_own`` of a folder that this program writes into, and of all that is in it; it holds no links.

    One that is not there is fine: check it again once it is made. A link there, of another user or out of an
    archive, would have another file written over.

    Raises:
        ConfigurationError: which part of it, and what to do.
    """
    if not os.path.lexists(folder):
        return
    check_own(folder)
    for place in Path(folder).rglob("*"):
        if place.is_symlink():
            raise ConfigurationError(
                f"{folder} is refused: {place} is a link, and what is written there would go elsewhere. "
                "Remove it, or name another folder"
            )
        if not (place.is_file() or place.is_dir()):
            raise ConfigurationError(f"{folder} is refused: {place} is no file and no folder. Remove it")
        _check_place(place, place)


def check_secret(path: str | Path, what: str, *, group: bool = False) -> None:
    """``check_own``, and refuse a file with a secret that others can read.

    Args:
        what: it holds.
        group: its group may read it; that of a file of the system always may, which is how it is given to us.

    Raises:
        ConfigurationError: others can read or change it.
        OSError: it cannot be found.
    """
    check_own(path)
    state = os.stat(path)
    group_may_read = group or (state.st_uid == SYSTEM != os.geteuid())
    if state.st_mode & (stat.S_IRWXO if group_may_read else stat.S_IRWXO | stat.S_IRWXG):
        raise ConfigurationError(f"others can read {path}, which holds {what}: `chmod 600 {path}`")


def user_name(number: int) -> str:
    """What a user is called, also one without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _way(path: Path) -> Iterator[Path]:
    """Every folder, link and file that a path leads through, from the root on, without detours."""
    left, at, links = deque(path.absolute().parts), Path("/"), 0
    while left:
        name = left.popleft()
        if name == "..":
            at = at.parent
            continue
        place = at / name
        yield place
        if not place.is_symlink():
            at = place
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError("too many links")
        left.extendleft(reversed(place.readlink().parts))


def _check_place(path: str | Path, place: Path) -> None:
    """Of the way to ``path``."""
    state = place.lstat()
    if state.st_uid not in (os.geteuid(), SYSTEM):
        raise ConfigurationError(
            f"{path} is refused: {place} belongs to {user_name(state.st_uid)}, who could change it, "
            f"and you are {user_name(os.geteuid())}. Put a copy of your own into a folder of your own"
        )
    sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX  # what is in it is looked at too
    if not stat.S_ISLNK(state.st_mode) and not sticky and _others_write(place, state):
        raise ConfigurationError(
            f"{path} is refused: others can write to {place}. If all that is in it is yours: `chmod "
            f"go-w {place}`; or put a copy into a folder that only you can write to"
        )


def _others_write(place: Path, state: os.stat_result) -> bool:
    """Whether anybody but the owner can; a group that is the user's own does not count."""
    if state.st_mode & stat.S_IWOTH:
        return True
    # With a list of access rights these bits are those of everybody in it, not of the group alone.
    return bool(state.st_mode & stat.S_IWGRP) and (_has_list(place) or not _is_private(state.st_gid))


def _has_list(place: Path) -> bool:
    """Whether a file has a POSIX access control list."""
    try:
        return bool(os.getxattr(place, "system.posix_acl_access"))
    except (OSError, AttributeError):  # none, or a system without
        return False


def _is_private(group: int) -> bool:
    """Whether a group is the one that some systems make for each user, with nobody else in it."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    private = (user.pw_gid, user.pw_name) == (group, found.gr_name) and set(found.gr_mem) <= {user.pw_name}
    return private and all(each.pw_uid == user.pw_uid for each in pwd.getpwall() if each.pw_gid == group)
