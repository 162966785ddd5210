"""How pytest-xdist shares out a run: which items stay together, and what happens when a kernel dies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from xdist.scheduler import LoadScopeScheduling

#: the name that an item of ours has: target[property-dtype]
ITEM = re.compile(r"::(?P<target>.*)\[(?P<property>[^\[\]]*)-(?P<dtype>\w+)\]$")


def groups(nodeids: Sequence[str], workers: int) -> dict[str, str]:
    """nodeid -> group. Items of one group run in one process and share its exact answers.

    Candidates and properties share their cases dtype by dtype, so the widest group is a dtype;
    narrower ones are taken where that would leave workers idle. Items that are not ours are alone.
    """
    found = {nodeid: ITEM.search(nodeid) for nodeid in nodeids}
    for parts in (("dtype",), ("target", "dtype"), ("target", "property", "dtype")):
        named = {nodeid: "\n".join(m[p] for p in parts) if m else nodeid for nodeid, m in found.items()}
        count = len(set(named.values()))
        # equal shares, or enough groups that the last one does not keep the other workers waiting
        if count % workers == 0 or count >= 4 * workers:
            break
    return named


class Scheduling(LoadScopeScheduling):
    """xdist's scheduling by group. An item that killed its worker is not tried again, and the worker
    that replaces it gets what the dead one had left (xdist's own waits for ever there)."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._groups:
            self._groups = groups(self.collection or [], self.numnodes)
        return self._groups[nodeid]

    def remove_node(self, node: Any) -> str | None:
        workload = self.assigned_work.pop(node)
        killer = next((item for unit in workload.values() for item, done in unit.items() if not done), None)
        if killer is None:
            return None
        for scope, unit in workload.items():
            left = {item: done for item, done in unit.items() if not done and item != killer}
            if left:
                self.workqueue[scope] = left
        for other in self.nodes:
            self._reschedule(other)
        return killer

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections or node.shutting_down:
            return  # one that replaces a dead worker and is not ready yet, or one that is done
        # a worker holds its last item until it gets more, or is told that there is no more
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
