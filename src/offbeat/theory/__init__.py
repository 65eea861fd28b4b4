"""What theory says of workers of unlike speeds: how long methods take, and how to set them."""

from offbeat.theory.fixed import best_m, rounds_cost

__all__ = ["best_m", "rounds_cost"]
