"""JaxMARL's own QMIX on a map of SMAX: the unchanged script of its repository, with its settings for SMAX, except for
the map, the length of the run and, with `hidden`, the width of all networks.

The script reports to Weights & Biases; a module in its place records the metrics here. It runs one seed without `vmap`,
under which XLA would compute a test in every update. Ends with the run, or after `seconds` of CPU time.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from types import ModuleType
from typing import Any

import jax

STEPS = 1_000_000
SETTINGS: dict[str, Any] = {  # baselines/QLearning/config/alg/ql_rnn_smax.yaml
    "TOTAL_TIMESTEPS": STEPS,
    "NUM_ENVS": 16,
    "NUM_STEPS": 128,
    "BUFFER_SIZE": 5000,
    "BUFFER_BATCH_SIZE": 32,
    "HIDDEN_SIZE": 512,
    "MIXER_EMBEDDING_DIM": 64,
    "MIXER_HYPERNET_HIDDEN_DIM": 256,
    "MIXER_INIT_SCALE": 0.001,
    "EPS_START": 1.0,
    "EPS_FINISH": 0.05,
    "EPS_DECAY": 0.1,
    "MAX_GRAD_NORM": 10,
    "TARGET_UPDATE_INTERVAL": 10,
    "TAU": 1.0,
    "NUM_EPOCHS": 8,
    "LR": 0.00005,
    "LEARNING_STARTS": 10000,
    "LR_LINEAR_DECAY": False,
    "GAMMA": 0.99,
    "REW_SCALE": 10.0,
    "ENV_NAME": "HeuristicEnemySMAX",
    "ENV_KWARGS": {"see_enemy_actions": True, "walls_cause_death": True, "attack_mode": "closest"},
    "TEST_DURING_TRAINING": True,
    "TEST_INTERVAL": 0.05,
    "TEST_NUM_STEPS": 128,
    "TEST_NUM_ENVS": 512,
    "WANDB_MODE": "online",
}
TESTED = int(STEPS // (SETTINGS["NUM_STEPS"] * SETTINGS["NUM_ENVS"]) * SETTINGS["TEST_INTERVAL"])  # updates in between


class Notes:
    """CPU seconds of updates, without tests and the time before learning begins, and the share of test games won."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.process_time()
        self.last, self.spent, self.updates = self.start, 0.0, 0
        self.curve: list[tuple[int, float]] = []

    def note(self, metrics: dict[str, Any]) -> None:
        now, update = time.process_time(), int(metrics["update_steps"])
        if update % TESTED == 0:
            self.curve.append((int(metrics["env_step"]), float(metrics["test_returned_won_episode"])))
        elif int(metrics["env_step"]) > 2 * SETTINGS["LEARNING_STARTS"]:
            self.spent, self.updates = self.spent + now - self.last, self.updates + 1
        self.last = now
        if now - self.start > self.seconds:
            self.print_result()
            os._exit(0)  # nothing else ends a compiled loop

    def print_result(self) -> None:
        from importlib.metadata import version

        steps = self.updates * SETTINGS["NUM_STEPS"] * SETTINGS["NUM_ENVS"]
        figures = {
            "cpu_s_per_million": self.spent / steps * 1e6 if steps else math.nan,
            "curve": self.curve,
            "versions": {name: version(name) for name in ("jaxmarl", "jax")},
        }
        print(json.dumps(figures), flush=True)


def main(script: str, scenario: str, hidden: int | None, seconds: float) -> None:
    notes = Notes(seconds)
    reports: Any = ModuleType("wandb")
    reports.log = notes.note
    sys.modules["wandb"] = reports
    sys.path.insert(0, os.path.dirname(script))
    import qmix_rnn  # type: ignore[import-not-found]

    settings = SETTINGS | {"MAP_NAME": scenario}
    if hidden:
        settings |= {"HIDDEN_SIZE": hidden, "MIXER_EMBEDDING_DIM": hidden // 2, "MIXER_HYPERNET_HIDDEN_DIM": hidden}
    env, _ = qmix_rnn.env_from_config(settings)
    jax.block_until_ready(jax.jit(qmix_rnn.make_train(settings, env))(jax.random.PRNGKey(0)))
    notes.print_result()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    main(options["script"], options["map"], options["hidden"], options["seconds"])
