"""`offbeat launch`: starts the workers of a node, and says what becomes of a loss.

A worker that fails is named in a line. Then, if the job survives losses (`launched` says how the
launcher knows), the others go on, and the worker is started again if that is wanted. Otherwise the
others are ended, as torchrun does it.

The exit code is 0 if workers ended well and the job was not stopped, else 1; after a signal to the
launcher it is 128 and the number of the signal, as a shell has it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from contextlib import suppress

from offbeat import launched
from offbeat.launch.commands import Command
from offbeat.launch.guard import Guard
from offbeat.launch.hosts import ask_for_names_briefly, connect, interface_of
from offbeat.launch.job import (
    LaunchError,
    Slot,
    Store,
    host_store,
    slots,
    survival_variables,
    variables,
)
from offbeat.launch.logs import Logs
from offbeat.launch.nodes import WELL, Nodes
from offbeat.launch.plan import GRACE_S, INTERRUPT_GRACE_S, Plan
from offbeat.launch.signals import Bell, ToldToEndError
from offbeat.launch.streams import say
from offbeat.launch.supervisor import Supervisor, how

FAILED = 1
_SETTLE_S = 0.2
"""So long after a failure the others may still say what they know of it, before they are ended."""
_NO_SURVIVAL = "the job has not said that it survives a loss"
_REST_S = 0.5
"""How long to wait for output that something which workers have left behind may still hold."""
_STORE_S = 60.0
"""How long node 0 keeps the store for other nodes when its own part of the job was stopped."""


def launch(plan: Plan) -> int:
    """Run one node's part of a job; return the exit code."""
    bell = Bell()
    with bell.hearing():
        try:
            return _Launcher(plan, bell).run()
        except ToldToEndError as told:
            say(f"{told} came before all nodes were there; no worker was started")
            return 128 + told.number


