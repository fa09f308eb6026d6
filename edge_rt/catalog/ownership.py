"""What root puts into a store of another user's is given to that user: the service must be able to add to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def give_to_owner(root: Path, *, euid: int | None = None) -> int:
    """Give what root has made below a store to whom the store belongs; give how many things that were.

    Does nothing for anybody but root, and in a store of root's own. The owner may be up to something: links are never
    followed, and a file with a second name is left alone.
    """
    if (os.geteuid() if euid is None else euid) != 0:
        return 0
    try:
        owner = os.lstat(root.resolve())
    except OSError:
        return 0
    if owner.st_uid == 0:
        return 0
    n_given = 0
    for _, directories, files, directory_fd in os.fwalk(root.resolve(), follow_symlinks=False):
        for name in (*directories, *files):
            found = os.lstat(name, dir_fd=directory_fd)
            is_plain = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
            if found.st_uid == 0 and is_plain:
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=directory_fd, follow_symlinks=False)
                n_given += 1
    return n_given
