"""``symbiosis-provider`` for a process that starts another one: it ends when that does, however that ends."""

from __future__ import annotations

from provider.workers.rank import end_with_the_parent

if __name__ == "__main__":
    end_with_the_parent()  # an executor has no state that could be lost
    from provider.cli import main

    main()
