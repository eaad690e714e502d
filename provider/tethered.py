"""``symbiosis-provider`` for a process that starts another one: it ends when that does, however that ends."""

from __future__ import annotations

import os
import threading


def _end_with_the_parent() -> None:
    # Standard input is a pipe that the parent never writes to. An executor has no state that could be lost.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    from provider.cli import main

    main()
