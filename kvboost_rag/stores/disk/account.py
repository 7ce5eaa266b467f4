"""A disk store's account: which files it holds, how many bytes they take, and which one goes when room is short."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvboost_rag.stores.base import EntryInfo
from kvboost_rag.stores.catalog.catalog import Catalog
from kvboost_rag.stores.catalog.database import StoreBusyError, StoreError, waiting_at_most
from kvboost_rag.stores.disk import recovery
from kvboost_rag.stores.disk.file_table import FileTable, Reservation
from kvboost_rag.stores.disk.folder import StoreFolder
from kvboost_rag.stores.eviction import EvictionPolicy

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

SAVE_USES_AFTER_S = 60.0
"""Use counts are written down at least this often while entries are used."""

ROOMY = 0.9
"""Up to this part of the budget a process keeps what it had reserved for its next file (`DiskAccount.reserve`)."""


class DiskAccount:
    """Rows, files and eviction of one folder, kept in step.

    Every change of the set of files happens inside a transaction of the catalog's database, which one process at a
    time can hold: so the sum of bytes is exact for all of them. Each process evicts by the uses that it knows of, its
    own and those that others had written down when it opened the folder.

    Where there is room, the bytes that were set aside for one file stay set aside for the next: storing takes one
    transaction then, not two. `release_allowance` gives them back.

    Args:
        pinned: keys that are never evicted; the store's own collection, which may change.
        evictions: the store's counter of removed entries by reason.
        lock: the store's. Taken before the database's, always in this order.
        secret: files that are entered must be signed with it.
    """

    def __init__(
        self,
        folder: StoreFolder,
        catalog: Catalog,
        policy: EvictionPolicy,
        budget_bytes: int,
        pinned: Container[str],
        evictions: Counter[str],
        lock: threading.RLock,
        secret: bytes | None,
    ) -> None:
        self.table = FileTable(catalog.database)
        self._folder, self._catalog, self._policy = folder, catalog, policy
        self._budget_bytes = budget_bytes
        self._pinned, self._evictions, self._lock = pinned, evictions, lock
        self._secret = secret
        self._used: set[str] = set()
        self._uses_saved = time.monotonic()
        self._unsettled: list[Reservation] = []
        self._allowance: Reservation | None = None
        self._pid = os.getpid()
        self._last_seq = 0

    def open(self) -> None:
        """Rebuild a catalog that is new, clear up after processes that died, and fit into the budget."""
        if self.table.database.is_new:
            # Its version is committed with its rows: killed before, the next one rebuilds it from the beginning.
            with self.table.database.transaction():
                recovery.rebuild(self._folder, self.table, self._catalog, self._secret)
                self.table.database.finish_creation()
        if num_damaged := self.table.drop_damaged():
            logger.error("%d damaged rows of files in %s are dropped", num_damaged, self._folder.root)
            recovery.reconcile(self._folder, self.table, self._catalog, self._secret)
        self.clear_after_dead_owners()
        with self._changing():
            self._learn_of_new_files()
            self._make_room(0)

    def reserve(self, key: str, num_bytes: int) -> tuple[Reservation | None, str | None]:
        """Make room for a file of `num_bytes` and set that aside, or say why not (`too_large`, `pinned`)."""
        if num_bytes > self._budget_bytes:
            return None, "too_large"
        with self._lock:
            self._settle_failed_writes()
            held, self._allowance = self._allowance, None
            if self._pid != os.getpid():  # forked: it is the parent's
                held, self._pid = None, os.getpid()
        if held is not None and held.num_bytes >= num_bytes:
            return replace(held, key=key), None
        with self._changing():
            if held is not None:
                self.table.release(held)
            return self._reserve(key, num_bytes)

    def _reserve(self, key: str, num_bytes: int) -> tuple[Reservation | None, str | None]:
        self._learn_of_new_files()
        for expired in self._policy.expired():
            self.drop(expired, "expired")
        total, some_more = self.table.total_bytes(), num_bytes + num_bytes // 8
        if total + some_more <= ROOMY * self._budget_bytes:
            return self.table.reserve(self._folder.owner, "", some_more), None
        if total + num_bytes > self._budget_bytes and self.table.bytes_of(key) is not None:
            self.drop(key, None)
        if not self._make_room(num_bytes):
            return None, "pinned"
        return self.table.reserve(self._folder.owner, key, num_bytes), None

    def publish(
        self, staged: Path, info: EntryInfo, reservation: Reservation, is_wanted: Callable[[], bool]
    ) -> str | None:
        """Give a staged file its name and its row, or say why not (`context`: asked in the same transaction, it is not
        wanted any more). Raises OSError or StoreError: call `fail` then.
        """
        with self._changing():
            self._learn_of_new_files()
            if not is_wanted():
                self.table.release(reservation)
                staged.unlink(missing_ok=True)
                return "context"
            self._folder.publish(staged, info.key)
            self._last_seq = self.table.add(info)
            self._policy.add(info.key, info.num_bytes)
            if self._allowance is None and self.table.total_bytes() <= ROOMY * self._budget_bytes:
                self._allowance = reservation
            else:
                self.table.release(reservation)
            return None

    def release_allowance(self) -> None:
        """Give back what is set aside for the next file."""
        with self._lock:
            held, self._allowance = self._allowance, None
        if held is not None:
            self.table.release(held)

    def fail(self, reservation: Reservation) -> None:
        """A write failed somewhere: what has become of it is settled before the next one."""
        with self._lock:
            self._unsettled.append(reservation)

    def drop(self, key: str, reason: str | None) -> bool:
        """Delete a file and its row; whether there was one. The file first: a row too many does no harm.

        Raises:
            StoreError: the file cannot be removed.
        """
        try:
            with self._changing():
                had_file = self._folder.remove(key)
                had_row = self.table.remove(key)
                self._policy.remove(key)
        except (OSError, StoreError) as error:
            if self._folder.size(key) is not None:
                raise StoreError(f"cannot delete {key[:16]} from {self._folder.root}: {error}") from error
            # On a full disk the file can go although its row cannot; the row follows as soon as there is room.
            self.fail(Reservation(0, self._folder.owner, key, 0))
            self._folder.spare.give_up()
            with suppress(StoreError):
                self._settle_failed_writes()
            had_file = True
        if reason is not None and (had_file or had_row):
            self._evictions[reason] += 1
        return had_file or had_row

    def disown(self, key: str) -> bool:
        """Forget a file that turned out to be somebody else's, and leave it where it is; whether it was accounted."""
        with self._changing():
            self._policy.remove(key)
            return self.table.remove(key)

    def knows(self, key: str) -> bool:
        """Whether this process knows of a file of that key."""
        with self._lock:
            return key in self._policy.entries

    def is_expired(self, key: str) -> bool:
        """Whether the entry must not be served any more."""
        with self._lock:
            return self._policy.is_expired(key)

    def note_use(self, key: str) -> None:
        """An entry was used."""
        with self._lock:
            if key not in self._policy.entries:
                self._learn_of_new_files()
            self._policy.hit(key)
            self._note_changed(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        """An entry's deviation was measured."""
        with self._lock:
            self._policy.note_deviation(key, deviation)
            self._note_changed(key)

    def info_with_use(self, info: EntryInfo) -> EntryInfo:
        """`info` with the last use that this process knows of."""
        use = self._policy.entries.get(info.key)
        return info if use is None else replace(info, last_used=max(use.last_used, info.last_used))

    def save_uses(self) -> None:
        """Write use counts down, so that eviction knows them after a restart. Failing is only logged."""
        with self._lock:
            used = {key: self._policy.entries[key] for key in self._used if key in self._policy.entries}
            now = {key: replace(use, frequency=self._policy.frequency_now(use)) for key, use in used.items()}
            self._used.clear()
            self._uses_saved = time.monotonic()
        try:
            self.table.save_uses(now)
        except StoreError as error:
            logger.warning("use counts of %s are not saved: %s", self._folder.root, error)

    def enter(self, key: str) -> bool:
        """Enter a file that is not accounted for; False if it is not usable."""
        with self._changing():
            try:
                recovery.enter(self._folder, self.table, self._catalog, key, self._secret)
            except (OSError, ValueError):
                return False
            self._learn_of_new_files()
            self._make_room(0)
            return True

    def clear_after_dead_owners(self) -> None:
        """Settle what processes that died were writing."""
        earlier = {reservation.id for reservation in self.table.reservations()}  # of owners that had a name by now
        num_dead, alive = self._folder.clear_after_dead_owners()
        for reservation in self.table.reservations():
            if reservation.id in earlier and reservation.owner not in alive:
                recovery.settle(self._folder, self.table, self._catalog, reservation, self._secret)
        if num_dead:
            recovery.reconcile(self._folder, self.table, self._catalog, self._secret)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Both locks; another process is waited for without the store's, which requests need to read."""
        while True:
            with ExitStack() as held:
                held.enter_context(self._lock)
                try:
                    with waiting_at_most(0.0):
                        held.enter_context(self.table.database.transaction())
                except StoreBusyError:
                    pass
                else:
                    yield
                    return
            self.table.database.wait_for_writers()

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` more fit in the budget; whether they do."""
        while self.table.total_bytes() + num_bytes > self._budget_bytes:
            victim = self._policy.victim(self._pinned)
            if victim is None:
                return False
            self.drop(victim, self._policy.reason)
        return True

    def _learn_of_new_files(self) -> None:
        """Tell the policy of files that were stored since the last call, by any process."""
        self._last_seq, uses = self.table.uses_after(self._last_seq)
        for key, use in uses:
            self._policy.restore(key, use)

    def _settle_failed_writes(self) -> None:
        """Each in a transaction of its own: one inside a larger one would be undone with it, and forgotten here."""
        while self._unsettled:
            recovery.settle(self._folder, self.table, self._catalog, self._unsettled[-1], self._secret)
            self._unsettled.pop()

    def _note_changed(self, key: str) -> None:
        self._used.add(key)
        if time.monotonic() - self._uses_saved > SAVE_USES_AFTER_S:
            self.save_uses()
