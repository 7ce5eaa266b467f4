"""A process that writes, replaces and deletes entries in a shared folder until it is killed. Run by the tests.

python writer.py FOLDER BUDGET SEED
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvboost_rag.stores import DiskStore
from tests.stores.conftest import build_entry, build_record, check_of, same


def main() -> None:
    folder, budget, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    store = DiskStore(folder, budget)
    print("ready", flush=True)
    while True:
        number = rng.randrange(30)
        entry = build_entry(number)
        action = rng.random()
        if action < 0.7:
            store.catalog.add(build_record(number))
            store.put(entry)
        elif action < 0.8:
            store.delete(entry.key)
        else:
            found = store.get(entry.key, check_of(entry))
            if found is not None and not same(found, entry):
                print("wrong", entry.key, flush=True)
        if store.stats.rejected.keys() - {"vanished"}:
            print("rejected", dict(store.stats.rejected), flush=True)


if __name__ == "__main__":
    main()
