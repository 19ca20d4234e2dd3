"""An env whose every step runs a program in the sandbox and asks the judge of mathematics, and fails unless both do
what they always do."""

from palestra.core.types import Step
from palestra.environments.math.grading import grade_answer
from palestra.envs.base import Env
from palestra.sandbox import open_sandbox

PROGRAM = "import time\ntime.sleep(0.1)\nprint('alive')"


class Judged(Env):
    """One seat, one turn, one reward: 1.0 for any answer."""

    name = "judged"
    seats = ("speaker",)
    roles = {"speaker": "s"}

    def __init__(self, *, split: str = "train") -> None:
        self.sandbox = open_sandbox()

    def reset(self, seed: int) -> Step:
        return Step({"speaker": f"say {seed % 10}"})

    async def step(self, actions: dict[str, str]) -> Step:
        ran = await self.sandbox.run_python(PROGRAM)
        if (ran.stdout, ran.ended, ran.code) != ("alive\n", "exit", 0):
            raise RuntimeError(f"the sandbox answered {ran}")
        grade = await grade_answer("y+x", "x+y", cpu_limit_s=10.0)
        if not grade.is_correct:
            raise RuntimeError(f"the judge answered {grade}")
        return Step({}, {"speaker": 1.0}, 1.0, info={"success": True})