class _Launcher:
    def __init__(self, plan: Plan, bell: Bell) -> None:
        self._plan = plan
        self._bell = bell
        self._crew: Supervisor[Command] = Supervisor()
        self._started: list[Command] = []
        self._lost: dict[int, str] = {}
        self._well: set[int] = set()
        self._restarts: dict[int, int] = {}
        self._signal = 0
        self._stopped = ""
        self._failed = False
        self._deadline = math.inf
        """When those who still run are killed."""
        self._lonely_until = math.inf
        """When those who wait to join, and nobody is left to let them in, are ended."""
        self._told: set[int] = set()
        self._logs = Logs(plan.logs, plan.run_id, plan.role)

    def run(self) -> int:
        """From the store to the exit code."""
        ask_for_names_briefly()
        try:
            self._store, interface, standby = self._meeting_place()
            plan = self._plan
            self._nodes = Nodes(self._store, plan.node, plan.nodes)
            per_node = self._nodes.meet(plan.workers, plan.join_s, self._bell.pause, standby)
            self._nodes.reach_standby()
            self._environment = self._common_variables(interface)
            self._run(slots(per_node, self._plan.node))
        finally:
            self._logs.close()
        return self._exit_code()

    def _run(self, places: list[Slot]) -> None:
        self._guard = Guard()
        self._nodes.watch(self._bell.ring)
        try:
            with self._crew:
                for slot in places:
                    self._start(slot, 0)
                self._watch()
            self._say_end()
        finally:
            self._nodes.close()
            self._guard.close()

    # --- starting --------------------------------------------------------------------------

    def _meeting_place(self) -> tuple[Store, str | None, tuple[str, Store] | None]:
        """The store, the interface towards it, and its standby with its address, on node 1."""
        plan = self._plan
        if plan.node == 0:
            store = host_store(plan.port, plan.address)
            return store, _interface_towards(plan.address) if plan.nodes > 1 else None, None
        store, mine = connect(plan.address, plan.port, plan.join_s, self._bell.pause)
        standby = (mine, host_store(address=mine)) if plan.node == 1 else None
        return store, interface_of(mine), standby

    def _common_variables(self, interface: str | None) -> dict[str, str]:
        found = {}
        if self._plan.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = "1"
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            found["GLOO_SOCKET_IFNAME"] = interface  # else Gloo asks for this host's name
        return found

    def _start(self, slot: Slot, attempt: int) -> Command:
        plan = self._plan
        told = {
            **self._environment,
            **variables(slot, plan.address, self._store.port, plan.run_id, plan.role),
            **survival_variables(slot, attempt),
            **({launched.STANDBY: self._nodes.standby} if self._nodes.standby else {}),
            "TORCHELASTIC_MAX_RESTARTS": str(plan.restarts),
            "TORCHELASTIC_ERROR_FILE": str(self._logs.error_file(slot, attempt)),
        }
        streams = self._logs.streams(slot, attempt)
        if attempt:
            self._nodes.joiners.add(slot.worker(attempt))
        worker = Command(plan.command, told, slot, attempt, streams, self._guard)
        self._started.append(worker)
        return self._crew.add(worker)

    # --- watching --------------------------------------------------------------------------

    def _watch(self) -> None:
        while self._crew.running:
            moment = min(self._deadline, self._lonely_until)
            rest_s = None if moment == math.inf else max(0.0, moment - time.monotonic())
            ended, rung = self._crew.wait(rest_s, self._bell)
            if rung:
                self._hear()
            self._see_ends(ended)
            self._leave_no_joiner_behind()
            if time.monotonic() >= self._deadline:
                self._crew.kill()
        if self._stopped:
            self._crew.kill()  # what workers have left behind
        self._pass_on_the_rest()

    def _pass_on_the_rest(self) -> None:
        deadline = time.monotonic() + _REST_S
        for worker in self._started:
            worker.streams.join(max(0.0, deadline - time.monotonic()))

    def _hear(self) -> None:
        for number in self._bell.signals():
            if self._signal:
                self._deadline = time.monotonic()  # asked twice
            else:
                self._signal = number
                name = signal.Signals(number).name
                self._stop(name, number, INTERRUPT_GRACE_S if name == "SIGINT" else GRACE_S)
                if self._nodes.keeps_store:  # the store goes with it
                    self._nodes.say_stop(f"{name} came to the launcher of node {self._plan.node}")
        if self._nodes.stop and not self._stopped:
            say(f"ending {self._those_left()}: {self._nodes.stop}")
            self._stop(self._nodes.stop)
        self._hear_of_nodes()

    def _hear_of_nodes(self) -> None:
        for node in set(self._nodes.ended) - self._told:
            self._told.add(node)
            why = self._nodes.ended[node]
            if why == WELL or self._stopped:
                continue
            say(f"lost node {node}: {why}")
            if not self._nodes.survives:
                say(f"ending {self._those_left()}: {_NO_SURVIVAL}")
                self._stop(f"node {node}: {why}")

    def _stop(
        self, why: str, number: int = signal.SIGTERM, grace_s: float = GRACE_S, failed: bool = True
    ) -> None:
        """Ask all workers of this node to end."""
        self._stopped, self._failed = why, failed
        self._crew.send(number)
        grace_s = grace_s if self._plan.grace_s is None else self._plan.grace_s
        self._deadline = time.monotonic() + grace_s

    def _see_ends(self, ended: list[Command]) -> None:
        failures = [worker for worker in ended if worker.exit_code() != 0]
        self._well |= {worker.rank for worker in ended if worker.exit_code() == 0}
        for worker in failures:
            worker.sweep()
        failures = [worker for worker in failures if not self._came_too_late(worker)]
        if not failures or self._stopped:
            return
        self._nodes.look()
        if self._nodes.survives:
            for worker in failures:
                self._survive(worker)
        else:
            self._end_after(failures)

    def _survive(self, worker: Command) -> None:
        code = worker.exit_code()
        assert code is not None
        self._lost[worker.rank] = how(code)
        left = len(self._crew.running)
        then = f"; {left} of {self._plan.workers} workers here go on"
        done = self._restarts.get(worker.rank, 0)
        if self._nodes.has_moved and done < self._plan.restarts:
            then += "; with the standby of the store nobody new can join: it is not started again"
        elif done < self._plan.restarts and (left > 0 or self._nodes.others_running()):
            self._restarts[worker.rank] = done + 1
            then += f", and {self._started_again(worker.slot, done + 1)}"
        say(f"lost {self._named(worker, then)}")

    def _started_again(self, slot: Slot, attempt: int) -> str:
        """Start a joiner; say so, or why it could not be started. The others go on either way."""
        try:
            pid = self._start(slot, attempt).pid
        except LaunchError as error:
            return f"it could not be started again: {error}"
        times = f"time {attempt} of {self._plan.restarts}"
        return f"it is started again (pid {pid}), {times}"

    def _end_after(self, failures: list[Command]) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while self._crew.running and (rest_s := deadline - time.monotonic()) > 0:
            ended, _ = self._crew.wait(rest_s)
            failures += [worker for worker in ended if worker.exit_code() != 0]
            self._well |= {worker.rank for worker in ended if worker.exit_code() == 0}
        for worker in failures:
            say(self._named(worker))
        first = failures[0]
        why = f"rank {first.rank} {how(first.exit_code() or 0)}"
        if self._crew.running:
            say(f"ending {self._those_left()}: {_NO_SURVIVAL}")
        self._stop(why)
        self._nodes.say_stop(f"{why} on node {self._plan.node}")

    def _those_left(self) -> str:
        count = len(self._crew.running)
        return f"the {count} worker{'s' * (count > 1)} left on this node"

    def _named(self, worker: Command, then: str = "") -> str:
        """Who has ended, how, what follows from it, and what it said last; in one line."""
        worker.streams.join()
        said = self._logs.recorded_error(worker.slot, worker.attempt)
        said = said or worker.streams.err.last_lines()
        words = f"rank {worker.rank} (pid {worker.pid}): it {how(worker.exit_code() or 0)}"
        words = f"{words}, {worker.seconds:.1f} s after its start{then}"
        return f"{words}; it last said: {said}" if said else words

    def _leave_no_joiner_behind(self) -> None:
        """Who waits to join, and nobody is left to let it in, is ended after the grace."""
        running, now = self._crew.running, time.monotonic()
        waiting = [worker for worker in running if self._waits_to_join(worker)]
        alone = len(waiting) == len(running) and not self._nodes.others_running()
        if not waiting or not alone or self._stopped:
            self._lonely_until = math.inf
        elif self._lonely_until == math.inf:
            grace_s = GRACE_S if self._plan.grace_s is None else self._plan.grace_s
            self._lonely_until = now + grace_s
        elif now >= self._lonely_until:
            ranks = ", ".join(str(worker.rank) for worker in waiting)
            say(f"rank {ranks}, which was started again, has nobody left to join, and is ended")
            self._lonely_until = math.inf
            self._stop("nobody was left to join", failed=False)

    def _came_too_late(self, worker: Command) -> bool:
        """Whether it says that the others had ended when it came: that is no failure. Say so."""
        late = worker.exit_code() == launched.TOO_LATE and self._waits_to_join(worker)
        if late:
            say(
                f"rank {worker.rank}, which was started again, came when the others had ended "
                "their training, and has ended, too"
            )
        return late

    def _waits_to_join(self, worker: Command) -> bool:
        return worker.attempt > 0 and worker.slot.worker(worker.attempt) not in self._nodes.joined

    # --- the end ---------------------------------------------------------------------------

    def _say_end(self) -> None:
        """Tell other nodes; who has the store keeps it for those that go on."""
        well = self._well and not self._failed
        self._nodes.say_end(WELL if well else self._stopped or "all its workers failed")
        if not self._nodes.keeps_store or self._signal:
            return
        deadline = time.monotonic() + (_STORE_S if self._failed else math.inf)
        try:
            while self._nodes.others_running() and time.monotonic() < deadline:
                self._bell.pause(0.1)
        except ToldToEndError as told:
            self._signal = told.number

    def _exit_code(self) -> int:
        elsewhere = self._plan.node == 0 and WELL in self._nodes.ended.values()
        good = bool(self._well) or elsewhere
        if self._lost:
            names = ", ".join(f"rank {rank} {what}" for rank, what in sorted(self._lost.items()))
            say(f"{len(self._well)} of {self._plan.workers} workers here ended well; {names}")
        if self._signal:
            return 128 + self._signal
        return 0 if good and not self._failed else FAILED


def _interface_towards(address: str) -> str | None:
    """The interface of this host that has this address, if it has."""
    with suppress(OSError):
        return interface_of(socket.gethostbyname(address))
    return None
