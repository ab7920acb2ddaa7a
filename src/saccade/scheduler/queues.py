"""Where every sequence stands: in one of the two queues, or on a device row.

takes   word of who queues, enters, leaves
gives   the lines in order of rank, and the counts by class
owns    the queues, the running line, the free rows
never   decides who goes where
"""

from collections.abc import Collection
from collections.abc import Sequence as Ordered
from heapq import heappop, heappush

from saccade.scheduler.ordered_queue import Line
from saccade.scheduler.sequence import Sequence


class Places:
    def __init__(self, rows: int) -> None:
        self.waiting = (Line(), Line())  # by class: without, and with views to encode
        self.starved = [False, False]  # whether that line's head last failed for want of rows or memory
        self.running = Line()
        self.rows_of = [0, 0]  # rows taken, by class
        self.running_requests = 0
        self.free_rows = list(range(rows))  # a heap: low rows first
        self._rows = rows

    def queue(self, sequence: Sequence, *, encoding: bool) -> None:
        sequence.encoding = encoding
        self.waiting[encoding].join(sequence)

    def enter(self, sequence: Sequence) -> None:
        """From its queue to a device row."""
        self.waiting[sequence.encoding].leave(sequence)
        self.running.join(sequence)
        self.rows_of[sequence.encoding] += 1
        sequence.row = heappop(self.free_rows)
        sequence.group.rows += 1
        self.running_requests += sequence.group.rows == 1

    def leave(self, sequence: Sequence) -> None:
        """From wherever it is."""
        if sequence.row is None:
            self.waiting[sequence.encoding].leave(sequence)
            return
        self.running.leave(sequence)
        self.rows_of[sequence.encoding] -= 1
        sequence.group.rows -= 1
        self.running_requests -= sequence.group.rows == 0
        heappush(self.free_rows, sequence.row)
        sequence.row = None
        sequence.renewed = False
        sequence.epoch += 1

    def longest_wait(self, prompts: Ordered[list[Sequence]], now: float) -> float:
        """Seconds for which a prompt without a token yet has waited for steps to have time: since it came, or
        since it has a row. Longer steps do nothing for who waits for rows or memory."""
        lines = zip(self.waiting, self.starved, strict=True)
        heads = [line[0].group.since for line, starved in lines if len(line) and not starved]
        fresh = (one for kind in prompts for one in kind if one.length <= one.prompt_length)
        since = heads + [one.group.started_at for one in fresh]
        return now - min(since) if since else 0.0

    @property
    def short_of(self) -> str | None:
        """What the heads of the queues lacked in the step planned last: rows, memory, or time in the step."""
        short = [starved for line, starved in zip(self.waiting, self.starved, strict=True) if line]
        if not short:
            return None
        return "rows" if not self.free_rows else "memory" if any(short) else "time"

    def counted(self) -> dict[str, int]:
        """Names as in EngineStats."""
        return {
            "waiting_encode": len(self.waiting[True]),
            "waiting_other": len(self.waiting[False]),
            "running": self.running_requests,
        }

    def faults(self, everyone: Collection[Sequence]) -> list[str]:
        """What contradicts what; `everyone` are the sequences that have not ended."""
        found = []
        waiting = [*self.waiting[False], *self.waiting[True]]
        if len(waiting) + len(self.running) != len(everyone) or {*everyone} != {*waiting, *self.running}:
            found.append("a sequence is not either waiting or running")
        taken = [-1 if item.row is None else item.row for item in self.running]
        if sorted([*self.free_rows, *taken]) != list(range(self._rows)):
            found.append("a device row is not either free or one sequence's")
        if any(item.row is not None or item.blocks or item.pins or item.computed for item in waiting):
            found.append("a waiting sequence holds something")
        if not all(line.ordered for line in (*self.waiting, self.running)):
            found.append("a line is out of order")
        if self.rows_of != [sum(item.encoding is kind for item in self.running) for kind in (False, True)]:
            found.append("the rows of the classes are miscounted")
        if self.running_requests != len({item.group.request.id for item in self.running}):
            found.append("the running requests are miscounted")
        return found
