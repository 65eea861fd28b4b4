"""The micro-batch at hand: its samples, its gradients, and the time that it takes."""

from __future__ import annotations

from offbeat.replica.devices import Devices
from offbeat.replica.gradients import Gradients
from offbeat.replica.rhythm import Rhythm
from offbeat.rounds import Layout
from offbeat.worlds import World


class MicroBatch:
    """What a worker computes now, and since when."""

    def __init__(self, world: World, layout: Layout) -> None:
        self.world = world
        self.step = 0
        self.gradients = Gradients(layout, alone=world.size == 1)
        self.devices = Devices(layout.parameters)
        self.compute_began = world.now()
        self.round_began = world.now()
        """When this worker applied its latest round."""
        self.round_ended = world.now()
        """When the exchange of the latest round that it knows did."""
        self.rhythm = Rhythm()
        self.stopped = False
        """Whether the micro-batch at hand was left before its end: see `rounds.Queue`."""
        self._charged_samples = 0.0
        self._computed_s: list[float] = []  # of each micro-batch since the last round

    @property
    def samples(self) -> float:
        """The weight of the micro-batch at hand."""
        return self.gradients.samples

    @property
    def seconds(self) -> float:
        """What a micro-batch has taken on average since the last round."""
        return sum(self._computed_s) / len(self._computed_s) if self._computed_s else 0.0

    def _note_end(self, ended_s: float) -> None:
        """This worker knows of a round that has ended then."""
        self.rhythm.add(ended_s - self.round_ended)
        self.round_ended = ended_s

    def declare_samples(self, samples: float) -> None:
        gradients = self.gradients
        if gradients.declared_samples and not gradients.any:
            # Nothing to add to: what was declared went with gradients that no step has taken.
            gradients.declared_samples = self._charged_samples = 0.0
        gradients.declared_samples += samples

    def computed(self) -> float:
        """Let the modelled device's time for the micro-batch pass; return the seconds it took."""
        world, gradients = self.world, self.gradients
        self.devices.finish()
        self.stopped |= self.compute_until(self.compute_began + self.compute_s())
        self.step += 1
        self._charged_samples = gradients.declared_samples
        gradients.brings = gradients.any
        now = world.now()
        computed_s, self.compute_began = now - self.compute_began, now
        self._computed_s.append(computed_s)
        return computed_s

    def compute_until(self, ends_s: float) -> bool:
        """Let the device compute until then; say whether it was stopped before its end."""
        self.world.sleep_until(ends_s)
        return False

    def compute_s(self) -> float:
        """Seconds that the modelled device needs for the micro-batch at hand."""
        samples = self.gradients.declared_samples - self._charged_samples
        return self.world.compute_s(self.step, samples or 1.0, self.compute_began)

    def stepped(self) -> None:
        """The step is over: what follows is the next micro-batch."""
        gradients = self.gradients
        gradients.declared_samples = self._charged_samples = 0.0
        gradients.brings = True
        self.stopped = False
        self.compute_began = self.world.now()
        if not self.step:
            self.round_began = self.compute_began
