"""Which prompts come next: an order that is a function of (seed, epoch), and a place in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.errors import CheckpointError, ConfigError, DataError, explain


class PromptCursor:
    """Hands out row ids; its whole state is (epoch, position).

    The order of epoch e is a permutation drawn by PCG64 from (seed, e), so that a resumed run needs no replay.

    Raises:
        DataError: no rows.
        ConfigError: a negative seed.
    """

    def __init__(self, rows: int, shuffle: bool, seed: int):
        if rows < 1:
            raise DataError(explain("no prompts to draw from", where="PromptCursor", got=f"{rows} rows", expected="at least one"))
        if seed < 0:
            raise ConfigError(explain("negative seed", where="run.seed", got=seed, expected="0 or more"))
        self.rows = rows
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0  # in the order of this epoch, below rows
        self._order = self._order_of(0)

    def take(self, n: int) -> np.ndarray:
        """The next ``n`` row ids, [n] int64; goes on into further epochs (then a row may come twice)."""
        if n < 0:
            raise DataError(explain("negative number of prompts", where="PromptCursor.take", got=n))
        taken = []
        while n > 0:
            part = self._order[self.position : self.position + n]
            taken.append(part)
            n -= len(part)
            self._advance(len(part))
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def _advance(self, count: int) -> None:
        self.position += count
        if self.position == self.rows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.rows, dtype=np.int64)
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.rows).astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; holds what decides the order too, so that a changed data set is noticed."""
        return {"epoch": self.epoch, "position": self.position, "rows": self.rows, "shuffle": self.shuffle, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: the data now has another number of rows.
            ConfigError: another seed or shuffle setting.
            CheckpointError: a state that no cursor wrote.
        """
        if set(state) != set(self.state_dict()) or not (0 <= state["position"] < state["rows"] and state["epoch"] >= 0):
            raise CheckpointError(
                explain("state of a prompt cursor", got=state, expected=f"keys {sorted(self.state_dict())}, position below rows")
            )
        if state["rows"] != self.rows:
            raise DataError(
                explain(
                    "the data changed since the checkpoint: a place in the old order means nothing in the new one",
                    where="PromptCursor",
                    got=f"{self.rows} prompts",
                    expected=f"{state['rows']} prompts, as in the checkpoint",
                    do="resume with the data of the checkpoint, or start a new run from its exported model",
                )
            )
        for name, now in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != now:
                raise ConfigError(explain(f"another {name} than in the checkpoint", where="PromptCursor", got=now, expected=state[name]))
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)
