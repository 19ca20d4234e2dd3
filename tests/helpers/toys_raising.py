"""A Gymnasium env that raises in the middle of an episode."""

from pathlib import Path
from typing import Any


def write_bad_env(folder: Path) -> dict[str, Any]:
    """Writes games.py to `folder`, and returns the options of its env, which raises at the fourth step."""
    (folder / "games.py").write_text(
        "import gymnasium\n"
        "class Bad(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (2,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    steps = 0\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return self.observation_space.low, {}\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        if self.steps > 3:\n"
        "            raise RuntimeError('the simulator broke')\n"
        "        return self.observation_space.low, 1.0, False, self.steps % 3 == 0, {}\n"
        "gymnasium.register('Bad-v0', Bad)\n"
    )
    return {"type": "gymnasium", "id": "games:Bad-v0", "num_envs": 1}
